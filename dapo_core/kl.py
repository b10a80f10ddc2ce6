"""KL divergence to the reference model: estimates per token, the penalty in the reward, and its coefficient."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from dapo_core.errors import ConfigError

if TYPE_CHECKING:
    from dapo_core.config.training import KLConfig

MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0
MAX_PROPORTIONAL_ERROR = 0.2


def kl_estimate(log_probs: torch.Tensor, ref_log_probs: torch.Tensor, estimator: str) -> torch.Tensor:
    """Estimate of KL(policy || reference) at each token sampled from the policy; any shape.

    With d = log_probs - ref_log_probs (Schulman, http://joschu.net/blog/kl-approx.html): kl is k1 = d, abs is |d|,
    mse is k2 = d^2 / 2, and low_var_kl is k3 = exp(-d) - 1 + d, with d clamped to +-20 and k3 to at most 10 as in
    verl. With a `+` the value is the named one's and the gradient is k2's, d: k2's mean gradient is that of the KL
    divergence, the mean gradients of k1 and k3 are not.
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
    if estimator == "low_var_kl":
        clamped = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return (torch.expm1(-clamped) + clamped).clamp(max=MAX_K3)
    raise ValueError(f"unknown algorithm.kl.estimator {estimator!r}")


def reward_penalties(
    old_log_probs: torch.Tensor, ref_log_probs: torch.Tensor, response_mask: torch.Tensor, kl: KLConfig
) -> tuple[np.ndarray, float]:
    """Each response's sum of KL over its tokens under the mask, and the mean over responses of their token means.

    The sums, [B] float64, times the coefficient are what the reward loses. The mean is verl's
    actor/reward_kl_penalty and what the adaptive coefficient steers; responses without a token do not count in
    it, and without any it is 0. Values outside the mask, NaN too, do not matter. All tensors [B, R].
    """
    zeros = torch.zeros((), dtype=old_log_probs.dtype, device=old_log_probs.device)
    estimates = kl_estimate(
        torch.where(response_mask, old_log_probs, zeros),
        torch.where(response_mask, ref_log_probs, zeros),
        kl.estimator,
    )
    sums = estimates.sum(dim=-1, dtype=torch.float64).cpu().numpy()  # [B]
    num_tokens = response_mask.sum(dim=-1).cpu().numpy()
    answered = num_tokens > 0
    mean = float((sums[answered] / num_tokens[answered]).mean()) if answered.any() else 0.0
    return sums, mean


class KLController:
    """The coefficient of KL in the reward: constant, or following a target.

    `coefficient` may be set to continue a run.
    """

    def __init__(self, kl: KLConfig) -> None:
        self.coefficient = kl.coefficient
        self.kl = kl

    def update(self, kl_per_token: float, num_responses: int) -> None:
        """Adapt the coefficient after a step of `num_responses` (Ziegler et al., arXiv:1909.08593, section 2.2).

        coefficient *= 1 + clip(kl_per_token / target - 1, -0.2, 0.2) * num_responses / horizon. Raises ConfigError
        for a step so large against the horizon that the coefficient could become 0 or negative.
        """
        if self.kl.controller == "fixed":
            return
        steps = num_responses / self.kl.horizon
        if steps * MAX_PROPORTIONAL_ERROR >= 1:
            raise ConfigError(
                f"one step of {num_responses} responses is {steps:.1f} times algorithm.kl.horizon="
                f"{self.kl.horizon:g}: from {1 / MAX_PROPORTIONAL_ERROR:g} times on, the adaptive KL coefficient "
                f"can become 0 or negative; raise algorithm.kl.horizon, for instance to {4 * num_responses}"
            )
        error = np.clip(kl_per_token / self.kl.target - 1, -MAX_PROPORTIONAL_ERROR, MAX_PROPORTIONAL_ERROR)
        self.coefficient *= 1 + float(error) * steps
