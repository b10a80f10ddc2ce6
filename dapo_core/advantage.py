"""Group-relative advantages."""

from __future__ import annotations

import numpy as np

STD_FLOOR = 1e-6


def group_advantages(rewards: np.ndarray, group_ids: np.ndarray, normalize_by_std: bool = True) -> np.ndarray:
    """Advantage of each response against the siblings of its prompt: float32 [B].

    A_i = (R_i - mean) / (std + 1e-6) with the unbiased std (N - 1), or R_i - mean without the division
    (DAPO, arXiv:2503.14476, eq. 9). A group whose rewards are all equal, also a group of one, gets exactly 0:
    equality is tested as min == max, because the std of equal rewards is not exactly 0 in floating point.
    Mean and std are taken in float64, the division in float32, as the loss uses it.

    rewards: [B]; group_ids: [B], any hashable integers. Raises ValueError for a reward that is not finite.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(rewards).all():
        raise ValueError(f"{int((~np.isfinite(rewards)).sum())} of {rewards.size} rewards are not finite")
    advantages = np.zeros(rewards.shape, dtype=np.float32)
    for group in np.unique(group_ids):
        members = group_ids == group
        group_rewards = rewards[members]
        if group_rewards.min() == group_rewards.max():
            continue
        centred = (group_rewards - group_rewards.mean()).astype(np.float32)
        scale = np.float32(group_rewards.std(ddof=1)) + np.float32(STD_FLOOR)
        advantages[members] = centred / scale if normalize_by_std else centred
    return advantages
