"""Keys of `train` about steps, batches and the optimizer."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from dapo_core.config.fields import Section, key


class UpdatesConfig(Section):
    """What a training step learns from, and how AdamW steps."""

    total_steps: int = key(200, "Training steps; dynamic sampling does not change their number.", ge=1)
    train_prompts: int = key(512, "Prompts trained on per step (P).", ge=1)
    mini_prompts: int = key(32, "Prompts per optimizer step.", ge=1)
    passes: int = key(1, "Passes of the optimizer over the prompts of a step.", ge=1, le=1000)
    shuffle_passes: bool = key(
        True, "Give every further pass mini-batches of its own; false repeats those of the first."
    )
    learning_rate: float = key(1e-6, "Peak AdamW learning rate.", gt=0, le=1)
    warmup_steps: int = key(320, "Optimizer steps of linear warm-up; the paper's 20 rollout steps of 16.", ge=0)
    schedule: Literal["constant", "linear", "cosine", "wsd"] = key(
        "constant",
        "Learning rate after warm-up: constant; falling to the end as a line or half a cosine; or constant, then "
        "falling as half a cosine over the last part (warm-up, stable, decay).",
    )
    schedule_steps: int | None = key(
        None, "Optimizer steps at which the falling rate ends, warm-up included; unset: all of the training.", ge=1
    )
    min_learning_rate_ratio: float = key(
        0.0, "Share of the peak learning rate that a falling rate ends at.", ge=0, le=1
    )
    decay_ratio: float = key(0.1, "Share of the steps after warm-up over which wsd falls.", gt=0, le=1)
    weight_decay: float = key(0.1, "AdamW weight decay.", ge=0, le=1)
    adam_beta1: float = key(0.9, "AdamW's decay of the mean gradient.", ge=0, lt=1)
    adam_beta2: float = key(0.999, "AdamW's decay of the mean squared gradient.", ge=0, lt=1)
    adam_epsilon: float = key(1e-8, "Added to the root of AdamW's mean squared gradient.", gt=0, le=1)
    max_grad_norm: float = key(1.0, "Global gradient norm above which gradients are scaled down.", gt=0)

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of a full training step."""
        return self.passes * (self.train_prompts // self.mini_prompts)

    @property
    def num_schedule_steps(self) -> int:
        """The optimizer step whose learning rate is the last of the schedule."""
        return self.schedule_steps or self.total_steps * self.updates_per_step

    @model_validator(mode="after")
    def _mini_divides_train(self) -> UpdatesConfig:
        if self.train_prompts % self.mini_prompts:
            raise ValueError(
                f"train.train_prompts={self.train_prompts} is not a multiple of train.mini_prompts="
                f"{self.mini_prompts}; an optimizer step would get {self.train_prompts % self.mini_prompts} "
                "prompts instead; change one of the two"
            )
        return self

    @model_validator(mode="after")
    def _schedule_has_room(self) -> UpdatesConfig:
        fields = type(self).model_fields
        read = {"constant": (), "wsd": ("schedule_steps", "min_learning_rate_ratio", "decay_ratio")}
        names = read.get(self.schedule, ("schedule_steps", "min_learning_rate_ratio"))
        ignored = [
            f"train.{name}={getattr(self, name)}"
            for name in read["wsd"]
            if name not in names and getattr(self, name) != fields[name].default
        ]
        if ignored:
            raise ValueError(
                f"{', '.join(ignored)} would be ignored by train.schedule={self.schedule}; remove "
                f"{'it' if len(ignored) == 1 else 'them'}, or set train.schedule="
                f"{'wsd' if names else 'linear, cosine or wsd'}"
            )
        if self.schedule != "constant" and self.warmup_steps >= self.num_schedule_steps:
            steps = "train.total_steps" if self.schedule_steps is None else "train.schedule_steps"
            raise ValueError(
                f"train.warmup_steps={self.warmup_steps} leaves train.schedule={self.schedule} nothing of its "
                f"{self.num_schedule_steps} optimizer steps to fall over; lower train.warmup_steps or raise "
                f"{steps}"
            )
        return self
