"""Correction for the mismatch between the engine's and the policy's log-probs of the same tokens, and its size.

The ratio of a token is r = exp(clamp(old_log_probs - rollout_log_probs, -20, 20)): policy over engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dapo_core.kl import MAX_LOG_RATIO

if TYPE_CHECKING:
    from dapo_core.batch import Batch
    from dapo_core.config.algorithm import RolloutCorrectionConfig


def importance_weights(
    old_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    response_mask: torch.Tensor,
    is_stale: torch.Tensor,
    settings: RolloutCorrectionConfig,
) -> torch.Tensor | None:
    """Weights of token losses, detached and never above importance_max; None when off.

    Truncated importance sampling (Yao et al., https://fengyao.notion.site/off-policy-rl). token: r. stale: r of
    tokens that an older policy sampled, 1 elsewhere. sequence: the product of r over the response's tokens, the
    same for each of them.

    Tensors of one shape: [B, R], or packed [M] but for sequence. Values outside the mask, NaN too, do not matter;
    the weight there is 1.
    """
    if settings.importance == "off":
        return None
    log_ratio = torch.where(response_mask, old_log_probs - rollout_log_probs, 0.0).detach()
    exponent = _sums(log_ratio).to(log_ratio.dtype) if settings.importance == "sequence" else log_ratio
    is_weighed = response_mask & is_stale if settings.importance == "stale" else response_mask
    return torch.where(is_weighed, _ratio(exponent).clamp(max=settings.importance_max), 1.0)


def mask_rollouts(
    old_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    response_mask: torch.Tensor,
    settings: RolloutCorrectionConfig,
) -> torch.Tensor:
    """The mask of the tokens that still train: what lies inside [mask_low, mask_high] stays.

    token: tokens by r. sequence: responses by the geometric mean of r, because a product over 20,000 tokens that
    differ by noise alone is never inside any useful interval.

    All tensors [B, R]. Values outside the mask, NaN too, do not matter.
    """
    if settings.mask == "off":
        return response_mask
    log_ratio = torch.where(response_mask, old_log_probs - rollout_log_probs, 0.0)
    num_tokens = response_mask.sum(dim=-1, keepdim=True).clamp(min=1)
    ratio = _ratio(log_ratio if settings.mask == "token" else _sums(log_ratio) / num_tokens)
    return response_mask & (ratio >= settings.mask_low) & (ratio <= settings.mask_high)


def correction_metrics(
    log_probs: torch.Tensor, batch: Batch, settings: RolloutCorrectionConfig
) -> dict[str, float]:
    """mismatch_metrics of the batch, and what its importance weights are like.

    rollout/importance_mean: of the weighed tokens' weights. rollout/importance_truncated_ratio: share of these at
    importance_max. Both are left out without a weighed token.

    log_probs: [B, R], of the policy.
    """
    mask = batch.response_mask
    metrics = mismatch_metrics(log_probs, batch.rollout_log_probs, mask)
    weights = importance_weights(log_probs, batch.rollout_log_probs, mask, batch.is_stale, settings)
    is_weighed = mask & batch.is_stale if settings.importance == "stale" else mask
    if weights is None or not is_weighed.any():
        return metrics
    weighed = weights[is_weighed].double()
    return {
        **metrics,
        "rollout/importance_mean": float(weighed.mean()),
        "rollout/importance_truncated_ratio": float((weighed >= settings.importance_max).double().mean()),
    }


def mismatch_metrics(
    old_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, response_mask: torch.Tensor
) -> dict[str, float]:
    """How far the engine is from the policy over the tokens under the mask; {} when there is none.

    rollout/probs_diff_{mean,max}: of |exp(old) - exp(rollout)|. rollout/kl: mean of rollout - old log-prob (k1).
    rollout/k3_kl: mean of r - 1 - log r. rollout/chi2_token: mean of r^2 - 1. rollout/chi2_seq: mean over
    responses of (product of r)^2 - 1, the product's log clamped to +-20. rollout/ess: (sum r)^2 / (tokens *
    sum r^2), 1 when nothing differs. rollout/ppl_ratio: mean over responses of the policy's perplexity over the
    engine's.
    """
    num_tokens = response_mask.sum(dim=-1)
    answered = num_tokens > 0
    if not answered.any():
        return {}
    difference = torch.where(response_mask, old_log_probs - rollout_log_probs, 0.0)  # [B, R]
    response_sums = _sums(difference).squeeze(-1)[answered]
    log_ratio = difference[response_mask].double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    probs_diff = (old_log_probs[response_mask].exp() - rollout_log_probs[response_mask].exp()).abs()
    return {
        "rollout/probs_diff_mean": float(probs_diff.mean()),
        "rollout/probs_diff_max": float(probs_diff.max()),
        "rollout/kl": float(-response_sums.sum() / num_tokens.sum()),
        "rollout/k3_kl": float((ratio - 1 - log_ratio).mean()),
        "rollout/ppl_ratio": float((-response_sums / num_tokens[answered]).exp().mean()),
        "rollout/chi2_token": float(ratio.square().mean() - 1),
        "rollout/chi2_seq": float(_ratio(response_sums).square().mean() - 1),
        "rollout/ess": float(ratio.sum().square() / (len(ratio) * ratio.square().sum())),
    }


def _ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _sums(log_ratio: torch.Tensor) -> torch.Tensor:
    """Sum over each response, in float64, because 20,000 float32 terms lose digits: [B, 1]."""
    return log_ratio.sum(dim=-1, keepdim=True, dtype=torch.float64)
