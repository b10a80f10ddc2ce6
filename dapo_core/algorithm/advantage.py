"""Group-relative advantages, and rollout correction of a batch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from dapo_core.algorithm.correction import importance_weights, mask_rollouts
from dapo_core.algorithm.verl_advantages import STD_FLOOR, verl_advantages
from dapo_core.config.compat import Compat

if TYPE_CHECKING:
    from dapo_core.algorithm.batch import Batch, TokenStats
    from dapo_core.config.algorithm import AlgorithmConfig
    from dapo_core.config.training import TrainingConfig


def weigh(batch: Batch, config: TrainingConfig, stats: TokenStats | None = None) -> Batch:
    """Return the batch with advantages, importance weights and the corrected response mask.

    `stats` holds the policy's log-probs before any update; they may differ from the batch's
    anchor. If the batch has no old log-probs, the update computes the correction from its own.
    """
    advantages = group_advantages(
        batch.rewards.numpy(), batch.group_ids.numpy(), config.algorithm, batch.is_scored.numpy()
    )
    batch = replace(batch, advantages=torch.from_numpy(advantages))
    if batch.old_log_probs is None:
        return batch
    log_probs = batch.old_log_probs if stats is None else stats.log_probs
    compared = (log_probs, batch.rollout_log_probs, batch.response_mask)
    weights = importance_weights(*compared, batch.is_stale, config.rollout_correction)
    mask = mask_rollouts(*compared, config.rollout_correction)
    return replace(batch, importance_weights=weights, response_mask=mask)


def group_advantages(
    rewards: np.ndarray,
    group_ids: np.ndarray,
    algorithm: AlgorithmConfig,
    counts: np.ndarray | None = None,
) -> np.ndarray:
    """Return the advantage of each response within its group: float32 [B].

    baseline=group-mean: A_i = R_i - mean. leave-one-out: A_i = R_i - mean of the others = N / (N -
    1) * (R_i - mean) (RLOO, arXiv:2402.14740). `normalize_by_std` divides by std + 1e-6, with the
    unbiased (N - 1) std; with group-mean, this is DAPO, arXiv:2503.14476, eq. 9.

    A group with equal rewards, or of one, gets exactly 0: tested as min == max, because the std of
    equal rewards is not exactly 0 in floating point. Mean and std are float64, the division
    float32. compat=verl computes in float32 and without that test.

    rewards: [B]; group_ids: [B] integers; counts: [B] bool, None for all. Responses that do not
    count get 0 and are left out of their group. Raises ValueError if a reward is not finite.
    """
    if counts is not None:
        counted = np.zeros(len(rewards), dtype=np.float32)
        if counts.any():
            counted[counts] = group_advantages(rewards[counts], group_ids[counts], algorithm)
        return counted
    rewards = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(rewards).all():
        raise ValueError(
            f"{int((~np.isfinite(rewards)).sum())} of {rewards.size} rewards are not finite"
        )
    if Compat.of(algorithm).advantages_in_float32:
        return verl_advantages(rewards, group_ids, algorithm)
    _, group, sizes = np.unique(group_ids, return_inverse=True, return_counts=True)
    centred = rewards - (np.bincount(group, rewards) / sizes)[group]
    num_others = np.maximum(sizes - 1, 1)
    advantages = (
        centred if algorithm.baseline == "group-mean" else centred * (sizes / num_others)[group]
    )
    advantages = advantages.astype(np.float32)
    if algorithm.normalize_by_std:
        std = np.sqrt(np.bincount(group, centred**2) / num_others)
        advantages /= (std.astype(np.float32) + np.float32(STD_FLOOR))[group]
    lowest, highest = np.full(len(sizes), np.inf), np.full(len(sizes), -np.inf)
    np.minimum.at(lowest, group, rewards)
    np.maximum.at(highest, group, rewards)
    return np.where((lowest < highest)[group], advantages, np.float32(0))
