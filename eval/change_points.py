"""Change points in accuracies over runs, confirmed by a permutation test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eval.statistics import SIGNIFICANCE, holm

MIN_SIDE = 3  # runs on each side of a change; fewer could be outliers
MIN_RUNS = 8  # with fewer, no order of runs is rare enough to be significant
NUM_ORDERS = 9_999


@dataclass(frozen=True)
class ChangePoint:
    """The mean accuracy changes from `before` to `after` at the run with index `place`."""

    place: int
    before: float
    after: float
    p: float  # of the series, or of the segment between earlier change points


def find_change_points(
    lines: Sequence[Sequence[float]], num_orders: int = NUM_ORDERS
) -> list[list[ChangePoint]]:
    """Change points of each line of accuracies, in order.

    Under "no change", all orders of a line's runs are equally likely. The statistic is the maximum
    over places of the difference in means before and after, divided by its standard error at equal
    variance (CUSUM). p is the share of orders with a statistic at least as large, among
    `num_orders` random orders and the observed one (Antoch and Huskova, Stat Probab Lett 53:37,
    2001), so it accounts for the search over places. p-values are adjusted over the lines with
    Holm's method. After a change, both segments are tested again, each at half the level.
    """
    found = [_test(line, num_orders) for line in lines]
    adjusted = holm([p for _, p in found])
    return [
        _split(line, 0, SIGNIFICANCE / len(lines), (place, p), num_orders)
        if p_line < SIGNIFICANCE
        else []
        for line, (place, p), p_line in zip(lines, found, adjusted, strict=True)
    ]


def _split(
    line: Sequence[float], start: int, level: float, found: tuple[int, float], num_orders: int
) -> list[ChangePoint]:
    place, p = found
    parts = (line[:place], start), (line[place:], start + place)
    before, after = (sum(part) / len(part) for part, _ in parts)
    points = [ChangePoint(start + place, before, after, p)]
    for part, first in parts:
        inner = _test(part, num_orders)
        if inner[1] < level / 2:
            points += _split(part, first, level / 2, inner, num_orders)
    return sorted(points, key=lambda point: point.place)


def _test(line: Sequence[float], num_orders: int) -> tuple[int, float]:
    """(most likely place of a change, p). p is 1 for a line that is too short or constant."""
    if len(line) < MIN_RUNS or max(line) == min(line):
        return 0, 1.0
    values = np.asarray(line) - np.mean(line)
    orders = np.random.default_rng(0).permuted(np.tile(values, (num_orders, 1)), axis=1)
    observed = _statistics(values[None])[0]
    largest = _statistics(orders).max(axis=1)
    as_large = int((largest >= observed.max() * (1 - 1e-9)).sum())
    return MIN_SIDE + int(observed.argmax()), (1 + as_large) / (1 + num_orders)


def _statistics(rows: np.ndarray) -> np.ndarray:
    """CUSUM statistics [orders, places from MIN_SIDE to T - MIN_SIDE] of centred rows [orders, T]."""
    num_runs = rows.shape[1]
    places = np.arange(MIN_SIDE, num_runs - MIN_SIDE + 1)
    return np.abs(np.cumsum(rows, axis=1)[:, places - 1]) / np.sqrt(
        places * (num_runs - places) / num_runs
    )
