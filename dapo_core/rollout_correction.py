"""Correction for the mismatch between the engine's and the policy's log-probs of the same tokens, and its size.

The ratio of a token is r = exp(clamp(old_log_probs - rollout_log_probs, -20, 20)): policy over engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dapo_core.kl import MAX_LOG_RATIO

if TYPE_CHECKING:
    from dapo_core.config.training import RolloutCorrectionConfig


def correct_rollouts(
    old_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    response_mask: torch.Tensor,
    settings: RolloutCorrectionConfig,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Importance weights of token losses, None when off, and the mask of the tokens that still train.

    Weights, detached, never above importance_max (truncated importance sampling, Yao et al.,
    https://fengyao.notion.site/off-policy-rl). token: r. sequence: the product of r over the response's tokens,
    the same for each of them.
    Mask: what lies inside [mask_low, mask_high] stays. token: tokens by r. sequence: responses by the geometric
    mean of r, because a product over 20,000 tokens that differ by noise alone is never inside any useful interval.

    All tensors [B, R]. Values outside the mask, NaN too, do not matter; the weight there is 1.
    """
    log_ratio = torch.where(response_mask, old_log_probs - rollout_log_probs, 0.0).detach()  # [B, R]
    weights = None
    if settings.importance != "off":
        exponent = log_ratio if settings.importance == "token" else _sums(log_ratio).to(log_ratio.dtype)
        ratio = _ratio(exponent).clamp(max=settings.importance_max)
        weights = torch.where(response_mask, ratio, 1.0)
    if settings.mask != "off":
        num_tokens = response_mask.sum(dim=-1, keepdim=True).clamp(min=1)
        ratio = _ratio(log_ratio if settings.mask == "token" else _sums(log_ratio) / num_tokens)
        response_mask = response_mask & (ratio >= settings.mask_low) & (ratio <= settings.mask_high)
    return weights, response_mask


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
