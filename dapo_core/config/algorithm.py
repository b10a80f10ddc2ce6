"""The section `algorithm`: advantage, loss, KL to the reference, and correction for what engines sampled from."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from dapo_core.config.fields import Section, key


class KLConfig(Section):
    """Distance to the reference model, by default the model before training; loaded only when `place` is set."""

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
    reference_path: str | None = key(
        None, "Folder of the reference model, of the policy's architecture and sizes; unset: the policy's own."
    )
    refresh_every: int = key(
        0, "Training steps after which the reference becomes the policy of then, again and again; 0: never.", ge=0
    )

    @model_validator(mode="after")
    def _reference_is_used(self) -> KLConfig:
        if self.place == "off" and (self.reference_path is not None or self.refresh_every):
            raise ValueError(
                f"algorithm.kl.reference_path={self.reference_path} and algorithm.kl.refresh_every="
                f"{self.refresh_every} say what the reference model is, and with algorithm.kl.place=off there is "
                "none; set algorithm.kl.place=loss or reward, or remove them"
            )
        return self

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
    importance_min: float | None = key(
        None,
        "Set: weights are not truncated; ratios below this and above importance_max weigh 0 instead (IcePop).",
        gt=0,
    )
    importance_normalize: bool = key(
        False, "Divide importance weights by their mean over the step's tokens, or responses with `sequence`."
    )
    mask: Literal["off", "token", "sequence", "product"] = key(
        "off",
        "Drop what has a ratio outside [mask_low, mask_high] from the loss: tokens by theirs, responses by the "
        "geometric mean or the product of theirs.",
    )
    mask_low: float = key(0.5, "Lowest ratio that trains.", ge=0)
    mask_high: float = key(2.0, "Highest ratio that trains.", gt=0)
    divergence: Literal[
        "off", "token-k2", "token-k3", "sum-k2", "sum-k3", "mean-k2", "mean-k3", "max-k2", "max-k3"
    ] = key(
        "off",
        "Drop what diverges from the engine by more than divergence_max, k2 or k3 of the ratio: tokens, or "
        "responses by the sum, the mean or the maximum over theirs.",
    )
    divergence_max: float = key(0.01, "Highest divergence that trains.", gt=0)

    @property
    def drops(self) -> bool:
        """Whether tokens or responses may be dropped from the loss."""
        return self.mask != "off" or self.divergence != "off"

    @model_validator(mode="after")
    def _low_below_high(self) -> RolloutCorrectionConfig:
        if self.mask_low >= self.mask_high:
            raise ValueError(
                f"algorithm.rollout_correction.mask_low={self.mask_low} is not below mask_high={self.mask_high}: "
                "no token would train; swap the two"
            )
        return self

    @model_validator(mode="after")
    def _weights_have_an_interval(self) -> RolloutCorrectionConfig:
        if self.importance_min is not None and self.importance_min >= self.importance_max:
            raise ValueError(
                f"algorithm.rollout_correction.importance_min={self.importance_min} is not below importance_max="
                f"{self.importance_max}: every weight would be 0; lower importance_min"
            )
        if self.importance == "off" and (self.importance_min is not None or self.importance_normalize):
            raise ValueError(
                "algorithm.rollout_correction.importance_min and importance_normalize change importance weights, "
                "and importance=off has none; remove them, or set importance to stale, token or sequence"
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
        "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
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
