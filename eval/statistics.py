"""Exact tests and score intervals over items. Standard library and numpy only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

SIGNIFICANCE = 0.05
POWER = 0.8
Interval = tuple[float, float]

_Z = NormalDist().inv_cdf(1 - SIGNIFICANCE / 2)
# How far unseen values may lie, as a multiple of those seen, from 30 items on; by simulation (bench/intervals.py).
_SHARE_REACH = 4.0
_CHANGE_REACH = 1.5
_REACH_ITEMS = 30  # fewer say less about what was not seen
_UNSEEN = 1e-12  # weight of a possible value that did not occur
_MOST_TILT = 80.0
_ABOVE_ZERO = 1e-9


@dataclass(frozen=True)
class PValues:
    """Two-sided p-values of "no change": the exact one decides, the mid-p stands beside it."""

    p: float
    mid_p: float


def sign_flip_test(changes: Sequence[int]) -> PValues:
    """Exact permutation test of "no change" on integer changes, one per item; of -1, 0 and 1 it is McNemar's.

    Under "no change" before and after are exchangeable item by item, so each change is as likely with the other
    sign. p is the share of all 2**items sign patterns whose sum is at least as far from zero. The mid-p counts
    those that are exactly as far by half (Fagerland et al., BMC Med Res Methodol 13:91, 2013); it is less
    conservative, and rejects slightly more often than 5 % of the time. Both are 1 if nothing changed.
    """
    observed = abs(sum(changes))
    sizes, counts = np.unique(np.abs(np.asarray(changes, dtype=np.int64)), return_counts=True)
    chances: np.ndarray = np.ones(1)  # of sums -total, -total + 2, ..., total
    total = 0
    for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        if size:
            spread = np.zeros(size * count + 1)
            spread[::size] = _fair_binomial(count)
            chances = np.convolve(chances, spread)
            total += size * count
    if total == 0:
        return PValues(1.0, 1.0)
    sums = np.abs(np.arange(-total, total + 1, 2))
    same = float(chances[sums == observed].sum())
    beyond = float(chances[sums > observed].sum())
    return PValues(min(1.0, beyond + same), min(1.0, beyond + same / 2))


@dataclass(frozen=True)
class PairedChange:
    """The mean change of an accuracy over `n` items; the interval contains zero exactly if p is at least 0.05."""

    n: int
    difference: float
    ci95: Interval
    p: float
    mid_p: float
    detectable: float  # the smallest true change that is found with 80 % power


def measure_change(changes: Sequence[int], num_samples: int) -> PairedChange:
    """The mean change from each item's change in right responses, with its exact test and 95 % interval.

    The interval holds the changes that are not rejected: zero by `sign_flip_test`, the others by the score test of
    `change_interval`.
    """
    test = sign_flip_test(changes)
    n, difference = len(changes), sum(changes) / (num_samples * len(changes))
    low, high = change_interval([change / num_samples for change in changes], num_samples)
    # As many standard errors as the power needs, and no less than with changes of one response in one direction.
    needed = _Z + NormalDist().inv_cdf(POWER)
    detectable = min(1.0, max(needed / _Z * (high - low) / 2, needed**2 / (n * num_samples)))
    if test.p >= SIGNIFICANCE:
        low, high = min(low, 0.0), max(high, 0.0)
    elif difference > 0:
        low = max(low, _ABOVE_ZERO)
    else:
        high = min(high, -_ABOVE_ZERO)
    return PairedChange(n, difference, (low, high), test.p, test.mid_p, detectable)


def share_interval(values: Sequence[float], num_samples: int = 1) -> Interval:
    """95 % score interval of the mean of values in [0, 1], one per item, such as shares of right responses.

    Of single responses it is Wilson's with a continuity correction. An item's samples stay together in its value,
    whose spread over items contains the noise of sampling.
    """
    least, mean, most = min(values), sum(values) / len(values), max(values)
    if least == most:
        low, high = 0.0, 1.0
    else:
        reach = _SHARE_REACH * max(1.0, _REACH_ITEMS / len(values))
        low, high = max(0.0, mean - reach * (mean - least)), min(1.0, mean + reach * (most - mean))
    return _score_interval(values, low, high, num_samples)


def change_interval(values: Sequence[float], num_samples: int = 1, largest: float = 1.0) -> Interval:
    """95 % score interval of the mean of changes in [-largest, largest], one per item.

    Of single responses it is Tango's (Stat Med 17, 1998) with a continuity correction.
    """
    reach = _CHANGE_REACH * max(1.0, _REACH_ITEMS / len(values)) * max(map(abs, values))
    reach = min(largest, reach) or largest
    return _score_interval(values, -reach, reach, num_samples)


def _score_interval(values: Sequence[float], low: float, high: float, num_samples: int) -> Interval:
    """The means that a score test does not reject, for any distribution over the values seen and `low` and `high`.

    A mean is rejected if it is further from that of the values, less half a response, than 1.96 standard errors
    under the likeliest distribution with this mean. That distribution weights each value seen by
    1 / (1 + tilt * (value - low)) (empirical likelihood, Owen 1988), so one bisection over the tilt finds a bound.
    """
    distinct, counts = np.unique(np.asarray(values, dtype=float), return_counts=True)
    correction = 1 / (2 * num_samples)
    return (
        low + _least_mean(distinct - low, counts, correction),
        high - _least_mean(high - distinct, counts, correction),
    )


def _least_mean(values: np.ndarray, counts: np.ndarray, correction: float) -> float:
    """The smallest mean that is not rejected, of values from 0 up; `correction` is in items."""
    n = int(counts.sum())
    values, weights = np.append(values, 0.0), np.append(counts / n, _UNSEEN)
    mean = float(weights @ values)

    def tilted(tilt: float) -> tuple[float, float]:
        chances = weights / (1 + math.expm1(tilt) * values)
        chances /= chances.sum()
        centre = float(chances @ values)
        return centre, float(chances @ (values - centre) ** 2)

    kept, rejected = 0.0, _MOST_TILT
    for _ in range(30):
        tilt = (kept + rejected) / 2
        centre, variance = tilted(tilt)
        if n * max(0.0, mean - centre - correction / n) ** 2 <= _Z**2 * variance:
            kept = tilt
        else:
            rejected = tilt
    return tilted(kept)[0]


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment: below 0.05 anywhere with at most 5 % chance when nothing changed (1979)."""
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = highest
    return adjusted


def _fair_binomial(n: int) -> list[float]:
    """Chances of 0 to n heads in n fair throws."""
    ways, chances = 1, []
    for heads in range(n + 1):
        chances.append(ways / 2**n)  # of exact integers, so correctly rounded
        ways = ways * (n - heads) // (heads + 1)
    return chances
