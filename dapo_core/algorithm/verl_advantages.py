"""Advantages as verl computes them, for algorithm.compat=verl."""

from __future__ import annotations

import numpy as np
import torch

STD_FLOOR = 1e-6
VERL_ADVANTAGES = ("grpo", "dr-grpo", "rloo")  # of algorithm.advantage


def verl_advantages(rewards: np.ndarray, group_ids: np.ndarray, name: str) -> np.ndarray:
    """Return verl's float32 advantages, of its compute_{grpo,rloo}_outcome_advantage.

    Equal rewards keep rounding noise: eight of -1.3 have std 1.3e-7 and get 0.1057. A group of one
    has mean 0 and std 1, so its advantage is the reward itself.
    """
    order = np.argsort(group_ids, kind="stable")
    sizes = np.unique(group_ids, return_counts=True)[1]
    scores = torch.from_numpy(rewards[order].astype(np.float32))
    parts = []
    for group in scores.split(sizes.tolist()):
        num = len(group)
        mean, std = (
            (group.mean(), group.std()) if num > 1 else (torch.tensor(0.0), torch.tensor(1.0))
        )
        if name == "rloo" and num > 1:
            part = group * num / (num - 1) - mean * num / (num - 1)
        else:
            part = group - mean
        parts.append(part / (std + STD_FLOOR) if name == "grpo" else part)
    advantages = np.empty(len(rewards), dtype=np.float32)
    advantages[order] = torch.cat(parts).numpy()
    return advantages
