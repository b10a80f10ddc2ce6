"""Hand-made groups and batches for tests."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dapo_core.algorithm.batch import Batch, build_batch
from dapo_core.algorithm.loss import LossTotals
from dapo_core.algorithm.loss_tokens import LossTokens, Responses
from dapo_core.config.algorithm import AlgorithmConfig
from dapo_core.draw.groups import Group, Rollout
from dapo_core.draw.prompts import Prompt
from dapo_core.model.inputs import ModelInput
from dapo_core.reward.scorers import Verdict

UNSCORED = float("nan")  # the reward of a response whose scorer timed out
NO_ANSWER = -2.0  # the reward of a response without an answer


def verdict_of(reward: float) -> Verdict:
    if math.isnan(reward):
        return "timeout"
    return "no_answer" if reward == NO_ANSWER else "right" if reward > 0 else "wrong"


def make_group(
    rewards: Sequence[float],
    index: int = 0,
    num_response_tokens: int | Sequence[int] = 3,
    num_prompt_tokens: int = 4,
    policy_version: int = 0,
    seed: int = 0,
) -> Group:
    """A group with the given scores (above 0: right) and lengths; random tokens in [5, 200)."""
    draw = random.Random(f"{seed}/{index}")
    lengths = (
        [num_response_tokens] * len(rewards)
        if isinstance(num_response_tokens, int)
        else num_response_tokens
    )
    rollouts = [
        Rollout(
            response_ids=np.array([draw.randrange(5, 200) for _ in range(length)], np.int32),
            rollout_log_probs=np.full(length, -1.5, np.float32),
            finish_reason="stop",
            score=0.0 if math.isnan(reward) else reward,
            overlong_penalty=0.0,
            verdict=verdict_of(reward),
            acc=float(reward > 0),
            versions=[(policy_version, length)] if length else [],
        )
        for reward, length in zip(rewards, lengths, strict=True)
    ]
    prompt_ids = tuple(draw.randrange(5, 200) for _ in range(num_prompt_tokens))
    return Group(index, Prompt(index, ModelInput(prompt_ids), "arithmetic", "1"), rollouts)


def random_batch(num_groups: int, group_size: int, seed: int = 0) -> Batch:
    """A batch of uneven prompts and responses with advantages that sum to nothing in particular."""
    draw = random.Random(seed)
    groups = [
        make_group(
            [1.0] * group_size,
            index,
            [draw.randrange(1, 14) for _ in range(group_size)],
            draw.randrange(2, 9),
            seed=seed,
        )
        for index in range(num_groups)
    ]
    advantages = np.array([draw.uniform(-2, 2) for _ in range(num_groups * group_size)])
    return replace(
        build_batch(groups, mask_truncated=False), advantages=torch.as_tensor(advantages).float()
    )


def row_numbers(mask: torch.Tensor) -> torch.Tensor:
    """The row of each token of a [b, R] mask."""
    return torch.arange(len(mask)).unsqueeze(-1).expand(mask.shape)


def rows_of(mask: torch.Tensor) -> Responses:
    """The rows of a [b, R] mask as responses."""
    return Responses(row_numbers(mask), len(mask))


def loss_tokens_of(batch: Batch, algorithm: AlgorithmConfig) -> LossTokens:
    """Return the loss's inputs for a whole mini-batch with old log-probs: padded [B, R]."""
    assert batch.old_log_probs is not None
    mask = batch.response_mask
    return LossTokens(
        old_log_probs=batch.old_log_probs,
        advantages=batch.advantages.unsqueeze(-1).expand(mask.shape),
        response_mask=mask,
        weights=LossTotals.of(batch).token_weights(mask, algorithm),
        responses=rows_of(mask),
        ref_log_probs=batch.ref_log_probs,
        is_selected=batch.is_selected,
    )


def one_by_one(
    model: Any, batch: Batch, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropy of the responses by plain transformers, one sequence at a time: [B, R],
    0 beyond a response.
    """
    log_probs, entropy = (torch.zeros(batch.response_mask.shape) for _ in range(2))
    for row in range(batch.num_responses):
        start, count = int(batch.prompt_lengths[row]), int(batch.response_lengths[row])
        ids = batch.token_ids[row, : start + count].long()
        logits = model(input_ids=ids.unsqueeze(0)).logits[0, start - 1 : -1] / temperature
        chosen = logits.log_softmax(-1).gather(1, ids[start:].unsqueeze(-1))
        log_probs[row, :count] = chosen.squeeze(-1)
        distribution = torch.distributions.Categorical(logits=logits, validate_args=False)
        entropy[row, :count] = distribution.entropy()
    return log_probs, entropy
