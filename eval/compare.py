"""Two evaluations of the same items, paired: did the model get better?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.errors import ComparisonError
from eval.grading import VERDICTS
from eval.results import Row, differences, group_by, load_results, mean_response_tokens, rate
from eval.statistics import mcnemar_exact, minimal_detectable_difference, paired_bootstrap, wilson_interval

SIGNIFICANCE = 0.05


@dataclass(frozen=True)
class GroupResult:
    """One side's accuracy on a level, a subject or everything, with Wilson's 95 % interval."""

    n: int
    right: int
    accuracy: float
    interval: tuple[float, float]


@dataclass(frozen=True)
class Side:
    """One of the two models, over the paired items."""

    model: str
    n: int
    right: int
    accuracy: float
    interval: tuple[float, float]
    by_level: dict[str, GroupResult]
    by_subject: dict[str, GroupResult]
    no_answer_rate: float
    truncated_rate: float
    request_failed_rate: float  # over all items of this side, paired or not
    mean_response_tokens: float | None


@dataclass(frozen=True)
class Flip:
    """An item whose verdict changed between right and not right, with both sides in full."""

    id: str
    level: str | None
    subject: str | None
    problem: str  # the last message of the prompt
    gold: str
    before: dict[str, Any]  # {verdict, answer, response}
    after: dict[str, Any]


@dataclass(frozen=True)
class Comparison:
    """A paired comparison.

    `b` counts items right before and not right after (lost), `c` items not right before and right after
    (gained); `difference` = after - before = (c - b) / n. `n` counts the items answered on both sides;
    `num_unpaired` are left out because a request failed. `transitions[x][y]` counts verdict x before, y after.
    """

    before: Side
    after: Side
    n: int
    num_unpaired: int
    difference: float
    ci95: tuple[float, float]
    b: int
    c: int
    p: float
    minimal_detectable_difference: float
    lost: tuple[Flip, ...]
    gained: tuple[Flip, ...]
    transitions: dict[str, dict[str, int]]
    sampling: dict[str, Any]
    grader: str

    @property
    def is_significant(self) -> bool:
        """True when the exact test rejects "no change" at the 5 % level."""
        return self.p < SIGNIFICANCE

    def verdict(self) -> str:
        """One sober sentence with n, the difference in points, its interval and p."""
        figures = (
            f"from {100 * self.before.accuracy:.1f} % to {100 * self.after.accuracy:.1f} % "
            f"on {self.n} paired items: "
            f"{points(self.difference)} points, 95 % interval [{points(self.ci95[0])}, {points(self.ci95[1])}], "
            f"exact McNemar p {format_p(self.p)} ({self.c} gained, {self.b} lost)"
        )
        if self.is_significant:
            return f"Accuracy {'rose' if self.difference > 0 else 'fell'} {figures}."
        return (
            f"Not significant: accuracy went {figures}. These data do not show that the model changed; "
            f"with this many items, a true difference below about "
            f"{100 * self.minimal_detectable_difference:.1f} points would often go unnoticed (80 % power)."
        )


def compare(before_dir: str | Path, after_dir: str | Path) -> Comparison:
    """Pair two results directories by item id.

    Raises ComparisonError, saying what differs, when items, prompts, gold answers, sampling settings or the
    grader are not the same on both sides, and ResultsError when one of them is unfinished.
    """
    before_settings, before_rows = load_results(before_dir)
    after_settings, after_rows = load_results(after_dir)
    _refuse_different(before_rows, after_rows, before_settings, after_settings)
    pairs = [(row, after_rows[identity]) for identity, row in before_rows.items()]
    paired = [(x, y) for x, y in pairs if x.is_answered and y.is_answered]
    if not paired:
        raise ComparisonError(
            f"none of the {len(pairs)} items was answered on both sides: nothing can be compared"
        )
    before, after = [x for x, _ in paired], [y for _, y in paired]
    lost = [(x, y) for x, y in paired if x.is_right and not y.is_right]
    gained = [(x, y) for x, y in paired if y.is_right and not x.is_right]
    n = len(paired)
    return Comparison(
        before=_side(before_settings["model"], before, list(before_rows.values())),
        after=_side(after_settings["model"], after, list(after_rows.values())),
        n=n,
        num_unpaired=len(pairs) - n,
        difference=(len(gained) - len(lost)) / n,
        ci95=paired_bootstrap([x.is_right for x in before], [y.is_right for y in after]),
        b=len(lost),
        c=len(gained),
        p=mcnemar_exact(len(lost), len(gained)),
        minimal_detectable_difference=minimal_detectable_difference(n, len(lost) + len(gained)),
        lost=tuple(_flip(x, y) for x, y in lost),
        gained=tuple(_flip(x, y) for x, y in gained),
        transitions=_transitions(paired),
        sampling=before_settings["sampling"],
        grader=before_settings["grader"],
    )


def points(share: float) -> str:
    """A difference of shares in signed percentage points; never "-0.0"."""
    return f"{round(100 * share, 1) + 0.0:+.1f}"


def format_p(p: float) -> str:
    """A p-value with its relation sign, e.g. "= 0.0051" or "< 0.0001"."""
    return "< 0.0001" if p < 0.0001 else f"= {p:.2g}" if p < 0.995 else "= 1"


def _refuse_different(
    before: dict[str, Row], after: dict[str, Row], before_settings: dict[str, Any], after_settings: dict[str, Any]
) -> None:
    reasons = []
    for label, left, right in (("before", before, after), ("after", after, before)):
        only = [identity for identity in left if identity not in right]
        if only:
            reasons.append(f"{len(only)} of {len(left)} items are only in {label} (first: {only[0]!r})")
    shared = [identity for identity in before if identity in after]
    for field in ("prompt", "gold", "level", "subject"):
        other = [i for i in shared if getattr(before[i], field) != getattr(after[i], field)]
        if other:
            reasons.append(f"{field}s: {len(other)} of {len(shared)} shared items differ (first: {other[0]!r})")
    for key in ("api", "grader", "sampling"):
        reasons += differences(before_settings.get(key), after_settings.get(key), key)
    if reasons:
        raise ComparisonError(
            f"the two evaluations cannot be compared: {'; '.join(reasons)}. A difference in accuracy would not "
            f"be the model's alone: evaluate both with the same evaluate.* settings."
        )


def _side(model: str, rows: Sequence[Row], all_rows: Sequence[Row]) -> Side:
    total = _group(rows)
    return Side(
        model=model,
        n=total.n,
        right=total.right,
        accuracy=total.accuracy,
        interval=total.interval,
        by_level={key: _group(group) for key, group in group_by(rows, "level").items()},
        by_subject={key: _group(group) for key, group in group_by(rows, "subject").items()},
        no_answer_rate=rate(rows, lambda row: row.verdict == "no_answer"),
        truncated_rate=rate(rows, lambda row: row.verdict == "truncated"),
        request_failed_rate=rate(all_rows, lambda row: not row.is_answered),
        mean_response_tokens=mean_response_tokens(rows),
    )


def _group(rows: Sequence[Row]) -> GroupResult:
    right = sum(row.is_right for row in rows)
    return GroupResult(len(rows), right, right / len(rows), wilson_interval(right, len(rows)))


def _flip(before: Row, after: Row) -> Flip:
    sides = [{"verdict": x.verdict, "answer": x.answer, "response": x.response} for x in (before, after)]
    return Flip(before.id, before.level, before.subject, before.problem, before.gold, *sides)


def _transitions(paired: Sequence[tuple[Row, Row]]) -> dict[str, dict[str, int]]:
    counts = Counter((x.verdict, y.verdict) for x, y in paired)
    verdicts = [verdict for verdict in VERDICTS if verdict != "request_failed"]
    return {x: {y: counts[x, y] for y in verdicts} for x in verdicts}
