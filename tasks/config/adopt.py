"""The section `adopt`: a checkpoint trained elsewhere, in place of this recipe's training."""

from __future__ import annotations

from pydantic import model_validator

from dapo_core.config.fields import Section, key


class AdoptConfig(Section):
    """A checkpoint trained elsewhere, in place of this recipe's training; see `dapo adopt`."""

    folder: str | None = key(
        None,
        "Output or checkpoint of verl (FSDP) or TRL, or any Hugging Face folder; unset: train.",
        min_length=1,
    )
    log: str | None = key(
        None,
        "Log of that training, for the report's curves: verl's or MindSpeed's console, or JSON "
        "lines.",
        min_length=1,
    )
    config: str | None = key(
        None, "Configuration or script of that training, kept beside its output.", min_length=1
    )

    @model_validator(mode="after")
    def _folder_is_set(self) -> AdoptConfig:
        for name in ("log", "config"):
            if self.folder is None and (value := getattr(self, name)):
                raise ValueError(
                    f"adopt.{name}={value} would be ignored without adopt.folder; set it to the "
                    "folder of that training's checkpoint"
                )
        return self
