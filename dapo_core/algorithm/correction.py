"""Rollout correction: importance weights and masks for the mismatch between policy and engine.

The ratio of a token is policy over engine, r = exp(clamp(old_log_probs - rollout_log_probs, -20,
20)).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dapo_core.algorithm.kl import MAX_LOG_RATIO

if TYPE_CHECKING:
    from dapo_core.config.algorithm import RolloutCorrectionConfig


def importance_weights(
    old_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    response_mask: torch.Tensor,
    is_stale: torch.Tensor,
    settings: RolloutCorrectionConfig,
) -> torch.Tensor | None:
    """Return detached weights for the token losses; None if importance=off.

    Truncated importance sampling (Yao et al., https://fengyao.notion.site/off-policy-rl): min(r,
    importance_max). token: r of the token. stale: r for tokens sampled by an older policy, else 1.
    sequence: the product of r over the response, for each of its tokens. With importance_min,
    weights are r inside [importance_min, importance_max] and 0 outside (IcePop, arXiv:2510.18855).
    importance_normalize divides by the mean over unmasked tokens, or with `sequence` over responses
    that have any.

    All tensors have the same shape: [B, R], or packed [M] except for sequence and
    importance_normalize. Masked values may be NaN.
    """
    if settings.importance == "off":
        return None
    log_ratio = torch.where(response_mask, old_log_probs - rollout_log_probs, 0.0).detach()
    is_whole = settings.importance == "sequence"
    ratio = ratio_of(response_sums(log_ratio).to(log_ratio.dtype) if is_whole else log_ratio)
    weights = ratio.clamp(max=settings.importance_max)
    if settings.importance_min is not None:
        is_inside = (ratio >= settings.importance_min) & (ratio <= settings.importance_max)
        weights = torch.where(is_inside, ratio, 0.0)
    is_weighed = response_mask & is_stale if settings.importance == "stale" else response_mask
    weights = torch.where(is_weighed, weights, 1.0)
    if settings.importance_normalize:
        # with `sequence`, count each response once, by its first unmasked token
        counted = response_mask & (response_mask.cumsum(dim=-1) == 1) if is_whole else response_mask
        mean = weights[counted].mean(dtype=torch.float64)
        weights = torch.where(response_mask & (mean > 0), weights / mean, weights).to(
            log_ratio.dtype
        )
    return weights


def mask_rollouts(
    old_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    response_mask: torch.Tensor,
    settings: RolloutCorrectionConfig,
) -> torch.Tensor:
    """Return the response mask without the tokens that `mask` or `divergence` removes.

    mask keeps ratios inside [mask_low, mask_high]: r of each token (token), the geometric mean of r
    over the response (sequence), or the product (product). A product over 20,000 tokens leaves any
    useful interval through noise alone, hence the mean.

    divergence keeps k2 = (log r)^2 / 2 or k3 = r - 1 - log r up to divergence_max: of each token,
    or as the sum, mean or maximum over the response.

    All tensors are [B, R]. Masked values may be NaN.
    """
    log_ratio = torch.where(response_mask, old_log_probs - rollout_log_probs, 0.0)
    num_tokens = response_mask.sum(dim=-1, keepdim=True).clamp(min=1)
    kept = response_mask
    if settings.mask != "off":
        exponent = log_ratio if settings.mask == "token" else response_sums(log_ratio)
        ratio = ratio_of(exponent / num_tokens if settings.mask == "sequence" else exponent)
        kept = kept & (ratio >= settings.mask_low) & (ratio <= settings.mask_high)
    if settings.divergence != "off":
        level, _, kind = settings.divergence.partition("-")
        clamped = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        # 0 outside the mask
        values = clamped.square() / 2 if kind == "k2" else torch.expm1(clamped) - clamped
        if level == "max":
            values = values.amax(dim=-1, keepdim=True)
        elif level != "token":
            values = response_sums(values) / (num_tokens if level == "mean" else 1)
        kept = kept & (values <= settings.divergence_max)
    return kept


def ratio_of(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return exp of the log-ratios, clamped to +-20."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def response_sums(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return each response's sum, [B, 1], in float64: 20,000 float32 terms lose digits."""
    return log_ratio.sum(dim=-1, keepdim=True, dtype=torch.float64)
