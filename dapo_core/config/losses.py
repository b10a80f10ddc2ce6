"""The losses of `algorithm.loss`: their defaults, the settings they read, and their sections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import model_validator

from dapo_core.config.fields import Section, key


class CustomLossConfig(Section):
    """A user's loss: compute_loss(log_probs, old_log_probs, advantages, response_mask, responses).

    Runs in the policy ranks. Returns the loss of each token; see docs/training.md.
    """

    path: str | None = key(None, "Python file with a function that returns each token's loss.")
    name: str = key("compute_loss", "Function in the file.")


class SapoConfig(Section):
    """Temperatures of SAPO's soft gate; a higher one fades out off-policy tokens faster."""

    tau_positive: float = key(1.0, "Temperature for advantages above 0.", gt=0, le=100)
    tau_negative: float = key(1.05, "Temperature for other advantages.", gt=0, le=100)


class ClipCovConfig(Section):
    """Clip-Cov: random tokens whose covariance is between the bounds get no gradient."""

    ratio: float = key(0.0002, "Share of tokens chosen per mini-batch, at least 1.", gt=0, le=1)
    low: float = key(1.0, "Lower bound of the covariance.", ge=-1e6, le=1e6)
    high: float = key(5.0, "Upper bound of the covariance.", ge=-1e6, le=1e6)

    @model_validator(mode="after")
    def _low_below_high(self) -> ClipCovConfig:
        if self.low >= self.high:
            raise ValueError(
                f"algorithm.clip_cov.low={self.low} is not below high={self.high}: no token would "
                "be chosen; swap the two"
            )
        return self


class KlCovConfig(Section):
    """KL-Cov: the tokens of highest covariance get a KL penalty to the old policy."""

    ratio: float = key(0.0002, "Share of tokens chosen per mini-batch, at least 1.", gt=0, le=1)
    coefficient: float = key(1.0, "Weight of |log ratio| of chosen tokens.", ge=0, le=100)


class DroConfig(Section):
    """Direct reward optimisation: a quadratic penalty instead of a clip."""

    beta: float = key(0.5, "Weight of the squared log-ratio; half of it is added.", gt=0, le=100)


class DppoTvConfig(Section):
    """DPPO with total variation: bounds on the change of a token's probability."""

    low: float = key(0.15, "Largest fall of a token's probability for A <= 0.", ge=0, le=1)
    high: float = key(0.15, "Largest rise of a token's probability for A > 0.", ge=0, le=1)
    ratio_max: float = key(20.0, "Bound at which the detached ratio is truncated.", gt=1)


_CLIPS = ("clip_ratio_low", "clip_ratio_high")
_PER_RESPONSE = {"loss_aggregation": "seq-mean-token-mean"}


@dataclass(frozen=True)
class LossKind:
    """What a loss needs besides log-probs and advantages."""

    reads: tuple[str, ...] = ()  # keys and sections of `algorithm` that not every loss reads
    defaults: Mapping[str, Any] = field(default_factory=dict)  # where they differ from the schema's
    selects_tokens: bool = False  # by covariance, from a mini-batch's old log-probs


LOSS_KINDS: dict[str, LossKind] = {
    "dapo": LossKind((*_CLIPS, "clip_ratio_dual")),
    "gspo": LossKind(_CLIPS, _PER_RESPONSE | {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}),
    "cispo": LossKind(_CLIPS),
    "sapo": LossKind(("sapo",), _PER_RESPONSE),
    "gmpo": LossKind(_CLIPS, _PER_RESPONSE | {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}),
    "dppo-tv": LossKind(("dppo_tv",)),
    "clip-cov": LossKind((*_CLIPS, "clip_cov"), selects_tokens=True),
    "kl-cov": LossKind(("kl_cov",), selects_tokens=True),
    "dro": LossKind(("dro",)),
    "reinforce": LossKind(),
    "custom": LossKind(("custom_loss",)),
}


def readers() -> dict[str, list[str]]:
    """Return the losses that read a key or section, for those that not every loss reads."""
    keys = dict.fromkeys(key for kind in LOSS_KINDS.values() for key in kind.reads)
    return {key: [name for name, kind in LOSS_KINDS.items() if key in kind.reads] for key in keys}
