"""Where a difference comes from: groups of items, format or content, response lengths, the two rulers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from eval.answers.grading import VERDICTS
from eval.results import Row, group_by
from eval.samples import Samples, num_right
from eval.statistics import PValues, adjusted_interval, holm, mcnemar, paired_bootstrap, sign_flip_test

Pair = tuple[Samples, Samples]  # one item before and after, every request answered
JUDGED = tuple(verdict for verdict in VERDICTS if verdict != "request_failed")
UNFINISHED = ("no_answer", "truncated")
QUANTILES = (5, 25, 50, 75, 95)
NUM_BINS = 30


@dataclass(frozen=True)
class GroupChange:
    """A level's or subject's change, with an interval that holds for few items and p-values for many groups."""

    n: int
    difference: float
    interval: tuple[float, float]  # 95 %, adjusted Wald
    gained: int
    lost: int
    p: float
    p_holm: float  # over all groups of all fields


@dataclass(frozen=True)
class Part:
    """A part of the difference, with its 95 % bootstrap interval."""

    difference: float
    ci95: tuple[float, float]


@dataclass(frozen=True)
class Lengths:
    """How long the responses are. `histogram[side][i]` counts lengths from `edges[i]` up to `edges[i + 1]`."""

    unit: Literal["tokens", "characters"]
    quantiles: dict[str, dict[str, float]]  # side -> {"5", ..., "95", "mean", "max"}
    edges: list[float]
    histogram: dict[str, list[int]]


@dataclass(frozen=True)
class Rulers:
    """AISBench's verdicts beside the exact ones, over the paired items."""

    before: float  # accuracy under AISBench's rule
    after: float
    difference: float
    ci95: tuple[float, float]
    p: float
    raises: dict[str, int]  # side -> responses on which AISBench itself would have raised
    agreement: dict[str, dict[str, int]]  # side -> {both_right, only_exact, only_aisbench, neither}
    disagreements: list[dict[str, Any]]


def test_of(pairs: Sequence[Pair]) -> PValues:
    """McNemar's test for one sample per item, the sign-flip test it is a case of for several."""
    changes = changes_of(pairs)
    if len(pairs[0][0]) == 1:
        return mcnemar(changes.count(-1), changes.count(1))
    return sign_flip_test(changes)


def changes_of(pairs: Iterable[Pair]) -> list[int]:
    """By how many right responses each item changed."""
    return [num_right(after) - num_right(before) for before, after in pairs]


def group_changes(pairs: Sequence[Pair], fields: Sequence[str]) -> dict[str, dict[str, GroupChange]]:
    """{field: {group: change}} in natural order, p-values adjusted over the groups of all the fields together."""
    groups = {
        field: {
            key: [pair for pair in pairs if getattr(pair[0][0], field) == key]
            for key in group_by((before[0] for before, _ in pairs), field)
        }
        for field in fields
    }
    p_values = {(field, key): test_of(group).p for field in fields for key, group in groups[field].items()}
    adjusted = dict(zip(p_values, holm(list(p_values.values())), strict=True))
    return {
        field: {
            key: _group_change(group, p_values[field, key], adjusted[field, key])
            for key, group in groups[field].items()
        }
        for field in fields
    }


def transitions_of(pairs: Iterable[Pair]) -> dict[str, dict[str, float]]:
    """[x][y]: items with verdict x before and y after; with k samples, in each of the k * k ways to pair them."""
    counts: Counter[tuple[str, str]] = Counter()
    num_ways = 1
    for before, after in pairs:
        num_ways = len(before) * len(after)
        counts.update((x.verdict, y.verdict) for x in before for y in after)
    return {x: {y: counts[x, y] if num_ways == 1 else counts[x, y] / num_ways for y in JUDGED} for x in JUDGED}


def gain_parts(pairs: Sequence[Pair]) -> dict[str, Part]:
    """{format, no_answer, truncated, content}: format = no_answer + truncated; format + content = the difference.

    Format is what came from responses that had no finished answer: their share that became right, minus the
    share of right ones that became such. Content is the same with wrong ones.
    """
    parts = {verdict: [_net(pair, (verdict,)) for pair in pairs] for verdict in UNFINISHED}
    parts = {"format": [_net(pair, UNFINISHED) for pair in pairs], **parts}
    parts["content"] = [_net(pair, ("wrong",)) for pair in pairs]
    zeros = [0.0] * len(pairs)
    return {
        name: Part(sum(values) / len(values), paired_bootstrap(zeros, values)) for name, values in parts.items()
    }


def length_change(before: Sequence[Row], after: Sequence[Row]) -> Lengths:
    """Lengths in tokens where the server counted all of them, else in characters."""
    unit: Literal["tokens", "characters"] = "tokens"
    if any(row.response_tokens is None for row in (*before, *after)):
        unit = "characters"
    sides = {
        name: np.array([row.response_tokens if unit == "tokens" else len(row.response or "") for row in rows])
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
        histogram={name: np.histogram(lengths, edges)[0].tolist() for name, lengths in sides.items()},
    )


def compare_rulers(pairs: Sequence[Pair]) -> Rulers:
    """AISBench's accuracies and where its verdicts differ from the exact ones."""
    k = len(pairs[0][0])
    counts = [[sum(row.aisbench_right for row in samples) for samples in pair] for pair in pairs]
    changes = [y - x for x, y in counts]
    test = mcnemar(changes.count(-1), changes.count(1)) if k == 1 else sign_flip_test(changes)
    before, after = (sum(pair[side] for pair in counts) / (k * len(pairs)) for side in (0, 1))
    rows = {name: [row for pair in pairs for row in pair[side]] for side, name in enumerate(("before", "after"))}
    return Rulers(
        before=before,
        after=after,
        difference=sum(changes) / (k * len(pairs)),
        ci95=paired_bootstrap([x / k for x, _ in counts], [y / k for _, y in counts]),
        p=test.p,
        raises={name: sum(row.aisbench_raises for row in side) for name, side in rows.items()},
        agreement={name: _agreement(side) for name, side in rows.items()},
        disagreements=[
            _disagreement(name, row)
            for name, side in rows.items()
            for row in side
            if row.is_right != row.aisbench_right
        ],
    )


def _group_change(pairs: Sequence[Pair], p: float, p_holm: float) -> GroupChange:
    k = len(pairs[0][0])
    changes = changes_of(pairs)
    return GroupChange(
        n=len(pairs),
        difference=sum(changes) / (k * len(pairs)),
        interval=adjusted_interval([change / k for change in changes]),
        gained=sum(change > 0 for change in changes),
        lost=sum(change < 0 for change in changes),
        p=p,
        p_holm=p_holm,
    )


def _net(pair: Pair, verdicts: Sequence[str]) -> float:
    """Of an item's ways to pair its samples, the share that lead from `verdicts` to right, minus those back."""
    before, after = pair
    gained = _count(before, lambda row: row.verdict in verdicts) * num_right(after)
    lost = num_right(before) * _count(after, lambda row: row.verdict in verdicts)
    return (gained - lost) / (len(before) * len(after))


def _count(samples: Samples, is_counted: Callable[[Row], bool]) -> int:
    return sum(map(is_counted, samples))


def _agreement(rows: Sequence[Row]) -> dict[str, int]:
    counts = Counter((row.is_right, row.aisbench_right) for row in rows)
    return {
        "both_right": counts[True, True],
        "only_exact": counts[True, False],
        "only_aisbench": counts[False, True],
        "neither": counts[False, False],
    }


def _disagreement(side: str, row: Row) -> dict[str, Any]:
    return {
        "side": side,
        "id": row.id,
        "sample": row.sample,
        "gold": row.gold,
        "verdict": row.verdict,
        "answer": row.answer,
        "aisbench_right": row.aisbench_right,
        "aisbench_answer": row.aisbench_answer,
        "aisbench_raises": row.aisbench_raises,
    }
