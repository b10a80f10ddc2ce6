"""Keys that look into a training without changing what it computes."""

from __future__ import annotations

from pydantic import Field, NonNegativeInt, PositiveInt

from dapo_core.config.fields import Section, volatile


class ProfileConfig(Section):
    """Traces of what the policy's ranks do, written into the training's output."""

    steps: tuple[PositiveInt, ...] = volatile(
        (), "Training steps to trace, 1 for the first; a trace is megabytes."
    )
    ranks: tuple[NonNegativeInt, ...] = volatile((0,), "Policy ranks that write a trace of each of these steps.")


class DiagnosisConfig(Section):
    """What is written about a training that is slow or diverges."""

    profile: ProfileConfig = Field(default_factory=ProfileConfig)
    nan_guard: bool = volatile(
        True,
        "Name the module that makes the first number that is not finite when an optimizer step is skipped for its "
        "gradient norm; its micro-batches run once more, at most 3 times in a training.",
    )
