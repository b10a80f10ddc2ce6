"""The section `checkpoint`: what a training keeps, and where it continues from."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from dapo_core.config.fields import Section, key, volatile


class CheckpointConfig(Section):
    """Checkpoints of a training, and the one it continues from."""

    save_every: int = volatile(20, "Training steps between checkpoints.", ge=1)
    keep_last: int = volatile(2, "Newest checkpoints kept during training; the finished output keeps one.", ge=1)
    keep_best: int = key(0, "Checkpoints with the highest validation/accuracy that are kept as well.", ge=0)
    keep_steps: tuple[PositiveInt, ...] = volatile(
        (), "Steps whose checkpoints are kept for good; those of evaluate.checkpoints are added to them."
    )
    asynchronous: bool = volatile(
        True, "Write during training; needs host memory for a copy of weights and optimizer state."
    )
    resume: str = volatile(
        "auto", "auto: continue from the output's latest checkpoint; never: start over; or a checkpoint's path."
    )
    on_damage: Literal["previous", "stop"] = volatile(
        "previous",
        "When the latest checkpoint is damaged: continue from the newest older one that is sound, or stop.",
    )
    allow_changed: tuple[str, ...] = volatile(
        (), "Keys that may differ from the checkpoint's, such as train.learning_rate."
    )
