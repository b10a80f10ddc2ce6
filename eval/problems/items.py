"""Problems as a file holds them, and items as an evaluation sends and grades them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eval.answers.grading import GraderName
from eval.problems.prompts import TEMPLATES, Message, Prompt, Template


@dataclass(frozen=True)
class Problem:
    """A problem of a file.

    `level` and `subject` are free text that the report groups by; None where the file has none. Files in the
    schema of DAPO-Math-17k have `messages`, `data_source` and `extra_info` too, prepared ones what follows them.
    """

    id: str
    text: str
    gold: str
    subject: str | None = None
    level: str | None = None
    messages: tuple[Message, ...] | None = None  # the whole prompt, if the file has one
    data_source: str | None = None  # chooses the scorer
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    dataset: str = ""  # the set it is from
    weight: float = 1.0  # of that set among those trained on
    template: str | None = None  # what it was asked with, and the grader of its set
    grader: GraderName | None = None
    num_rows: int = 1  # of an evaluation file that hold it

    @property
    def asked(self) -> tuple[tuple[str, str], ...]:
        """What identifies it: role and stripped text of each message, or the problem as the user's."""
        messages = self.messages or ({"role": "user", "content": self.text},)
        return tuple((message["role"], message["content"].strip()) for message in messages)


@dataclass(frozen=True)
class Item:
    """One question: the prompt as it is sent, and the gold answer."""

    id: str
    prompt: Prompt
    gold: str
    subject: str | None = None
    level: str | None = None
    options: tuple[str, ...] = ()  # to be weighed by their log-probs; without any the prompt is answered
    data_source: str | None = field(default=None, compare=False)  # for graders that read it, as the next
    extra_info: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class EvaluationSet:
    """Items that share a prompt template and a grader, each with a different prompt."""

    items: tuple[Item, ...]
    benchmark: str | None = None  # None: the user's own file
    template: Template = TEMPLATES["given"]
    grader: GraderName = "mathematics"
    num_repeats: int = 1  # rows of each problem in the file: samples of the item

    @property
    def is_weighed(self) -> bool:
        """Whether options are weighed by their log-probs, instead of responses graded."""
        return bool(self.items and self.items[0].options)
