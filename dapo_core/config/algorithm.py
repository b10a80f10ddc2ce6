"""The `algorithm` section: advantage, loss, KL to the reference model, and rollout correction."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from dapo_core.config.fields import Section, key
from dapo_core.config.losses import (
    LOSS_KINDS,
    ClipCovConfig,
    CustomLossConfig,
    DppoTvConfig,
    DroConfig,
    KlCovConfig,
    LossKind,
    SapoConfig,
    readers,
)


class KLConfig(Section):
    """KL divergence to a reference model, which is loaded only when `place` is set."""

    place: Literal["off", "loss", "reward"] = key(
        "off", "loss: add the KL divergence to the loss; reward: subtract it from the reward."
    )
    coefficient: float = key(
        0.001, "Weight of the KL divergence, or its initial one.", ge=0, le=100
    )
    estimator: Literal["kl", "abs", "mse", "low_var_kl", "kl+", "abs+", "mse+", "low_var_kl+"] = (
        key("low_var_kl", "Per-token estimator (k1, |k1|, k2, k3); `+` takes the gradient of k2.")
    )
    controller: Literal["fixed", "adaptive"] = key(
        "fixed", "fixed: constant coefficient; adaptive: adjusted to reach `target`."
    )
    target: float = key(
        0.1, "Target KL divergence per response token for controller=adaptive.", gt=0
    )
    horizon: float = key(10_000.0, "Time constant of controller=adaptive, in responses.", gt=0)
    reference_path: str | None = key(
        None, "Reference model with the policy's architecture and sizes; unset: the initial policy."
    )
    refresh_every: int = key(
        0, "Training steps between copies of the policy into the reference model; 0: never.", ge=0
    )

    @model_validator(mode="after")
    def _reference_is_used(self) -> KLConfig:
        if self.place == "off" and (self.reference_path is not None or self.refresh_every):
            raise ValueError(
                f"algorithm.kl.reference_path={self.reference_path} and "
                f"algorithm.kl.refresh_every={self.refresh_every} have no effect: "
                "algorithm.kl.place=off loads no reference model; set algorithm.kl.place=loss or "
                "reward, or remove them"
            )
        return self

    @model_validator(mode="after")
    def _adaptive_in_reward_only(self) -> KLConfig:
        if self.controller == "adaptive" and self.place != "reward":
            raise ValueError(
                "algorithm.kl.controller=adaptive requires KL in the reward, but "
                f"algorithm.kl.place={self.place}; set algorithm.kl.place=reward or "
                "algorithm.kl.controller=fixed"
            )
        return self


_TOKEN, _SEQUENCE = {"importance": "token"}, {"importance": "sequence"}
_GEOMETRIC = {"mask": "sequence", "mask_low": 0.999, "mask_high": 1.001}
_K3 = {"divergence": "mean-k3", "divergence_max": 0.01}
# The keys of rollout_correction that a preset sets, with the bounds of verl's presets.
PRESETS: dict[str, dict[str, Any]] = {
    "tis-token": _TOKEN,
    "tis-sequence": _SEQUENCE,
    "icepop": _TOKEN | {"importance_min": 0.5, "importance_max": 5.0},
    "mis-token": _TOKEN | {"mask": "token"},
    "mis-sequence": _SEQUENCE | {"mask": "product"},
    "geometric": _GEOMETRIC,
    "geometric-tis-token": _GEOMETRIC | _TOKEN,
    "geometric-tis-sequence": _GEOMETRIC | _SEQUENCE,
    "k3": _K3,
    "k3-tis-token": _K3 | _TOKEN,
    "k3-tis-sequence": _K3 | _SEQUENCE,
    "bypass": {},
    "bypass-geometric": _GEOMETRIC,
    "bypass-k3": _K3,
}
VERL_PRESETS = {
    "decoupled_token_is": "tis-token",
    "decoupled_seq_is": "tis-sequence",
    "decoupled_token_icepop": "icepop",
    "decoupled_seq_is_rs": "mis-sequence",
    "decoupled_geo_rs": "geometric",
    "decoupled_geo_rs_token_tis": "geometric-tis-token",
    "decoupled_geo_rs_seq_tis": "geometric-tis-sequence",
    "decoupled_k3_rs": "k3",
    "decoupled_k3_rs_token_tis": "k3-tis-token",
    "decoupled_k3_rs_seq_tis": "k3-tis-sequence",
    "bypass_ppo_clip": "bypass",
    "bypass_ppo_clip_geo_rs": "bypass-geometric",
    "bypass_ppo_clip_k3_rs": "bypass-k3",
}


def _preset(values: Any) -> str | None:
    """Return the preset in the values of rollout_correction, under its name here."""
    name = values.get("preset") if isinstance(values, dict) else None
    return None if name is None else VERL_PRESETS.get(str(name), str(name))


class RolloutCorrectionConfig(Section):
    """Correction for the mismatch between the engine's and the policy's log-probs of a token."""

    preset: (
        Literal[
            "tis-token",
            "tis-sequence",
            "icepop",
            "mis-token",
            "mis-sequence",
            "geometric",
            "geometric-tis-token",
            "geometric-tis-sequence",
            "k3",
            "k3-tis-token",
            "k3-tis-sequence",
            "bypass",
            "bypass-geometric",
            "bypass-k3",
        ]
        | None
    ) = key(
        None,
        "Sets the keys below, bounds only if they are not set, and with bypass old_log_probs=engine"
        "; also under verl's names, such as decoupled_token_is.",
    )
    importance: Literal["off", "stale", "token", "sequence"] = key(
        "stale",
        "Weight token losses by the truncated policy/engine ratio: stale: only tokens sampled by "
        "an older policy; token: all tokens; sequence: all tokens, by the ratio of the whole "
        "response.",
    )
    importance_max: float = key(2.0, "Upper bound at which importance weights are truncated.", gt=0)
    importance_min: float | None = key(
        None, "If set, ratios outside [importance_min, importance_max] get weight 0 (IcePop).", gt=0
    )
    importance_normalize: bool = key(
        False, "Divide importance weights by their mean over the step."
    )
    mask: Literal["off", "token", "sequence", "product"] = key(
        "off",
        "Mask ratios policy/engine outside [mask_low, mask_high]: token: single tokens; sequence: "
        "responses, by the geometric mean of their ratios; product: responses, by the product.",
    )
    mask_low: float = key(0.5, "Lowest ratio that is not masked.", ge=0)
    mask_high: float = key(2.0, "Highest ratio that is not masked.", gt=0)
    divergence: Literal[
        "off", "token-k2", "token-k3", "sum-k2", "sum-k3", "mean-k2", "mean-k3", "max-k2", "max-k3"
    ] = key(
        "off",
        "Mask by divergence from the engine above divergence_max, estimated as k2 or k3: single "
        "tokens, or responses by the sum, mean or maximum over their tokens.",
    )
    divergence_max: float = key(0.01, "Highest divergence that is not masked.", gt=0)

    @model_validator(mode="before")
    @classmethod
    def _keys_of_the_preset(cls, values: Any) -> Any:
        name = _preset(values)
        return values if name is None else {**PRESETS.get(name, {}), **values, "preset": name}

    @model_validator(mode="after")
    def _preset_holds(self) -> RolloutCorrectionConfig:
        for name in ("importance", "mask", "divergence"):
            wanted = PRESETS[self.preset].get(name) if self.preset else None
            if wanted is not None and (value := getattr(self, name)) != wanted:
                raise ValueError(
                    f"algorithm.rollout_correction.{name}={value} contradicts "
                    f"preset={self.preset}, which is {name}={wanted}; remove one of the two"
                )
        return self

    @property
    def drops(self) -> bool:
        """Whether tokens or responses may be masked."""
        return self.mask != "off" or self.divergence != "off"

    @model_validator(mode="after")
    def _low_below_high(self) -> RolloutCorrectionConfig:
        if self.mask_low >= self.mask_high:
            raise ValueError(
                f"algorithm.rollout_correction.mask_low={self.mask_low} is not below "
                f"mask_high={self.mask_high}: every token would be masked; swap the two"
            )
        return self

    @model_validator(mode="after")
    def _weights_have_an_interval(self) -> RolloutCorrectionConfig:
        if self.importance_min is not None and self.importance_min >= self.importance_max:
            raise ValueError(
                f"algorithm.rollout_correction.importance_min={self.importance_min} is not below "
                f"importance_max={self.importance_max}: every weight would be 0; lower "
                "importance_min"
            )
        if self.importance == "off" and (
            self.importance_min is not None or self.importance_normalize
        ):
            raise ValueError(
                "algorithm.rollout_correction.importance_min and importance_normalize have no "
                "effect with importance=off; remove them, or set importance to stale, token or "
                "sequence"
            )
        return self


class AlgorithmConfig(Section):
    """Advantage and loss. The default is DAPO; GRPO is a choice of its keys."""

    advantage: Literal[
        "grpo", "dr-grpo", "rloo", "opo", "reinforce++", "reinforce++-baseline", "batch-std"
    ] = key(
        "grpo",
        "Advantage of a response: reward - group mean, divided by the group's std (grpo, also "
        "DAPO's), by the step's (batch-std) or not at all (dr-grpo); docs/training.md has all.",
    )
    loss: Literal[
        "dapo",
        "gspo",
        "cispo",
        "sapo",
        "gmpo",
        "dppo-tv",
        "clip-cov",
        "kl-cov",
        "dro",
        "reinforce",
        "custom",
    ] = key("dapo", "Policy loss of a token; docs/training.md has the formulas.")
    clip_ratio_low: float = key(
        0.2,
        "Lower clip: ratios stop at 1 - clip_ratio_low. Defaults: gspo 0.0003; gmpo 0.4, a bound "
        "of the log-ratio.",
        ge=0,
        lt=1,
    )
    clip_ratio_high: float = key(
        0.28,
        "Upper clip: ratios stop at 1 + clip_ratio_high (DAPO's clip-higher). Defaults: gspo "
        "0.0004; gmpo 0.4, a bound of the log-ratio.",
        ge=0,
        le=10,
    )
    clip_ratio_dual: float = key(10.0, "Dual clip: ratio bound for negative advantages.", gt=1)
    loss_aggregation: Literal[
        "token-mean",
        "token-sum",
        "seq-mean-token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum-norm",
    ] = key(
        "token-mean",
        "How token losses are aggregated over a mini-batch. Default of gspo, sapo and gmpo: "
        "seq-mean-token-mean.",
    )
    loss_norm_tokens: int | None = key(
        None, "Divisor of seq-mean-token-sum-norm, such as the response limit (Dr. GRPO).", ge=1
    )
    entropy_coefficient: float = key(0.0, "Weight of the entropy bonus in the loss.", ge=0, le=10)
    router_aux_loss_coefficient: float = key(
        0.0,
        "Weight of the load-balancing loss of a mixture's routers, over the tokens of each "
        "sequence.",
        ge=0,
        le=10,
    )
    routing_replay: Literal["off", "policy", "rollout"] = key(
        "off",
        "Experts of each token in the policy: off: the routers' choice; policy: in updates, those "
        "of the pass for old_log_probs (R2); rollout: those of the engine that sampled it (R3).",
    )
    old_log_probs: Literal["policy", "engine"] = key(
        "policy",
        "Denominator of the clipped ratio: the policy's log-probs before the updates, or the "
        "engine's as sampled, which saves a forward pass.",
    )
    sapo: SapoConfig = Field(default_factory=SapoConfig)
    clip_cov: ClipCovConfig = Field(default_factory=ClipCovConfig)
    kl_cov: KlCovConfig = Field(default_factory=KlCovConfig)
    dro: DroConfig = Field(default_factory=DroConfig)
    dppo_tv: DppoTvConfig = Field(default_factory=DppoTvConfig)
    custom_loss: CustomLossConfig = Field(default_factory=CustomLossConfig)
    kl: KLConfig = Field(default_factory=KLConfig)
    rollout_correction: RolloutCorrectionConfig = Field(default_factory=RolloutCorrectionConfig)
    compat: Literal["none", "verl"] = key(
        "none", "verl: reproduce verl where this project differs on purpose (docs/departures.md)."
    )

    @property
    def selects_tokens(self) -> bool:
        """Whether the loss needs tokens selected by covariance."""
        return LOSS_KINDS[self.loss].selects_tokens

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_loss_and_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        custom = values.get("custom_loss")
        is_custom = isinstance(custom, dict) and custom.get("path") is not None
        loss = values.get("loss", "custom" if is_custom else "dapo")
        kind = LOSS_KINDS.get(str(loss), LossKind())
        preset = _preset(values.get("rollout_correction")) or ""
        anchor = {"old_log_probs": "engine"} if preset.startswith("bypass") else {}
        return {"loss": loss, **kind.defaults, **anchor, **values}

    @model_validator(mode="after")
    def _settings_are_read(self) -> AlgorithmConfig:
        for name, losses in readers().items():
            default = type(self).model_fields[name].get_default(call_default_factory=True)
            value = getattr(self, name)
            if self.loss not in losses and value != default:
                setting = name if isinstance(value, Section) else f"{name}={value}"
                raise ValueError(
                    f"algorithm.{setting} would be ignored by algorithm.loss={self.loss}; remove "
                    f"it, or set algorithm.loss to {' or '.join(losses)}"
                )
        return self

    @model_validator(mode="after")
    def _bypass_anchors_at_the_engine(self) -> AlgorithmConfig:
        preset = self.rollout_correction.preset
        if preset and preset.startswith("bypass") and self.old_log_probs != "engine":
            raise ValueError(
                f"algorithm.old_log_probs={self.old_log_probs} contradicts "
                f"algorithm.rollout_correction.preset={preset}, which is old_log_probs=engine; "
                "remove one of the two"
            )
        return self

    @model_validator(mode="after")
    def _anchor_is_read(self) -> AlgorithmConfig:
        if self.loss == "reinforce" and self.old_log_probs == "engine":
            raise ValueError(
                "algorithm.loss=reinforce has no ratio to algorithm.old_log_probs=engine, which "
                "would only turn off the weights of stale tokens; set old_log_probs=policy"
            )
        return self

    @model_validator(mode="after")
    def _replayed_routing_is_recorded(self) -> AlgorithmConfig:
        if self.routing_replay == "policy" and self.old_log_probs == "engine":
            raise ValueError(
                "algorithm.routing_replay=policy replays the policy's pass for old log-probs, "
                "which algorithm.old_log_probs=engine omits; set old_log_probs=policy, or "
                "routing_replay=off"
            )
        return self

    @model_validator(mode="after")
    def _custom_loss_has_a_file(self) -> AlgorithmConfig:
        if self.loss == "custom" and self.custom_loss.path is None:
            raise ValueError(
                "algorithm.loss=custom needs a file; set algorithm.custom_loss.path, or another "
                "algorithm.loss"
            )
        return self

    @model_validator(mode="after")
    def _norm_has_its_constant(self) -> AlgorithmConfig:
        needs_constant = self.loss_aggregation == "seq-mean-token-sum-norm"
        if needs_constant and self.loss_norm_tokens is None:
            raise ValueError(
                "algorithm.loss_aggregation=seq-mean-token-sum-norm divides by "
                "algorithm.loss_norm_tokens, which is not set; set it, for instance to "
                "rollout.max_response_tokens"
            )
        if not needs_constant and self.loss_norm_tokens is not None:
            raise ValueError(
                f"algorithm.loss_norm_tokens={self.loss_norm_tokens} would be ignored by "
                f"algorithm.loss_aggregation={self.loss_aggregation}; remove it or set "
                "seq-mean-token-sum-norm"
            )
        return self
