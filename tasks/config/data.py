"""The section `data`: where prompts come from and how rows are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_serializer, field_validator, model_validator

from dapo_core.config.fields import Entry, Section, key, volatile
from dapo_core.config.training import PromptsConfig
from eval.problems.columns import Layout
from eval.problems.options import AnswerAs


class ArithmeticConfig(Section):
    """The generated problems of the set `arithmetic`."""

    num_train: int = key(4096, "Training problems.", ge=16, le=1_000_000)
    num_eval: int = key(600, "Held-out problems, disjoint from training.", ge=1, le=100_000)
    max_level: int = key(5, "Highest difficulty level.", ge=1, le=5)
    seed: int | None = key(None, "Seed of the problems; unset: run.seed.", ge=0)


class ShapesConfig(Section):
    """The generated pictures of the set `shapes`."""

    num_train: int = key(6000, "Training problems, with a picture each.", ge=16, le=1_000_000)
    num_eval: int = key(300, "Held-out problems, with pictures of their own.", ge=1, le=100_000)


class ColumnsConfig(Section):
    """Column names of the user's own rows; `a.b` is a key of an object. Unset: by usual names."""

    problem: tuple[str, ...] | None = key(
        None, "The problem's text, or several texts that are joined by blank lines."
    )
    messages: str | None = key(None, "A chat that ends with the problem, instead of `problem`.")
    options: tuple[str, ...] | None = key(
        None, "The options, in one column or in a column for each; []: the problem has none."
    )
    answer: str | None = key(None, "The gold answer.")
    answer_as: AnswerAs | None = key(
        None,
        "What the gold answer is of the options: letter, text, index from 0 or number from 1. "
        "Unset: whatever fits the answers.",
    )
    id: str | None = key(None, "A unique id of the row.")
    subject: str | None = key(None, "Subject, for grouping in the report.")
    level: str | None = key(None, "Difficulty level, for grouping in the report.")
    data_source: str | None = key(None, "Data source, which selects the scorer; unset: exact.")
    system: str | None = key(None, "A system prompt per row.")

    @property
    def layout(self) -> Layout:
        """The named columns."""
        named = {name: value for name, value in dict(self).items() if value is not None}
        return Layout(**named)

    @field_validator("problem", "options", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_serializer("problem", "options")
    def _as_written(self, names: tuple[str, ...] | None) -> Any:
        return names[0] if names is not None and len(names) == 1 else names

    @model_validator(mode="after")
    def _one_problem(self) -> ColumnsConfig:
        if self.problem and self.messages is not None:
            raise ValueError(
                f"data.columns.problem={', '.join(self.problem)} and "
                f"data.columns.messages={self.messages} both name the problem; remove one"
            )
        return self


class SetConfig(Entry):
    """One set of a mixture. Unset keys fall back to `data.*`."""

    what = "a set of data.train or data.eval"

    set: str = Field(
        description="A registered name, a file or folder, or a hub's id.", min_length=1
    )
    path: str | None = key(
        None,
        "Location of a registered set's rows: a file or folder, or a reference such as "
        "hf:ORG/NAME.",
    )
    weight: float = key(
        1.0, "Share of the training prompts, relative to the other sets.", gt=0, le=1e6
    )
    columns: ColumnsConfig | None = key(None, "As data.columns.")
    prompt_template: str | None = key(None, "As data.prompt_template.")
    system_prompt: str | None = key(None, "As data.system_prompt.")


def listed_sets(value: Any) -> Any:
    """One set or several, each a name or its keys, as a tuple of keys; else unchanged."""
    listed = [value] if isinstance(value, str | Mapping) else value
    if not isinstance(listed, list | tuple):
        return listed
    return tuple({"set": one} if isinstance(one, str) else one for one in listed)


class DataConfig(PromptsConfig):
    """Training prompts and the held-out evaluation sets."""

    train: tuple[SetConfig, ...] = key(
        (),
        "Sets to train on: a registered name, a path, hf:ORG/NAME, modelscope:ORG/NAME, a URL; or "
        "a list.",
    )
    eval: tuple[SetConfig, ...] = key((), "Sets to evaluate with, as data.train.")
    hub: Literal["huggingface", "modelscope", "url"] | None = volatile(
        None, "Hub for registered sets; unset: each set's default."
    )
    columns: ColumnsConfig = Field(default_factory=ColumnsConfig)
    prompt_template: str | None = key(
        None,
        "Text with {problem} or any column, a file with such a text, or a template of "
        "evaluate.prompt; unset: the set's.",
    )
    system_prompt: str | None = key(
        None, "System prompt of every problem; unset: the row's, if any."
    )
    contamination: Literal["remove", "warn", "error"] = key(
        "remove",
        "What to do with training problems that are also in a set of data.eval (docs/data.md).",
    )
    max_refused_ratio: float = key(
        0.01, "Maximum share of unusable training rows; more is an error.", ge=0, lt=1
    )
    image_max_pixels: int | None = key(
        None,
        "Pictures with more pixels are scaled down, once, before training and engines see them.",
        ge=1024,
    )
    arithmetic: ArithmeticConfig = Field(default_factory=ArithmeticConfig)
    shapes: ShapesConfig = Field(default_factory=ShapesConfig)

    @field_validator("train", "eval", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return listed_sets(value)

    @field_validator("train", "eval")
    @classmethod
    def _named_once(
        cls, sets: tuple[SetConfig, ...], info: ValidationInfo
    ) -> tuple[SetConfig, ...]:
        if not sets:
            raise ValueError(
                f"data.{info.field_name} is not set; set it to a registered name (dapo datasets), "
                "a file or folder, or a hub's id such as hf:ORG/NAME"
            )
        names = [(one.set, one.path) for one in sets]
        if len(set(names)) < len(names):
            raise ValueError(f"data.{info.field_name} names a set twice; give it a weight instead")
        return sets

    @field_serializer("train", "eval")
    def _as_written(self, sets: tuple[SetConfig, ...]) -> Any:
        plain = [
            one.set if one == SetConfig(set=one.set) else one.model_dump(exclude_unset=True)
            for one in sets
        ]
        return plain[0] if len(plain) == 1 and isinstance(plain[0], str) else plain

    def of(self, one: SetConfig) -> SetConfig:
        """The set with unset keys taken from this section."""
        return one.model_copy(
            update={
                name: getattr(self, name)
                for name in ("columns", "prompt_template", "system_prompt")
                if getattr(one, name) is None
            }
        )
