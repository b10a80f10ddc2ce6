"""A scorer's word on one response."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["right", "wrong", "no_answer", "error", "timeout"]


@dataclass(frozen=True)
class Score:
    """A scorer's word on one response.

    `error` and `timeout` say that there is no word: the scorer failed, which tells nothing of the response. Their
    value is 0.0, midway between math_dapo's right and wrong.
    """

    value: float
    verdict: Verdict
    answer: str | None = None
    acc: float = 0.0  # what the filter metric `acc` looks at: 1 right, 0 not, unless the scorer says otherwise


def failed_score(verdict: Literal["error", "timeout"]) -> Score:
    """The score of a response whose scorer failed."""
    return Score(0.0, verdict)
