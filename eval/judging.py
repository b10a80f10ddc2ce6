"""Who grades the responses of an evaluation set."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

from eval.answers.grading import GRADER, Grade
from eval.answers.judge import Judge as MathematicsJudge
from eval.problems.choice import CHOICE_GRADER, grade_choice
from eval.problems.items import Ruler


class Judge(Protocol):
    """Grades one response at a time, from any thread, and raises nothing."""

    @property
    def num_killed(self) -> int:
        """Rows that went beyond a limit of time or memory and count as wrong."""

    def grade(self, response: str | None, finish_reason: str | None, gold: str) -> Grade:
        """The verdict on a response; None stands for a failed request."""


class _ChoiceJudge:
    num_killed = 0  # letters need no limits

    def grade(self, response: str | None, finish_reason: str | None, gold: str) -> Grade:
        return grade_choice(response, finish_reason, gold)


def grader_name(ruler: Ruler) -> str:
    """The rule and its version, as settings.json records it."""
    return CHOICE_GRADER if ruler == "choice" else GRADER


def ruler_of(grader: str) -> Ruler:
    """The ruler whose rule settings.json records, in whatever version."""
    return "choice" if grader.partition("/")[0] == CHOICE_GRADER.partition("/")[0] else "mathematics"


@contextlib.contextmanager
def open_judge(ruler: Ruler) -> Iterator[Judge]:
    """The judge of a ruler, with the processes it needs."""
    if ruler == "choice":
        yield _ChoiceJudge()
        return
    with MathematicsJudge() as judge:
        yield judge
