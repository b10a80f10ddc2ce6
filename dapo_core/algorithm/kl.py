"""KL divergence to the reference model: estimators, the reward penalty, and its coefficient."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from dapo_core.algorithm.batch import Batch
    from dapo_core.config.algorithm import KLConfig

MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0
MAX_PROPORTIONAL_ERROR = 0.2


def kl_estimate(
    log_probs: torch.Tensor, ref_log_probs: torch.Tensor, estimator: str
) -> torch.Tensor:
    """Estimate KL(policy || reference) at each sampled token; any shape.

    With d = log_probs - ref_log_probs (Schulman, http://joschu.net/blog/kl-approx.html): kl is k1 =
    d, abs is |d|, mse is k2 = d^2 / 2, and low_var_kl is k3 = exp(-d) - 1 + d, with d clamped to
    +-20 and k3 to at most 10 as in verl. A `+` keeps the value but uses the gradient of k2, which
    is d: unlike k1 and k3, k2 has the mean gradient of the KL divergence.
    """
    difference = log_probs - ref_log_probs
    value = _estimate(difference, estimator.removesuffix("+"))
    if not estimator.endswith("+"):
        return value
    k2 = 0.5 * difference.square()
    return value.detach() + (k2 - k2.detach())


def _estimate(difference: torch.Tensor, estimator: str) -> torch.Tensor:
    if estimator == "kl":
        return difference
    if estimator == "abs":
        return difference.abs()
    if estimator == "mse":
        return 0.5 * difference.square()
    clamped = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)  # low_var_kl
    return (torch.expm1(-clamped) + clamped).clamp(max=MAX_K3)


def reward_penalties(
    old_log_probs: torch.Tensor,
    ref_log_probs: torch.Tensor,
    is_response: torch.Tensor,
    kl: KLConfig,
) -> tuple[torch.Tensor, float]:
    """Return the KL summed over each response, [B] float64, and the mean of the mean per token.

    The reward is reduced by the sums times the coefficient. The mean is verl's
    actor/reward_kl_penalty, which drives the adaptive coefficient; it leaves out empty responses.
    All tensors are [B, R]; values beyond the responses may be NaN.
    """
    old, ref = (torch.where(is_response, values, 0.0) for values in (old_log_probs, ref_log_probs))
    sums = kl_estimate(old, ref, kl.estimator).sum(dim=-1, dtype=torch.float64)
    num_tokens = is_response.sum(dim=-1)
    answered = num_tokens > 0
    mean = float((sums[answered] / num_tokens[answered]).mean()) if answered.any() else 0.0
    return sums, mean


class KLController:
    """Subtracts KL from rewards; `coefficient` is fixed or adaptive."""

    def __init__(self, kl: KLConfig) -> None:
        self.coefficient = kl.coefficient
        self.kl = kl

    def penalise(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """Subtract KL from the rewards and adapt the coefficient; returns the batch and metrics.

        Does nothing unless algorithm.kl.place=reward. Masked responses are penalised too, because
        their siblings are compared with them.
        """
        if self.kl.place != "reward":
            return batch, {}
        assert batch.ref_log_probs is not None, (
            "the policy loads a reference model for KL in the reward"
        )
        assert batch.old_log_probs is not None, (
            "PolicyGroup.anchor computes them for KL in the reward"
        )
        penalties, mean = reward_penalties(
            batch.old_log_probs, batch.ref_log_probs, batch.is_response, self.kl
        )
        metrics = {
            "actor/reward_kl_penalty": mean,
            "actor/reward_kl_penalty_coeff": self.coefficient,
        }
        batch = replace(batch, rewards=batch.rewards - self.coefficient * penalties)
        self.update(mean, batch.num_responses)
        return batch, metrics

    def update(self, kl_per_token: float, num_responses: int) -> None:
        """Adapt the coefficient after a step (Ziegler et al., arXiv:1909.08593, section 2.2).

        coefficient *= 1 + clip(kl_per_token / target - 1, -0.2, 0.2) * num_responses / horizon. It
        stays positive, because the configuration rejects a horizon of at most a fifth of a step's
        responses.
        """
        if self.kl.controller == "adaptive":
            error = min(
                max(kl_per_token / self.kl.target - 1, -MAX_PROPORTIONAL_ERROR),
                MAX_PROPORTIONAL_ERROR,
            )
            self.coefficient *= 1 + error * num_responses / self.kl.horizon
