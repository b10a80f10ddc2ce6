"""Correction for the mismatch between the engine's and the policy's log-probs of the same tokens.

The ratio of a token is r = exp(clamp(old_log_probs - rollout_log_probs, -20, 20)): policy over engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dapo_core.kl import MAX_LOG_RATIO

if TYPE_CHECKING:
    from dapo_core.config.algorithm import RolloutCorrectionConfig


def importance_weights(
    old_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    response_mask: torch.Tensor,
    is_stale: torch.Tensor,
    settings: RolloutCorrectionConfig,
) -> torch.Tensor | None:
    """Weights of token losses, detached; None when off.

    Truncated importance sampling (Yao et al., https://fengyao.notion.site/off-policy-rl): min(r, importance_max).
    token: r of the token. stale: r of tokens that an older policy sampled, 1 elsewhere. sequence: the product of r
    over the response's tokens, the same for each of them. With importance_min a ratio outside [importance_min,
    importance_max] weighs 0 and one inside itself (IcePop, arXiv:2510.18855). With importance_normalize all are
    then divided by their mean over the tokens under the mask, or over the responses with one under `sequence`.

    Tensors of one shape: [B, R], or packed [M] but for sequence and importance_normalize. Values outside the mask,
    NaN too, do not matter.
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
        # of a response one weight, its first; all of its tokens have it
        counted = response_mask & (response_mask.cumsum(dim=-1) == 1) if is_whole else response_mask
        mean = weights[counted].mean(dtype=torch.float64)
        weights = torch.where(response_mask & (mean > 0), weights / mean, weights).to(log_ratio.dtype)
    return weights


def mask_rollouts(
    old_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    response_mask: torch.Tensor,
    settings: RolloutCorrectionConfig,
) -> torch.Tensor:
    """The mask of the tokens that still train: what passes both `mask` and `divergence`.

    mask: inside [mask_low, mask_high] stay tokens by r (token), responses by the geometric mean of r (sequence),
    because a product over 20,000 tokens that differ by noise alone is never inside any useful interval, or by that
    product.

    divergence: up to divergence_max stay tokens by k2 = (log r)^2 / 2 or k3 = r - 1 - log r, responses by the sum,
    the mean or the maximum of those of their tokens.

    All tensors [B, R]. Values outside the mask, NaN too, do not matter.
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
        values = clamped.square() / 2 if kind == "k2" else torch.expm1(clamped) - clamped  # 0 outside the mask
        if level == "max":
            values = values.amax(dim=-1, keepdim=True)
        elif level != "token":
            values = response_sums(values) / (num_tokens if level == "mean" else 1)
        kept = kept & (values <= settings.divergence_max)
    return kept


def ratio_of(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp of the log-ratios, which are clamped to +-20."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def response_sums(log_ratio: torch.Tensor) -> torch.Tensor:
    """Sum over each response, in float64, because 20,000 float32 terms lose digits: [B, 1]."""
    return log_ratio.sum(dim=-1, keepdim=True, dtype=torch.float64)
