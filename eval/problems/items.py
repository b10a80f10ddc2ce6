"""Problems as stored in files, and items as sent and graded in an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.answers.grading import GraderName
from eval.problems.prompts import TEMPLATES, Message, Prompt, Template, problem_of


@dataclass(frozen=True)
class Problem:
    """A problem from a file.

    The report groups by `level` and `subject`, which are free text. Files in DAPO-Math-17k's schema
    also have `messages`, `data_source` and `extra_info`; prepared files have the fields after them
    too.
    """

    id: str
    text: str
    gold: str
    subject: str | None = None
    level: str | None = None
    messages: tuple[Message, ...] | None = None  # the complete prompt
    data_source: str | None = None  # selects the scorer
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    dataset: str = ""  # name of its set
    weight: float = 1.0  # of its set in the training mix
    template: str | None = None
    grader: GraderName | None = None
    num_rows: int = 1  # rows with this problem in the file
    # as the row holds them, one for each `<image>`; in prepared files, paths relative to the file
    images: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Item:
    """A prompt as it is sent, and its gold answer."""

    id: str
    prompt: Prompt
    gold: str
    subject: str | None = None
    level: str | None = None
    options: tuple[str, ...] = ()  # compared by their log-probs; if empty, a response is generated
    data_source: str | None = field(default=None, compare=False)  # for scorers, like extra_info
    extra_info: Mapping[str, Any] = field(default_factory=dict, compare=False)
    # one for each `<image>` in the prompt, named by the sha256 of its content
    images: tuple[Path, ...] = field(default=(), compare=False)

    @property
    def image_names(self) -> list[str]:
        """The file names of its pictures."""
        return [file.name for file in self.images]

    @property
    def problem(self) -> str:
        """The last message of the prompt, or its whole text."""
        return problem_of(self.prompt)


@dataclass(frozen=True)
class EvaluationSet:
    """Items with distinct prompts that share a template and a grader."""

    items: tuple[Item, ...]
    benchmark: str | None = None  # None: the user's own file
    template: Template = TEMPLATES["given"]
    grader: GraderName = "mathematics"
    num_repeats: int = 1  # rows per problem in the file; multiplies the samples per item

    @property
    def is_loglikelihood(self) -> bool:
        """True if options are compared by their log-probs instead of generating responses."""
        return bool(self.items and self.items[0].options)
