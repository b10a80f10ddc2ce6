"""Selects tokens of a mini-batch by covariance, for the losses clip-cov and kl-cov."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from dapo_core.algorithm.batch import Batch, random_order

if TYPE_CHECKING:
    from dapo_core.config.algorithm import AlgorithmConfig


def select_tokens(batch: Batch, algorithm: AlgorithmConfig, seed: int, *numbers: int) -> Batch:
    """Return the mini-batch with `is_selected`, or unchanged if the loss does not need it.

    A token's covariance is (A - mean A) (log-prob - mean log-prob), with the old log-probs and the
    means over the mini-batch's tokens (arXiv:2505.22617, eq. 9). kl-cov takes the highest, clip-cov
    random ones between its bounds, seeded by the numbers of the mini-batch.
    """
    if not algorithm.selects_tokens:
        return batch
    assert batch.old_log_probs is not None, "TrainingConfig.anchors_before_updates"
    mask = batch.response_mask
    log_probs = batch.old_log_probs[mask].double()
    advantages = batch.advantages.double().unsqueeze(-1).expand(mask.shape)[mask]
    covariance = (advantages - advantages.mean()) * (log_probs - log_probs.mean())
    if algorithm.loss == "kl-cov":
        ratio, chosen = algorithm.kl_cov.ratio, covariance.argsort(descending=True, stable=True)
    else:
        ratio, settings = algorithm.clip_cov.ratio, algorithm.clip_cov
        is_inside = (covariance > settings.low) & (covariance < settings.high)
        inside = is_inside.nonzero().squeeze(-1)
        chosen = inside[torch.from_numpy(random_order(len(inside), seed, *numbers))]
    is_selected = torch.zeros(len(covariance), dtype=torch.bool)
    is_selected[chosen[: max(int(ratio * len(covariance)), 1)]] = True
    return replace(batch, is_selected=torch.zeros_like(mask).masked_scatter(mask, is_selected))
