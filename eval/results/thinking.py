"""Thinking and answer tokens, and the accuracy under lower token limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from eval.results.rows import Row

MAX_LIMITS = 8


@dataclass(frozen=True)
class Thinking:
    """Tokens spent on thinking and on answers."""

    num_responses: int  # with thinking
    mean_tokens: float  # over all responses
    mean_answer_tokens: float
    # by the server, or estimated from the share of characters
    counted: Literal["server", "share of text"]


@dataclass(frozen=True)
class Budget:
    """The result under a lower token limit: longer responses are truncated, so never right."""

    max_tokens: int
    accuracy: float
    truncated_rate: float


def measure_thinking(rows: Sequence[Row]) -> Thinking | None:
    """Measure thinking in answered rows; None without any, or if no tokens are counted."""
    thinking = [row for row in rows if row.num_chars[0] or row.reasoning_tokens]
    if not thinking or any(row.response_tokens is None for row in rows):
        return None
    mean = sum(map(thinking_tokens, rows)) / len(rows)
    is_counted = all(row.reasoning_tokens is not None for row in thinking)
    return Thinking(
        num_responses=len(thinking),
        mean_tokens=mean,
        mean_answer_tokens=sum(row.response_tokens or 0 for row in rows) / len(rows) - mean,
        counted="server" if is_counted else "share of text",
    )


def thinking_tokens(row: Row) -> float:
    """Return a response's thinking tokens, counted by the server or estimated by characters."""
    if row.reasoning_tokens is not None:
        return row.reasoning_tokens
    return (row.response_tokens or 0) * row.num_chars[0] / max(1, sum(row.num_chars))


def by_limit(max_tokens: int | None, *sides: Sequence[Row]) -> list[tuple[Budget, ...]]:
    """Return each side's results under the token limit and its halves, until no answer is right.

    Truncating is what a lower limit does, since a server generates token by token, except for a
    model that knows its limit. Empty if tokens are not counted, or if no half truncates anything.
    """
    rows = [row for side in sides for row in side]
    if not (rows and max_tokens) or any(row.response_tokens is None for row in rows):
        return []
    longest = max(row.response_tokens or 0 for row in rows)
    halves = [max_tokens >> power for power in range(1, MAX_LIMITS)]
    limits = [limit for limit in halves if 0 < limit < longest]
    found = [
        tuple(_budget(rows, limit) for rows in sides) for limit in limits and (max_tokens, *limits)
    ]
    last = next(
        (
            number
            for number, budgets in enumerate(found)
            if not any(one.accuracy for one in budgets)
        ),
        None,
    )
    return found if last is None else found[: last + 1]


def _budget(rows: Sequence[Row], limit: int) -> Budget:
    whole = [
        row for row in rows if row.verdict != "truncated" and (row.response_tokens or 0) <= limit
    ]
    return Budget(
        limit, sum(row.is_right for row in whole) / len(rows), (len(rows) - len(whole)) / len(rows)
    )
