"""The `validation` section."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from dapo_core.config.fields import Section, key, volatile

SamplingSource = Literal["settings", "model"]
SAMPLING_SOURCES = "settings: this section's temperature, top_p, top_k; model: generation_config's."


class ValidationConfig(Section):
    """Accuracy on held-out sets during training; by default one greedy response per prompt."""

    every: int = key(0, "Training steps between validations; 0: never.", ge=0)
    before_training: bool = key(False, "Also validate before the first step, as step 0.")
    num_prompts: int | None = key(None, "Use the first held-out prompts only; unset: all.", ge=1)
    num_samples: int = key(1, "Responses per prompt (N of mean@N, best@N, maj@N).", ge=1, le=1024)
    sampling: SamplingSource = key("settings", SAMPLING_SOURCES)
    temperature: float = key(0.0, "Sampling temperature; 0: greedy.", ge=0, le=10)
    top_p: float = key(1.0, "Nucleus sampling probability mass.", gt=0, le=1)
    top_k: int = key(-1, "Sample among the k likeliest tokens; -1: all.", ge=-1)
    num_logged: int = volatile(4, "Responses per validation logged as text.", ge=0, le=1000)

    @model_validator(mode="after")
    def _samples_may_differ(self) -> ValidationConfig:
        require_model_alone("validation", self)
        if self.before_training and not self.every:
            raise ValueError(
                "validation.before_training=true needs validations to compare with, but "
                "validation.every=0 disables them; set validation.every"
            )
        if self.sampling == "model" or self.temperature > 0:
            return self
        if self.num_samples > 1:
            raise ValueError(
                f"validation.num_samples={self.num_samples} at temperature 0 would repeat the "
                f"same response {self.num_samples} times; set validation.temperature, such as "
                "1.0, or validation.sampling=model"
            )
        if self.top_p < 1 or self.top_k > 0:
            raise ValueError(
                f"validation.top_p={self.top_p}, validation.top_k={self.top_k} would be ignored "
                "at temperature 0; set validation.temperature, or remove them"
            )
        return self


def require_model_alone(name: str, section: Any) -> None:
    """Raise ValueError if `sampling: model` would ignore values that the section sets."""
    if section.sampling == "settings":
        return
    fields = type(section).model_fields
    values = {each: getattr(section, each) for each in ("temperature", "top_p", "top_k")}
    ignored = [
        f"{name}.{each}={value}" for each, value in values.items() if value != fields[each].default
    ]
    if ignored:
        raise ValueError(
            f"{', '.join(ignored)} would be ignored by {name}.sampling=model, which uses the "
            f"model's values; remove {'it' if len(ignored) == 1 else 'them'}, or set "
            f"{name}.sampling=settings"
        )
