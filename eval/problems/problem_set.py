"""A set of problems of the registry: where it is published, how its rows are read, asked and scored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from eval.answers.grading import GraderName
from eval.problems import ProblemsError
from eval.problems.rows import Schema

Hub = Literal["huggingface", "modelscope", "url"]
Split = Literal["train", "test"]


@dataclass(frozen=True)
class ProblemSet:
    """A named set. Its splits are references by hub, the default hub first.

    `scorer` rewards the responses of a training, `grader` judges those of an evaluation; `template` is the prompt
    unless the rows are asked in their own words (`given`).
    """

    name: str
    about: str
    licence: str
    schemas: tuple[Schema, ...]
    train: Mapping[str, str] = field(default_factory=dict)
    test: Mapping[str, str] = field(default_factory=dict)
    num_items: int | None = None  # of the complete test split; None: any number
    scorer: str = "math_boxed"
    template: str = "aisbench"
    grader: GraderName = "mathematics"

    def source(self, split: Split, hub: Hub | None = None) -> str:
        """The reference of a split on a hub, or on its default one. Raises ProblemsError where there is none."""
        sources = self.train if split == "train" else self.test
        if not sources:
            use, key = ("train on", "data.train") if split == "train" else ("evaluate with", "data.eval")
            raise ProblemsError(f"{self.name} has no rows to {use}; name a file in {key}, or another set")
        if hub is None:
            return next(iter(sources.values()))
        if hub not in sources:
            raise ProblemsError(
                f"{self.name} is not registered on data.hub={hub}, only on {', '.join(sources)}; set data.hub to "
                "one of these, or name its id there"
            )
        return sources[hub]
