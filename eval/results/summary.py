"""Statistics of one evaluation, as in summary.json: avg@k, pass@k, maj@k, token limits."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import comb
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeVar

from eval.answers.grading import Grade, is_finished
from eval.results.rows import (
    SUMMARY_FILE,
    Evaluation,
    Row,
    Samples,
    is_answered,
    num_right,
    write_json,
)
from eval.results.statistics import share_interval

logger = logging.getLogger(__name__)

MAX_LIMITS = 8
MAX_REASONS = 5  # shown
T = TypeVar("T")
IsSame = Callable[[str, str], bool]  # whether two answers are equal


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


@dataclass(frozen=True)
class Rates:
    """Statistics over answered rows, since a failed request says nothing about the model."""

    accuracy: float  # by the exact grader
    no_answer_rate: float
    truncated_rate: float
    request_failed_rate: float  # over all rows of the evaluation
    mean_response_tokens: float | None
    thinking: Thinking | None
    scorer: dict[str, float] | None  # {mean_score, errors: failed calls} with evaluate.scorer
    acc_norm: float | None  # lm-eval's, with evaluate.mode=loglikelihood
    unknown_finish_reasons: dict[str, int]  # reason -> responses; their text decides


@dataclass(frozen=True)
class Summary(Rates):
    """The result of an evaluation. With several samples per item, `n` counts samples."""

    n: int
    num_items: int
    num_samples: int  # per item
    by_level: dict[str, dict[str, float]]  # level -> {n, right, accuracy}
    by_subject: dict[str, dict[str, float]]
    by_limit: list[Budget]  # results under lower token limits
    # {accuracy, raises: its own code would raise}; None if not its rule
    aisbench: dict[str, float] | None
    # avg@k, pass@k, maj@k -> {value, ci95}; None for one sample
    samples: dict[str, dict[str, Any]] | None
    repeats: dict[str, float] | None  # see _repeats; None unless several greedy samples
    settings: dict[str, Any]


def measure_rates(answered: Sequence[Row], evaluation: Evaluation) -> Rates:
    """Measure these answered rows of the evaluation."""
    # several times as fast as `rate` for each verdict
    counts = Counter([row.verdict for row in answered])
    shares = {verdict: count / len(answered) for verdict, count in counts.items()}
    return Rates(
        accuracy=shares.get("right", 0.0),
        no_answer_rate=shares.get("no_answer", 0.0),
        truncated_rate=shares.get("truncated", 0.0),
        request_failed_rate=rate(evaluation.rows, lambda row: not row.is_answered),
        mean_response_tokens=mean_response_tokens(answered),
        thinking=measure_thinking(answered),
        scorer=summarise_scores(answered),
        acc_norm=acc_norm(answered),
        unknown_finish_reasons=count_unknown_reasons(answered),
    )


def summarise(evaluation: Evaluation, is_same: IsSame) -> Summary:
    """Summarise an evaluation. `is_same` decides whether two answers count as one (maj@k)."""
    settings = evaluation.settings
    answered = [row for row in evaluation.rows if row.is_answered]
    num_samples, temperature = evaluation.num_samples, settings["sampling"]["temperature"]
    return Summary(
        **vars(measure_rates(answered, evaluation)),
        n=len(answered),
        num_items=len(evaluation.items),
        num_samples=num_samples,
        by_level=_accuracy_by(answered, "level"),
        by_subject=_accuracy_by(answered, "subject"),
        by_limit=[
            budget for (budget,) in by_limit(settings["sampling"].get("max_tokens"), answered)
        ],
        aisbench={
            "accuracy": rate(answered, lambda row: row.is_right_by_aisbench),
            "raises": count_raises(answered),
        }
        if evaluation.has_aisbench
        else None,
        samples=_sample_metrics(evaluation, is_same) if num_samples > 1 else None,
        repeats=_repeats(evaluation.items.values())
        if num_samples > 1 and temperature == 0
        else None,
        settings=settings,
    )


def write_summary(
    folder: Path, evaluation: Evaluation, grade: Callable[[str, str, str], Grade]
) -> Summary:
    """Write and return the summary. Answers count as one if the grader finds them equal.

    Warns about what makes verdicts doubtful: unknown finish reasons, and responses without text.
    """
    summary = summarise(evaluation, same_answer_by(grade))
    write_json(folder / SUMMARY_FILE, asdict(summary))
    if summary.unknown_finish_reasons:
        logger.warning("%s: %s", folder, describe_unknown_reasons(summary.unknown_finish_reasons))
    empty = [row for row in evaluation.rows if row.verdict == "no_answer" and not row.response]
    if empty:
        logger.warning(
            "%s: %d responses have no text, %d of them only thinking, and count as without an "
            "answer. If these are many, the server's reasoning parser may not fit the model",
            folder,
            len(empty),
            sum(bool(row.reasoning) for row in empty),
        )
    return summary


def count_unknown_reasons(rows: Iterable[Row]) -> dict[str, int]:
    """Count the finish reasons that do not say whether the response was cut off."""
    reasons = Counter(row.finish_reason for row in rows)
    return {
        reason: count
        for reason, count in reasons.most_common()
        if reason and is_finished(reason) is None
    }


def describe_unknown_reasons(counts: Mapping[str, int]) -> str:
    """Say what unknown finish reasons mean for the verdicts."""
    first = list(counts.items())[:MAX_REASONS]
    listed = ", ".join(f"{reason[:60]!r} ({count} responses)" for reason, count in first)
    listed += f" and {len(counts) - MAX_REASONS} more" if len(counts) > MAX_REASONS else ""
    return (
        f"unknown finish reasons: {listed}. Whether these responses were cut off is decided by "
        "their text, as without a reason"
    )


def summarise_scores(rows: Iterable[Row]) -> dict[str, float] | None:
    """Return {mean_score, errors} of rows graded by a scorer, None for other rows."""
    details = [
        row.details for row in rows if row.details and row.details.keys() & {"score", "error"}
    ]
    scores = [one["score"] for one in details if "score" in one]
    if not details:
        return None
    return {"mean_score": sum(scores) / max(1, len(scores)), "errors": len(details) - len(scores)}


def acc_norm(rows: Sequence[Row]) -> float | None:
    """Return the accuracy by log-probs per character of the option; None without log-probs."""
    ranked = [(row.gold, row.details) for row in rows if row.details and "log_probs" in row.details]
    right = 0
    for gold, details in ranked:
        pairs = zip(details["log_probs"], details["options"], strict=True)
        right += max(pairs, key=lambda pair: pair[0] / max(1, len(pair[1])))[1] == gold
    return right / len(ranked) if ranked else None


def count_raises(rows: Iterable[Row]) -> int:
    """Count rows on which AISBench's own code would raise."""
    return sum(row.aisbench is not None and row.aisbench.raises for row in rows)


def item_metrics(items: Sequence[Samples], is_same: IsSame) -> dict[str, list[float]]:
    """Return avg@k, pass@2, pass@4, ..., pass@k and maj@k, a value per item with k samples."""
    k = len(items[0])
    return {
        f"avg@{k}": [num_right(samples) / k for samples in items],
        **{
            f"pass@{size}": [pass_at(size, k, num_right(samples)) for samples in items]
            for size in _sizes(k)
        },
        f"maj@{k}": [majority_share(samples, is_same) for samples in items],
    }


def largest_steps(k: int) -> dict[str, float]:
    """Return how much one of k responses changes an item's value, at most, per metric."""
    return {f"avg@{k}": 1 / k, **{f"pass@{size}": size / k for size in _sizes(k)}, f"maj@{k}": 1.0}


def _sizes(k: int) -> list[int]:
    return sorted(
        {size for size in (2**power for power in range(1, k.bit_length())) if size < k} | {k}
    )


def pass_at(k: int, num_samples: int, num_right: int) -> float:
    """Estimate pass@k without bias: 1 - C(n-c, k) / C(n, k) (arXiv:2107.03374, eq. 1)."""
    return 1 - comb(num_samples - num_right, k) / comb(num_samples, k)


def majority_share(samples: Samples, is_same: IsSame) -> float:
    """Return 1 if the most frequent answer is right, 1/m if it ties with m - 1 others, else 0.

    Answers that `is_same` finds equal count as one. Responses that are truncated or without an
    answer have no vote.
    """
    right = num_right(samples)
    wrong = Counter(
        row.answer for row in samples if row.verdict == "wrong" and row.answer is not None
    )
    if not right or max(wrong.values(), default=0) > right:
        return 0.0  # merging equal wrong answers could only add votes
    if sum(wrong.values()) < right:
        return 1.0
    votes: dict[str, int] = {}
    for answer, count in wrong.most_common():
        known = next((other for other in votes if is_same(answer, other)), answer)
        votes[known] = votes.get(known, 0) + count
    return 0.0 if max(votes.values()) > right else 1 / (1 + list(votes.values()).count(right))


def same_answer_by(grade: Callable[[str, str, str], Grade]) -> IsSame:
    """Return `is_same(answer, other)`: the grader accepts one with the other as gold."""

    @functools.cache
    def is_same(answer: str, other: str) -> bool:
        return grade(f"\\boxed{{{answer}}}", "stop", other).verdict == "right"

    return is_same


def _accuracy_by(rows: Sequence[Row], field: str) -> dict[str, dict[str, float]]:
    return {
        key: {
            "n": len(group),
            "right": sum(row.is_right for row in group),
            "accuracy": rate(group, lambda row: row.is_right),
        }
        for key, group in group_by(rows, attrgetter(field)).items()
    }


def _sample_metrics(evaluation: Evaluation, is_same: IsSame) -> dict[str, dict[str, Any]]:
    """Compute the metrics with 95 % intervals over items without failed requests."""
    items = [samples for samples in evaluation.items.values() if is_answered(samples)]
    metrics = item_metrics(items, is_same) if items else {}
    steps = largest_steps(evaluation.num_samples)
    return {
        name: {"value": sum(values) / len(values), "ci95": share_interval(values, steps[name])}
        for name, values in metrics.items()
    }


def _repeats(items: Iterable[Samples]) -> dict[str, float]:
    """Return the share of items whose greedy samples differ, 0 for a deterministic server."""
    answered = [[row for row in samples if row.is_answered] for samples in items]
    repeated = [group for group in answered if len(group) > 1]

    def share_differing(field: str) -> float:
        num_differing = sum(len({getattr(row, field) for row in group}) > 1 for group in repeated)
        return num_differing / len(repeated) if repeated else 0.0

    return {
        "num_items": len(repeated),
        "differing_responses": share_differing("response"),
        "differing_answers": share_differing("answer"),
        "differing_verdicts": share_differing("verdict"),
    }


def group_by(things: Iterable[T], key_of: Callable[[T], str | None]) -> dict[str, list[T]]:
    """Group by a level or subject in natural order (2 before 10), skipping things without one."""
    groups: dict[str, list[T]] = {}
    for thing in things:
        if (key := key_of(thing)) is not None:
            groups.setdefault(key, []).append(thing)
    return {key: groups[key] for key in sorted(groups, key=_natural)}


def _natural(key: str) -> tuple[int, float, str]:
    with contextlib.suppress(ValueError):
        return 0, float(key), key
    return 1, 0.0, key


def rate(rows: Sequence[Row], is_counted: Callable[[Row], bool]) -> float:
    """Return the share of rows that `is_counted` accepts, 0 without rows."""
    return sum(map(is_counted, rows)) / len(rows) if rows else 0.0


def mean_response_tokens(rows: Iterable[Row]) -> float | None:
    """Return the mean response tokens over rows with a count, None without any."""
    counts = [row.response_tokens for row in rows if row.response_tokens is not None]
    return sum(counts) / len(counts) if counts else None


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
    found = []
    for limit in limits and (max_tokens, *limits):
        found.append(tuple(_budget(rows, limit) for rows in sides))
        if not any(budget.accuracy for budget in found[-1]):
            break
    return found


def _budget(rows: Sequence[Row], limit: int) -> Budget:
    def is_whole(row: Row) -> bool:
        return row.verdict != "truncated" and (row.response_tokens or 0) <= limit

    return Budget(
        limit,
        accuracy=rate(rows, lambda row: is_whole(row) and row.is_right),
        truncated_rate=rate(rows, lambda row: not is_whole(row)),
    )
