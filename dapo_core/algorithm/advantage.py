"""Advantages by name (`algorithm.advantage`), and rollout correction of a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from dapo_core.algorithm.correction import importance_weights, mask_rollouts
from dapo_core.algorithm.verl_advantages import STD_FLOOR, VERL_ADVANTAGES, verl_advantages
from dapo_core.config.compat import Compat

if TYPE_CHECKING:
    from dapo_core.algorithm.batch import Batch, TokenStats
    from dapo_core.config.algorithm import AlgorithmConfig
    from dapo_core.config.training import TrainingConfig

VARIANCE_FLOOR = 1e-8


def weigh(batch: Batch, config: TrainingConfig, stats: TokenStats | None = None) -> Batch:
    """Return the batch with advantages, importance weights and the corrected response mask.

    `stats` holds the policy's log-probs before any update; they may differ from the batch's
    anchor. If the batch has no old log-probs, the update computes the correction from its own.
    """
    advantages = response_advantages(
        batch.rewards.numpy(),
        batch.group_ids.numpy(),
        config.algorithm,
        counts=batch.is_scored.numpy(),
        num_tokens=batch.response_mask.sum(dim=-1).numpy(),
    )
    batch = replace(batch, advantages=torch.from_numpy(advantages))
    if batch.old_log_probs is None:
        return batch
    log_probs = batch.old_log_probs if stats is None else stats.log_probs
    compared = (log_probs, batch.rollout_log_probs, batch.response_mask)
    weights = importance_weights(*compared, batch.is_stale, config.rollout_correction)
    mask = mask_rollouts(*compared, config.rollout_correction)
    return replace(batch, importance_weights=weights, response_mask=mask)


@dataclass(frozen=True)
class Rewards:
    """The rewards of a step's responses."""

    values: np.ndarray  # [B] float64
    group: np.ndarray  # [B]: number of the response's group, from 0
    num_tokens: np.ndarray  # [B]: tokens that train

    @cached_property
    def sizes(self) -> np.ndarray:
        """Responses of each group: [P]."""
        return np.bincount(self.group)

    @cached_property
    def centred(self) -> np.ndarray:
        """Difference from the group's mean: [B]."""
        return self.values - (np.bincount(self.group, self.values) / self.sizes)[self.group]

    @cached_property
    def has_signal(self) -> np.ndarray:
        """Whether the rewards of the group differ: [B] bool.

        Tested as min < max, because the std of equal rewards is not exactly 0 in floating point.
        """
        lowest, highest = np.full(len(self.sizes), np.inf), np.full(len(self.sizes), -np.inf)
        np.minimum.at(lowest, self.group, self.values)
        np.maximum.at(highest, self.group, self.values)
        return (lowest < highest)[self.group]


def _grpo(rewards: Rewards) -> np.ndarray:
    """(R - mean) / (std + 1e-6) of the group, with the unbiased std (DAPO, eq. 9)."""
    variance = np.bincount(rewards.group, rewards.centred**2) / np.maximum(rewards.sizes - 1, 1)
    std = np.sqrt(variance).astype(np.float32) + np.float32(STD_FLOOR)
    return rewards.centred.astype(np.float32) / std[rewards.group]


def _dr_grpo(rewards: Rewards) -> np.ndarray:
    """R - mean of the group (Dr. GRPO, arXiv:2503.20783)."""
    return rewards.centred


def _rloo(rewards: Rewards) -> np.ndarray:
    """R - mean of the siblings = N / (N - 1) (R - mean) (RLOO, arXiv:2402.14740)."""
    scale = rewards.sizes / np.maximum(rewards.sizes - 1, 1)
    return rewards.centred * scale[rewards.group]


def _opo(rewards: Rewards) -> np.ndarray:
    """R - mean of the group weighted by tokens (OPO, arXiv:2505.23585)."""
    tokens = np.bincount(rewards.group, rewards.num_tokens)
    sums = np.bincount(rewards.group, rewards.num_tokens * rewards.values)
    return rewards.values - (sums / np.maximum(tokens, 1))[rewards.group]


def _reinforce(rewards: Rewards) -> np.ndarray:
    """R, whitened over the tokens of the step (REINFORCE++, arXiv:2501.03262)."""
    return _whitened(rewards.values, rewards.num_tokens)


def _reinforce_baseline(rewards: Rewards) -> np.ndarray:
    """R - mean of the group, whitened over the tokens of the step (REINFORCE++)."""
    return _whitened(rewards.centred, rewards.num_tokens)


def _batch_std(rewards: Rewards) -> np.ndarray:
    """(R - mean of the group) / (std of R over the step + 1e-6) (Lite PPO, arXiv:2508.08221)."""
    return rewards.centred / (rewards.values.std(ddof=min(len(rewards.values) - 1, 1)) + STD_FLOOR)


def _whitened(values: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
    """Return (x - mean) / sqrt(variance + 1e-8), each response counted once per token."""
    total = int(num_tokens.sum())
    deviation = values - (num_tokens * values).sum() / max(total, 1)
    variance = (num_tokens * deviation**2).sum() / max(total - 1, 1)
    return deviation / np.sqrt(variance + VARIANCE_FLOOR)


ADVANTAGES: dict[str, Callable[[Rewards], np.ndarray]] = {
    "grpo": _grpo,
    "dr-grpo": _dr_grpo,
    "rloo": _rloo,
    "opo": _opo,
    "reinforce++": _reinforce,
    "reinforce++-baseline": _reinforce_baseline,
    "batch-std": _batch_std,
}
WHITENED = ("reinforce++", "reinforce++-baseline")  # not 0 for a group with equal rewards


def response_advantages(
    rewards: np.ndarray,
    group_ids: np.ndarray,
    algorithm: AlgorithmConfig,
    counts: np.ndarray | None = None,
    num_tokens: np.ndarray | None = None,
) -> np.ndarray:
    """Return the advantage of each response: float32 [B].

    A group with equal rewards, or of one, gets exactly 0, except with a whitened estimator.
    compat=verl computes grpo, dr-grpo and rloo in float32, and without that test.

    rewards: [B]; group_ids: [B] integers; counts: [B] bool, None for all; num_tokens: [B] trained
    tokens, None for one each. Responses that do not count get 0 and are left out. Raises
    ValueError if a reward is not finite.
    """
    num_tokens = np.ones(len(rewards), dtype=np.int64) if num_tokens is None else num_tokens
    if counts is not None:
        counted = np.zeros(len(rewards), dtype=np.float32)
        if counts.any():
            chosen = (rewards[counts], group_ids[counts], algorithm, None, num_tokens[counts])
            counted[counts] = response_advantages(*chosen)
        return counted
    rewards = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(rewards).all():
        raise ValueError(
            f"{int((~np.isfinite(rewards)).sum())} of {rewards.size} rewards are not finite"
        )
    name = algorithm.advantage
    if Compat.of(algorithm).advantages_in_float32 and name in VERL_ADVANTAGES:
        return verl_advantages(rewards, group_ids, name)
    grouped = Rewards(rewards, np.unique(group_ids, return_inverse=True)[1], num_tokens)
    advantages = ADVANTAGES[name](grouped).astype(np.float32)
    return (
        advantages if name in WHITENED else np.where(grouped.has_signal, advantages, np.float32(0))
    )
