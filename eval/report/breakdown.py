"""Where a difference comes from: groups, format or content, lengths, graders, samples, speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from eval.answers.grading import VERDICTS
from eval.results.rows import Row, Samples, num_right
from eval.results.statistics import (
    Interval,
    PairedChange,
    change_interval,
    holm,
    measure_change,
    share_interval,
)
from eval.results.summary import (
    IsSame,
    count_raises,
    group_by,
    item_metrics,
    largest_steps,
)

Pair = tuple[Samples, Samples]  # one item before and after; every request was answered
ANSWERED = tuple(verdict for verdict in VERDICTS if verdict != "request_failed")
UNFINISHED = ("no_answer", "truncated")
QUANTILES = (5, 25, 50, 75, 95)
NUM_BINS = 30


@dataclass(frozen=True)
class GroupChange(PairedChange):
    """Change of a level, subject or benchmark, with accuracies and their 95 % intervals."""

    before: float
    before_interval: Interval
    after: float
    after_interval: Interval
    gained: int
    lost: int
    p_holm: float  # over all groups of all fields, or over the suite


@dataclass(frozen=True)
class Part:
    """One component of the difference, with its 95 % interval."""

    difference: float
    ci95: tuple[float, float]


@dataclass(frozen=True)
class Lengths:
    """Response lengths. `histogram[side][i]` counts those from `edges[i]` to `edges[i + 1]`."""

    unit: Literal["tokens", "characters"]
    quantiles: dict[str, dict[str, float]]  # side -> {"5", ..., "95", "mean", "max"}
    edges: list[float]
    histogram: dict[str, list[int]]


@dataclass(frozen=True)
class Graders(PairedChange):
    """AISBench's verdicts compared with the exact grader's, over the paired items."""

    before: float  # accuracy under AISBench's rule
    after: float
    raises: dict[str, int]  # side -> responses on which AISBench's own code would raise
    agreement: dict[str, dict[str, int]]  # side -> {both_right, only_exact, only_aisbench, neither}
    disagreements: list[dict[str, Any]]


@dataclass(frozen=True)
class MetricChange:
    """avg@k, pass@k or maj@k of both sides, with 95 % intervals over items."""

    before: float
    before_interval: tuple[float, float]
    after: float
    after_interval: tuple[float, float]
    difference: float
    ci95: tuple[float, float]  # paired


@dataclass(frozen=True)
class Speed:
    """Speed of a server. `latency` is per request, including retries and the waits between them."""

    latency: dict[str, float]  # {"50", "95", "max"}, seconds
    # while requests were in flight; None if times or tokens are missing
    tokens_per_second: float | None


def changes_of(pairs: Iterable[Pair]) -> list[int]:
    """Change in the number of right responses, per item."""
    return [num_right(after) - num_right(before) for before, after in pairs]


def group_changes(
    pairs: Sequence[Pair], fields: Sequence[str]
) -> dict[str, dict[str, GroupChange]]:
    """{field: {group: change}} in natural order; p is adjusted over all groups of all fields."""
    groups = [(field, *group) for field in fields for group in _groups_of(pairs, field).items()]
    changes = [measure_change(changes_of(group), len(group[0][0])) for *_, group in groups]
    adjusted = holm([change.p for change in changes])
    found: dict[str, dict[str, GroupChange]] = {field: {} for field in fields}
    for (field, key, group), change, p_holm in zip(groups, changes, adjusted, strict=True):
        counts = changes_of(group)
        before, after = (accuracy_of([pair[side] for pair in group]) for side in (0, 1))
        found[field][key] = GroupChange(
            **vars(change),
            before=before[0],
            before_interval=before[1],
            after=after[0],
            after_interval=after[1],
            gained=sum(count > 0 for count in counts),
            lost=sum(count < 0 for count in counts),
            p_holm=p_holm,
        )
    return found


def accuracy_of(items: Sequence[Samples]) -> tuple[float, Interval]:
    """The accuracy over items, with its 95 % interval."""
    right, k = [num_right(samples) for samples in items], len(items[0])
    interval = share_interval([count / k for count in right], 1 / k)
    return sum(right) / (k * len(items)), interval


def _groups_of(pairs: Sequence[Pair], field: str) -> dict[str, list[Pair]]:
    return group_by(pairs, lambda pair: getattr(pair[0][0], field))


def transitions_of(pairs: Iterable[Pair]) -> dict[str, dict[str, float]]:
    """[x][y]: items with verdict x before and y after, over an item's k * k sample pairs."""
    counts: Counter[tuple[str, str]] = Counter()
    num_ways = 1
    for before, after in pairs:
        num_ways = len(before) * len(after)
        counts.update((x.verdict, y.verdict) for x in before for y in after)
    return {
        x: {y: counts[x, y] if num_ways == 1 else counts[x, y] / num_ways for y in ANSWERED}
        for x in ANSWERED
    }


def gain_parts(pairs: Sequence[Pair]) -> dict[str, Part]:
    """{format = no_answer + truncated, content}; format + content = the difference.

    Format is the share of items that went from unfinished to right, minus the share that went back.
    Content is the same for wrong answers.
    """
    parts = {verdict: [_net(pair, (verdict,)) for pair in pairs] for verdict in UNFINISHED}
    parts = {"format": [_net(pair, UNFINISHED) for pair in pairs], **parts}
    parts["content"] = [_net(pair, ("wrong",)) for pair in pairs]
    k = len(pairs[0][0])
    return {
        name: Part(_mean(values), change_interval(values, 1 / k)) for name, values in parts.items()
    }


def length_change(before: Sequence[Row], after: Sequence[Row]) -> Lengths:
    """Response lengths, in tokens if the server counted all of them, else in characters."""
    unit: Literal["tokens", "characters"] = "tokens"
    if any(row.response_tokens is None for row in (*before, *after)):
        unit = "characters"
    sides = {
        name: np.array(
            [row.response_tokens if unit == "tokens" else row.num_chars[1] for row in rows]
        )
        for name, rows in (("before", before), ("after", after))
    }
    longest = max(int(lengths.max()) for lengths in sides.values())
    edges = np.linspace(0, max(longest, 1), NUM_BINS + 1)
    return Lengths(
        unit=unit,
        quantiles={
            name: {
                **{str(q): float(np.percentile(lengths, q)) for q in QUANTILES},
                "mean": float(lengths.mean()),
                "max": float(lengths.max()),
            }
            for name, lengths in sides.items()
        },
        edges=edges.tolist(),
        histogram={
            name: np.histogram(lengths, edges)[0].tolist() for name, lengths in sides.items()
        },
    )


def measure_speed(rows: Sequence[Row]) -> Speed:
    """Speed over the answered rows. Pauses between attempts of the evaluation do not count."""
    seconds = np.array([row.seconds for row in rows])
    latency = {
        name: float(np.percentile(seconds, q)) for name, q in (("50", 50), ("95", 95), ("max", 100))
    }
    spans = sorted(
        (row.ended_at - row.seconds, row.ended_at) for row in rows if row.ended_at is not None
    )
    tokens = [row.response_tokens for row in rows if row.response_tokens is not None]
    if len(spans) < len(rows) or len(tokens) < len(rows):
        return Speed(latency, None)
    busy, end = 0.0, 0.0
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return Speed(latency, sum(tokens) / busy if busy else None)


def compare_graders(pairs: Sequence[Pair]) -> Graders:
    """AISBench's accuracies, and where its verdicts differ from the exact grader's."""
    k = len(pairs[0][0])
    counts = [
        [sum(row.is_right_by_aisbench for row in samples) for samples in pair] for pair in pairs
    ]
    change = measure_change([y - x for x, y in counts], k)
    before, after = (sum(pair[side] for pair in counts) / (k * len(pairs)) for side in (0, 1))
    rows = {
        name: [row for pair in pairs for row in pair[side]]
        for side, name in enumerate(("before", "after"))
    }
    return Graders(
        **vars(change),
        before=before,
        after=after,
        raises={name: count_raises(side) for name, side in rows.items()},
        agreement={name: _agreement(side) for name, side in rows.items()},
        disagreements=[
            {"side": name, **row} for name, side in rows.items() for row in _disagreements(side)
        ],
    )


def _agreement(rows: Iterable[Row]) -> dict[str, int]:
    """Count rows by which of the two graders calls them right."""
    counts = Counter((row.is_right, row.is_right_by_aisbench) for row in rows)
    return {
        "both_right": counts[True, True],
        "only_exact": counts[True, False],
        "only_aisbench": counts[False, True],
        "neither": counts[False, False],
    }


def _disagreements(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The rows that only one grader calls right, without their texts."""
    names = ("id", "sample", "gold", "verdict", "answer")
    return [
        {name: getattr(row, name) for name in names} | {"aisbench": asdict(row.aisbench)}
        for row in rows
        if row.aisbench is not None and row.is_right != row.aisbench.is_right
    ]


def compare_metrics(
    before: Sequence[Samples], after: Sequence[Samples], is_same: IsSame
) -> dict[str, MetricChange]:
    """avg@k, pass@k and maj@k of both sides over the same items."""
    right, steps = item_metrics(after, is_same), largest_steps(len(before[0]))
    return {
        name: MetricChange(
            before=_mean(x),
            before_interval=share_interval(x, steps[name]),
            after=_mean(right[name]),
            after_interval=share_interval(right[name], steps[name]),
            difference=_mean(right[name]) - _mean(x),
            ci95=change_interval([b - a for a, b in zip(x, right[name], strict=True)], steps[name]),
        )
        for name, x in item_metrics(before, is_same).items()
    }


def _net(pair: Pair, verdicts: Sequence[str]) -> float:
    """Share of an item's sample pairs that go from `verdicts` to right, less those that go back."""
    before, after = pair
    gained = _count(before, verdicts) * num_right(after)
    lost = num_right(before) * _count(after, verdicts)
    return (gained - lost) / (len(before) * len(after))


def _count(samples: Samples, verdicts: Sequence[str]) -> int:
    return sum(row.verdict in verdicts for row in samples)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
