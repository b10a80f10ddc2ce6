"""Batches of tensors, built from groups and split over ranks and micro-batches.

P prompts, G responses per prompt, B = P*G responses, R response tokens, T prompt+response tokens, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
import torch

from dapo_core.draw.groups import Group, Rollout
from dapo_core.memory.engine import PROBE_TOKENS
from dapo_core.model.inputs import ImageReference
from dapo_core.model.routers import Experts, unknown

# A shared prompt needs an attention mask and keeps siblings together, so it must save many tokens.
MIN_PROMPT_SHARE = 0.25  # of a sequence


@dataclass(frozen=True)
class Batch:
    """B prompt+response sequences, padded on the right.

    Example with prompt (5, 6), response (7, 8, 2) and T = 6: token_ids [[5, 6, 7, 8, 2, 0]],
    prompt_lengths [2], response_lengths [3]; R = 3 and position r of [B, R] fields is response
    token r.
    """

    token_ids: torch.Tensor  # [B, T] int32
    prompt_lengths: torch.Tensor  # [B]
    response_lengths: torch.Tensor  # [B]
    response_mask: torch.Tensor  # [B, R] bool: tokens we train
    group_ids: torch.Tensor  # [B] int64, equal for siblings
    rewards: torch.Tensor  # [B] float64
    is_scored: torch.Tensor  # [B] bool: the scorer succeeded
    rollout_log_probs: torch.Tensor  # [B, R] float32, 0 beyond the response
    is_stale: torch.Tensor  # [B, R] bool: sampled by an older policy than the step's
    advantages: torch.Tensor  # [B] float32; NaN until advantage.weigh
    # [B, R] float32; None before PolicyGroup.anchor, and if the update computes them itself
    old_log_probs: torch.Tensor | None = None
    # [B, R] float32, of the reference model; None without KL
    ref_log_probs: torch.Tensor | None = None
    # [B, R] float32, truncated policy/engine ratios; None when off
    importance_weights: torch.Tensor | None = None
    # [B, R] bool, chosen by covariance in the mini-batch; None if the loss does not need it
    is_selected: torch.Tensor | None = None
    # [B], experts that the policy uses instead of its own; None: its own
    routing: Sequence[Experts] | None = None
    # [B], the pictures of each prompt; None: no prompt has any
    images: Sequence[tuple[ImageReference, ...]] | None = None

    @property
    def num_responses(self) -> int:
        return len(self.token_ids)

    @property
    def num_groups(self) -> int:
        return int(self.group_ids[-1]) + 1

    @property
    def is_response(self) -> torch.Tensor:
        """True on response tokens, trained or not: [B, R] bool."""
        return torch.arange(self.response_mask.shape[1]) < self.response_lengths.unsqueeze(-1)

    @property
    def is_fresh(self) -> torch.Tensor:
        """True on trained tokens that the step's own policy sampled: [B, R] bool.

        With an engine's routing, only in responses without older tokens: their experts are those of
        older weights, while the engine computed the later tokens after the new weights' experts.
        """
        is_old = self.is_stale
        if self.routing is not None:
            is_old = is_old.any(dim=-1, keepdim=True)
        return self.response_mask & ~is_old

    @property
    def lengths(self) -> np.ndarray:
        """Prompt+response tokens of each row: [B] int64."""
        return (self.prompt_lengths + self.response_lengths).numpy()

    @property
    def prompt_owners(self) -> np.ndarray:
        """The row whose prompt tokens each row uses: [B], the row itself unless siblings share.

        Siblings share if the prompt is at least `MIN_PROMPT_SHARE` of the tokens of each, and if
        the routing to replay in it is the same. Example with siblings of a prompt of 4 tokens and
        responses of 2, 13 and 3, where 13 is more than three times 4: [0, 1, 0].
        """
        prompt_lengths = self.prompt_lengths.numpy()
        is_long = prompt_lengths >= MIN_PROMPT_SHARE * self.lengths
        owners = np.arange(self.num_responses)
        first: dict[int, int] = {}  # sharing row of each group
        for row in np.flatnonzero(is_long).tolist():
            owner = first.setdefault(int(self.group_ids[row]), row)
            count = prompt_lengths[row]
            if self.routing is None or np.array_equal(
                self.routing[owner][:count], self.routing[row][:count]
            ):
                owners[row] = owner
        return owners

    @property
    def probe(self) -> Batch:
        """One row, with pictures if any row has some, for the policy's own routing.

        A response of several tokens loses the last: vLLM scores a sequence only if it could sample
        one more. A longer sequence ends after PROBE_TOKENS, whose logits vLLM holds at once.
        """
        pictured = [row for row, images in enumerate(self.images or ()) if images]
        num_scored = self.response_lengths - (self.response_lengths > 1).long()
        num_scored = num_scored.minimum((PROBE_TOKENS - self.prompt_lengths).clamp(min=1))
        shorter = replace(self, response_lengths=num_scored, routing=None)
        return shorter.select([*pictured, 0][:1])

    def select(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """Return the given rows in the given order, trimmed to their longest sequence."""
        rows = torch.from_numpy(np.array(indices, dtype=np.int64))
        num_response_tokens = max(int(self.response_lengths[rows].max()), 1)
        widths = dict.fromkeys(_PER_RESPONSE_TOKEN, num_response_tokens)
        widths["token_ids"] = int(self.lengths[rows].max())
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        routing, images = values.pop("routing"), values.pop("images")
        present = {name: value for name, value in values.items() if value is not None}
        return Batch(
            **{name: value[rows][..., : widths.get(name)] for name, value in present.items()},
            routing=None if routing is None else [routing[row] for row in rows],
            images=None if images is None else [images[row] for row in rows],
        )


_PER_RESPONSE_TOKEN = (
    "response_mask",
    "rollout_log_probs",
    "is_stale",
    "old_log_probs",
    "ref_log_probs",
    "importance_weights",
    "is_selected",
)


def random_order(count: int, seed: int, *numbers: int) -> np.ndarray:
    """Return a permutation of 0 to count - 1, seeded by `seed` and numbers such as the step."""
    return np.random.default_rng([seed, *numbers]).permutation(count)


def shuffled(groups: Sequence[Group], seed: int, step: int) -> list[Group]:
    """Return the groups in a random order, seeded by the seed and the step."""
    return [groups[number] for number in random_order(len(groups), seed, step)]


def build_batch(groups: Sequence[Group], mask_truncated: bool, policy_version: int = 0) -> Batch:
    """Return the groups' responses as one batch, in order.

    Responses without a score are masked, and with `mask_truncated` also those cut by the length
    limit. Tokens sampled before `policy_version` are stale. Old log-probs are None and advantages
    NaN.
    """
    prompts = [np.array(group.prompt.input.token_ids) for group in groups]
    images = [group.prompt.input.images for group in groups for _ in group.rollouts]
    pairs = [
        (prompt_ids, rollout)
        for prompt_ids, group in zip(prompts, groups, strict=True)
        for rollout in group.rollouts
    ]
    group_ids = [number for number, group in enumerate(groups) for _ in group.rollouts]
    prompt_lengths = [len(prompt_ids) for prompt_ids, _ in pairs]
    response_lengths = [len(rollout.response_ids) for _, rollout in pairs]
    width = max(p + r for p, r in zip(prompt_lengths, response_lengths, strict=True))
    num_response_tokens = max(*response_lengths, 1)
    token_ids = np.zeros((len(pairs), width), np.int32)
    rollout_log_probs = np.zeros((len(pairs), num_response_tokens), np.float32)
    mask = np.zeros(rollout_log_probs.shape, np.bool_)
    is_stale = np.zeros_like(mask)
    for row, (prompt_ids, rollout) in enumerate(pairs):
        start, length = prompt_lengths[row], response_lengths[row]
        token_ids[row, :start] = prompt_ids
        token_ids[row, start : start + length] = rollout.response_ids
        rollout_log_probs[row, :length] = rollout.rollout_log_probs
        mask[row, :length] = rollout.is_scored and not (mask_truncated and rollout.is_truncated)
        first = 0
        for version, num_tokens in rollout.versions:
            is_stale[row, first : first + num_tokens] = version < policy_version
            first += num_tokens
    return Batch(
        token_ids=torch.from_numpy(token_ids),
        prompt_lengths=torch.tensor(prompt_lengths),
        response_lengths=torch.tensor(response_lengths),
        response_mask=torch.from_numpy(mask),
        group_ids=torch.tensor(group_ids),
        rewards=torch.tensor([rollout.reward for _, rollout in pairs], dtype=torch.float64),
        is_scored=torch.tensor([rollout.is_scored for _, rollout in pairs]),
        rollout_log_probs=torch.from_numpy(rollout_log_probs),
        is_stale=torch.from_numpy(is_stale),
        advantages=torch.full((len(pairs),), float("nan")),
        routing=_routing([(len(p), rollout) for p, rollout in pairs]),
        images=images if any(images) else None,
    )


def _routing(rollouts: Sequence[tuple[int, Rollout]]) -> list[Experts] | None:
    """Return the rollouts' routing, given their prompt tokens; None if the engine recorded none."""
    shapes = [rollout.routing.shape[1:] for _, rollout in rollouts if rollout.routing.size]
    if not shapes:
        return None
    return [
        rollout.routing if rollout.routing.size else unknown(num_prompt_tokens, shapes[0])
        for num_prompt_tokens, rollout in rollouts
    ]


class TokenStats(NamedTuple):
    """Log-probs and entropy under the policy; 0 beyond each response."""

    log_probs: torch.Tensor  # [B, R] float32, at the sampling temperature
    entropy: torch.Tensor  # [B, R] float32
