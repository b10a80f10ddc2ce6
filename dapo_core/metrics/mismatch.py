"""Metrics of the mismatch between engine and policy, and of its correction.

rollout/NAME are the project's names, rollout_corr/NAME are verl's. Both leave out empty responses.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from dapo_core.algorithm.correction import (
    importance_weights,
    mask_rollouts,
    ratio_of,
    response_sums,
)
from dapo_core.algorithm.kl import MAX_LOG_RATIO

if TYPE_CHECKING:
    from dapo_core.algorithm.batch import Batch
    from dapo_core.config.algorithm import RolloutCorrectionConfig

HIGH_DIFFERENCE = 0.1  # of a token's probability under engine and policy
# the same under rollout/ and rollout_corr/
SHARED_NAMES = ("kl", "k3_kl", "ppl_ratio", "chi2_token", "chi2_seq")


def correction_metrics(
    log_probs: torch.Tensor, batch: Batch, settings: RolloutCorrectionConfig
) -> dict[str, float]:
    """Return mismatch_metrics, plus metrics of fresh tokens, importance weights and masked tokens.

    rollout/fresh_NAME: token_differences over tokens sampled by the step's own weights, where
    engine and policy are the same model. Left out without such tokens.
    rollout/importance_mean: mean weight before importance_normalize, over the tokens that are
    weighted. rollout/importance_truncated_ratio: share of these weights that were truncated or set
    to 0. Both are left out if no token is weighted.
    rollout_corr/rollout_rs_{masked_fraction,seq_masked_fraction}: share of masked tokens, and of
    responses with any. rollout_corr/rollout_is_NAME: see weight_metrics.

    log_probs: [B, R], of the policy.
    """
    mask = batch.response_mask
    metrics = mismatch_metrics(log_probs, batch.rollout_log_probs, mask)
    if not metrics:
        return metrics
    compared = log_probs, batch.rollout_log_probs, mask
    fresh = token_differences(log_probs, batch.rollout_log_probs, batch.is_fresh)
    metrics |= {f"rollout/fresh_{name}": value for name, value in fresh.items()}
    if settings.drops:
        is_dropped = mask & ~mask_rollouts(*compared, settings)
        has_dropped = is_dropped.any(dim=-1)[mask.any(dim=-1)]  # per response
        metrics["rollout_corr/rollout_rs_masked_fraction"] = float(is_dropped[mask].double().mean())
        metrics["rollout_corr/rollout_rs_seq_masked_fraction"] = float(has_dropped.double().mean())
    raw = settings.model_copy(update={"importance_normalize": False})
    weights = importance_weights(*compared, batch.is_stale, raw)
    is_weighed = mask & batch.is_stale if settings.importance == "stale" else mask
    if weights is None or not is_weighed.any():
        return metrics
    weighed = weights[is_weighed].double()
    is_cut = weighed >= settings.importance_max if settings.importance_min is None else weighed == 0
    metrics["rollout/importance_mean"] = float(weighed.mean())
    metrics["rollout/importance_truncated_ratio"] = float(is_cut.double().mean())
    if settings.importance != "stale":  # verl has no such setting
        metrics |= weight_metrics(*compared, weights, settings)
    return metrics


def mismatch_metrics(
    old_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, response_mask: torch.Tensor
) -> dict[str, float]:
    """Return how far engine and policy differ on unmasked tokens; {} if there are none.

    rollout/NAME: token_differences. rollout/chi2_token: mean of r^2 - 1.
    rollout/chi2_seq: mean over responses of (product of r)^2 - 1, with the log of the product
    clamped to +-20. rollout/ess: (sum r)^2 / (tokens * sum r^2), 1 if nothing differs.
    rollout/ppl_ratio: mean over responses of policy / engine perplexity.

    rollout_corr/{training,rollout}_{ppl,log_ppl}: mean over responses of the policy's and the
    engine's perplexity, exp(-mean log-prob), and of its logarithm.
    rollout_corr/log_ppl_{diff,abs_diff}: mean difference of the logarithms, policy - engine, and of
    its absolute value; _diff_{max,min}: its extremes.
    """
    num_tokens = response_mask.sum(dim=-1)
    answered = num_tokens > 0
    if not answered.any():
        return {}
    difference = torch.where(response_mask, old_log_probs - rollout_log_probs, 0.0)  # [B, R]
    sums = response_sums(difference).squeeze(-1)[answered]
    ratio = ratio_of(difference[response_mask].double())
    log_ppl_diff = -sums / num_tokens[answered]
    policy, engine = (
        -response_sums(torch.where(response_mask, values, 0.0)).squeeze(-1)[answered]
        / num_tokens[answered]
        for values in (old_log_probs, rollout_log_probs)
    )
    differences = token_differences(old_log_probs, rollout_log_probs, response_mask)
    metrics = {
        **{f"rollout/{name}": value for name, value in differences.items()},
        "rollout/ppl_ratio": float(log_ppl_diff.exp().mean()),
        "rollout/chi2_token": float(ratio.square().mean() - 1),
        "rollout/chi2_seq": float(ratio_of(sums).square().mean() - 1),
        "rollout/ess": float(ratio.sum().square() / (len(ratio) * ratio.square().sum())),
        "rollout_corr/training_ppl": float(policy.exp().mean()),
        "rollout_corr/training_log_ppl": float(policy.mean()),
        "rollout_corr/rollout_ppl": float(engine.exp().mean()),
        "rollout_corr/rollout_log_ppl": float(engine.mean()),
        "rollout_corr/log_ppl_diff": float(log_ppl_diff.mean()),
        "rollout_corr/log_ppl_abs_diff": float(log_ppl_diff.abs().mean()),
        "rollout_corr/log_ppl_diff_max": float(log_ppl_diff.max()),
        "rollout_corr/log_ppl_diff_min": float(log_ppl_diff.min()),
    }
    return metrics | {f"rollout_corr/{name}": metrics[f"rollout/{name}"] for name in SHARED_NAMES}


def token_differences(
    old_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, mask: torch.Tensor
) -> dict[str, float]:
    """Return how far the log-probs of the tokens in `mask` differ; {} if there are none.

    compared_tokens: their number. log_probs_diff_mean: mean of |old - rollout|, in nats.
    probs_diff_{mean,max}: of |exp(old) - exp(rollout)|. probs_diff_high_ratio: share of tokens
    where it exceeds HIGH_DIFFERENCE. kl: mean of rollout - old (k1). k3_kl: mean of r - 1 - log r.
    """
    if not mask.any():
        return {}
    old, rollout = old_log_probs[mask], rollout_log_probs[mask]
    log_ratio = (old - rollout).double()
    clamped = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    probs_diff = (old.exp() - rollout.exp()).abs()
    return {
        "compared_tokens": float(len(old)),
        "log_probs_diff_mean": float(log_ratio.abs().mean()),
        "probs_diff_mean": float(probs_diff.mean()),
        "probs_diff_max": float(probs_diff.max()),
        "probs_diff_high_ratio": float(_share(probs_diff > HIGH_DIFFERENCE)),
        "kl": float(-log_ratio.mean()),
        "k3_kl": float((clamped.exp() - 1 - clamped).mean()),
    }


def weight_metrics(
    old_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    response_mask: torch.Tensor,
    weights: torch.Tensor,
    settings: RolloutCorrectionConfig,
) -> dict[str, float]:
    """Return rollout_corr/rollout_is_NAME for weights [B, R], before importance_normalize.

    mean, std, and eff_sample_size = mean^2 / mean of squares, over tokens. max and min: of the
    weights; with sequence, of the ratios. ratio_fraction_{high,low}: share of token or response
    ratios above importance_max and below importance_min (if unset, 1 / importance_max). oob_ratio:
    both, over tokens, only with importance_min. batch_norm_factor: the divisor of
    importance_normalize. seq_{mean,std,max,min,max_deviation}: of the mean weight per response, and
    its largest distance from 1. seq_fraction_{high,low}: share of responses with such a mean ratio.
    """
    answered = response_mask.any(dim=-1)
    num_tokens = response_mask.sum(dim=-1)[answered]
    log_ratio = torch.where(response_mask, old_log_probs - rollout_log_probs, 0.0)
    is_whole = settings.importance == "sequence"
    whole = ratio_of(response_sums(log_ratio)[answered])  # [b, 1]
    ratio = (
        whole.expand(-1, response_mask.shape[1])
        if is_whole
        else ratio_of(log_ratio.double())[answered]
    )
    low = settings.importance_min or 1 / settings.importance_max
    tokens = response_mask[answered]
    weighed, raw = weights[answered][tokens].double(), ratio[tokens]
    units = whole.squeeze(-1) if is_whole else raw
    means, raw_means = (
        torch.where(tokens, values, 0.0).sum(dim=-1) / num_tokens
        for values in (weights[answered].double(), ratio)
    )
    extremes = whole if is_whole else weighed
    metrics = {
        "mean": weighed.mean(),
        "std": weighed.std(correction=0),
        "max": extremes.max(),
        "min": extremes.min(),
        "eff_sample_size": weighed.mean().square() / weighed.square().mean(),
        "ratio_fraction_high": _share(units > settings.importance_max),
        "ratio_fraction_low": _share(units < low),
        "seq_mean": means.mean(),
        "seq_std": means.std() if len(means) > 1 else 0.0,
        "seq_max": means.max(),
        "seq_min": means.min(),
        "seq_max_deviation": (means - 1).abs().max(),
        "seq_fraction_high": _share(raw_means > settings.importance_max),
        "seq_fraction_low": _share(raw_means < low),
    }
    if settings.importance_min is not None:
        metrics["oob_ratio"] = _share((raw < low) | (raw > settings.importance_max))
    if settings.importance_normalize:
        factor = (means if is_whole else weighed).mean()
        metrics["batch_norm_factor"] = factor if factor > 0 else 1.0
    values = {f"rollout_corr/rollout_is_{name}": float(value) for name, value in metrics.items()}
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _share(condition: torch.Tensor) -> torch.Tensor:
    return condition.double().mean()
