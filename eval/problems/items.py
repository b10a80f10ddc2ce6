"""Problems as a file has them, and the items of an evaluation as they are asked and graded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eval.answers.grading import GraderName
from eval.problems.prompts import TEMPLATES, Message, Prompt, Template


@dataclass(frozen=True)
class Problem:
    """One row of a file of problems.

    `level` and `subject` are free text that the report groups by; None where the file has none. Files in the
    schema of DAPO-Math-17k have the last three too.
    """

    id: str
    text: str
    gold: str
    subject: str | None = None
    level: str | None = None
    messages: tuple[Message, ...] | None = None  # the prompt where the file has a whole one
    data_source: str | None = None  # chooses the scorer
    extra_info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Item:
    """One question: what is sent as it is, and the gold answer that grades the response."""

    id: str
    prompt: Prompt
    gold: str
    subject: str | None = None
    level: str | None = None


@dataclass(frozen=True)
class EvaluationSet:
    """Items that are asked in one way and graded by one grader."""

    items: tuple[Item, ...]
    benchmark: str | None = None  # None: a file of the user's own
    template: Template = TEMPLATES["given"]
    grader: GraderName = "mathematics"
