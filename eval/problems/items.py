"""The data of an evaluation: problems as a file has them, and items as they are asked and graded."""

from __future__ import annotations

from dataclasses import dataclass

from eval.answers.grading import GraderName
from eval.problems.prompts import TEMPLATES, Message, Prompt, Template


@dataclass(frozen=True)
class Problem:
    """One row of an evaluation file.

    `level` and `subject` are free text that the report groups by; None where the file has none.
    """

    id: str
    text: str
    gold: str
    subject: str | None = None
    level: str | None = None
    messages: tuple[Message, ...] | None = None  # the prompt where the file has a whole one


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
