"""The section `algorithm`: advantage, loss, KL to the reference, and correction for what engines sampled from."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from dapo_core.config.fields import Section, key


class KLConfig(Section):
    """Distance to the reference model, which is the model before training; loaded only when `place` is set."""

    place: Literal["off", "loss", "reward"] = key("off", "Where the KL divergence from the reference is added.")
    coefficient: float = key(
        0.001, "Weight of the KL divergence; the first value under adaptive control.", ge=0, le=100
    )
    estimator: Literal["kl", "abs", "mse", "low_var_kl", "kl+", "abs+", "mse+", "low_var_kl+"] = key(
        "low_var_kl", "Per-token estimator (k1, |k1|, k2, k3); `+` keeps its value and takes the gradient of k2."
    )
    controller: Literal["fixed", "adaptive"] = key("fixed", "Whether the coefficient follows `target`.")
    target: float = key(0.1, "Target KL divergence per response token of adaptive control.", gt=0)
    horizon: float = key(10_000.0, "Responses over which adaptive control changes the coefficient.", gt=0)

    @model_validator(mode="after")
    def _adaptive_in_reward_only(self) -> KLConfig:
        if self.controller == "adaptive" and self.place != "reward":
            raise ValueError(
                f"algorithm.kl.controller=adaptive steers the coefficient of KL in the reward, but "
                f"algorithm.kl.place={self.place}; set algorithm.kl.place=reward or algorithm.kl.controller=fixed"
            )
        return self


class RolloutCorrectionConfig(Section):
    """Correction for the difference between the engine's log-probs and the policy's on the same tokens."""

    importance: Literal["off", "stale", "token", "sequence"] = key(
        "stale",
        "Weigh token losses by the truncated ratio policy/engine: of tokens that an older policy sampled, of all "
        "tokens, or of responses.",
    )
    importance_max: float = key(2.0, "Ratio at which the importance weight is truncated.", gt=0)
    mask: Literal["off", "token", "sequence"] = key(
        "off", "Drop tokens or responses from the loss if their ratio is outside [mask_low, mask_high]."
    )
    mask_low: float = key(0.5, "Lowest ratio that trains.", ge=0)
    mask_high: float = key(2.0, "Highest ratio that trains.", gt=0)

    @model_validator(mode="after")
    def _low_below_high(self) -> RolloutCorrectionConfig:
        if self.mask_low >= self.mask_high:
            raise ValueError(
                f"algorithm.rollout_correction.mask_low={self.mask_low} is not below mask_high={self.mask_high}: "
                "no token would train; swap the two"
            )
        return self


class AlgorithmConfig(Section):
    """Advantage and loss. DAPO by default; GRPO is equal clips, no dynamic sampling and KL in the loss."""

    baseline: Literal["group-mean", "leave-one-out"] = key(
        "group-mean", "Baseline of a reward: the mean of its group, or of the group's other responses (RLOO)."
    )
    normalize_by_std: bool = key(True, "Divide the group advantage by the group's standard deviation.")
    clip_ratio_low: float = key(0.2, "Lower clip: ratios below 1 - this stop pushing.", ge=0, lt=1)
    clip_ratio_high: float = key(0.28, "Upper clip, higher than the lower one: clip-higher.", ge=0, le=10)
    clip_ratio_dual: float = key(10.0, "Dual clip bound of the ratio where the advantage is negative.", gt=1)
    loss_aggregation: Literal[
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = key("token-mean", "How token losses become one number.")
    loss_norm_tokens: int | None = key(
        None, "Constant that seq-mean-token-sum-norm divides by, such as the response limit (Dr. GRPO).", ge=1
    )
    entropy_coefficient: float = key(0.0, "Weight of the entropy bonus in the loss.", ge=0, le=10)
    old_log_probs: Literal["policy", "engine"] = key(
        "policy",
        "Log-probs that the clipped ratio divides by: the policy's before the updates, or the engine's as it "
        "sampled, which saves a forward pass.",
    )
    kl: KLConfig = Field(default_factory=KLConfig)
    rollout_correction: RolloutCorrectionConfig = Field(default_factory=RolloutCorrectionConfig)
    compat: Literal["none", "verl"] = key(
        "none", "`verl`: verl's behaviour where this project departs from it (docs/departures.md)."
    )

    @model_validator(mode="after")
    def _norm_has_its_constant(self) -> AlgorithmConfig:
        wants_constant = self.loss_aggregation == "seq-mean-token-sum-norm"
        if wants_constant and self.loss_norm_tokens is None:
            raise ValueError(
                "algorithm.loss_aggregation=seq-mean-token-sum-norm divides by algorithm.loss_norm_tokens, which "
                "is not set; set it, for instance to rollout.max_response_tokens"
            )
        if not wants_constant and self.loss_norm_tokens is not None:
            raise ValueError(
                f"algorithm.loss_norm_tokens={self.loss_norm_tokens} would be ignored by "
                f"algorithm.loss_aggregation={self.loss_aggregation}; remove it or set seq-mean-token-sum-norm"
            )
        return self
