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
# Range of unseen values as a multiple of the range seen, for 30 items or more; calibrated in
# bench/intervals.py.
_SHARE_REACH = 4.0
_CHANGE_REACH = 1.5
_REACH_ITEMS = 30  # with fewer items the range is widened
_UNSEEN = 1e-12  # weight of a possible but unobserved value
_MOST_TILT = 80.0
_ABOVE_ZERO = 1e-9
_GRID_CELLS = 2**17  # cells covering half the range of a pooled sum


@dataclass(frozen=True)
class PValues:
    """Two-sided p-values for "no change". The exact p decides; the mid-p is informative."""

    p: float
    mid_p: float


def sign_flip_test(changes: Sequence[int]) -> PValues:
    """Exact permutation test of "no change" per item; McNemar's if all changes are -1, 0 or 1.

    Under "no change", before and after are exchangeable per item, so each change is equally likely
    with either sign. p is the share of all 2**items sign patterns whose sum is at least as far from
    zero. The mid-p counts sums that are exactly as far by half (Fagerland et al., BMC Med Res
    Methodol 13:91, 2013). It is less conservative and rejects slightly more often than 5 % of the
    time. Both are 1 if nothing changed.
    """
    observed = abs(sum(changes))
    chances = _chances_of_sums(changes)
    total = len(chances) - 1
    if total == 0:
        return PValues(1.0, 1.0)
    sums = np.abs(np.arange(-total, total + 1, 2))
    same = float(chances[sums == observed].sum())
    beyond = float(chances[sums > observed].sum())
    return PValues(min(1.0, beyond + same), min(1.0, beyond + same / 2))


def pooled_sign_flip_test(strata: Sequence[tuple[Sequence[int], float]]) -> PValues:
    """`sign_flip_test` of the sum over strata (changes, scale) of `scale` times the changes.

    Every item of every stratum keeps or flips its sign. Scales have no common unit, so each
    stratum's sums are rounded to a grid of 2**17 cells up to the largest possible sum. Sums within
    the rounding error of the observed one count as equal to it, so p is never too small.
    """
    drawn = [(_chances_of_sums(changes), scale) for changes, scale in strata]
    reach = sum(scale * (len(chances) - 1) for chances, scale in drawn)
    if reach == 0:
        return PValues(1.0, 1.0)
    step, slack = reach / _GRID_CELLS, reach / _GRID_CELLS * len(drawn)
    size = 2 ** (2 * _GRID_CELLS + len(drawn)).bit_length()
    spectrum = np.ones(size // 2 + 1, dtype=complex)
    for chances, scale in drawn:
        places = np.rint(2 * scale / step * np.arange(len(chances))).astype(np.int64)
        spectrum *= np.fft.rfft(np.bincount(places, chances, minlength=size))
    pooled = np.clip(np.fft.irfft(spectrum, size), 0.0, None)
    distances = np.abs(np.arange(size) * step - reach)
    observed = abs(sum(scale * sum(changes) for changes, scale in strata))
    same = float(pooled[np.abs(distances - observed) <= slack].sum())
    beyond = float(pooled[distances > observed + slack].sum())
    return PValues(min(1.0, beyond + same), min(1.0, beyond + same / 2))


def _chances_of_sums(changes: Sequence[int]) -> np.ndarray:
    """Probabilities of the sums -total, -total + 2, ..., total of the changes with random signs."""
    sizes, counts = np.unique(np.abs(np.asarray(changes, dtype=np.int64)), return_counts=True)
    chances: np.ndarray = np.ones(1)
    for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        if size:
            spread = np.zeros(len(chances) + size * count)
            for heads, chance in enumerate(_fair_binomial(count)):
                spread[size * heads : size * heads + len(chances)] += chance * chances
            chances = spread
    return chances


@dataclass(frozen=True)
class PairedChange:
    """Mean change over `n` items. The interval contains zero exactly if p is at least 0.05."""

    n: int
    difference: float
    ci95: Interval
    p: float
    mid_p: float
    detectable: float  # smallest true change detected with 80 % power


def measure_change(changes: Sequence[int], num_samples: int) -> PairedChange:
    """Mean of the items' changes in right responses, with exact test and 95 % interval.

    The interval holds the changes that are not rejected: zero by `sign_flip_test`, others by
    `change_interval`.
    """
    test = sign_flip_test(changes)
    n, difference = len(changes), sum(changes) / (num_samples * len(changes))
    low, high = change_interval([change / num_samples for change in changes], 1 / num_samples)
    return _decided(n, difference, (low, high), test, 1 / (n * num_samples))


@dataclass(frozen=True)
class Stratum:
    """One benchmark of a pooled change. Item changes count responses, of `num_samples` per item."""

    changes: Sequence[int]
    num_samples: int
    weight: float


def measure_pooled_change(strata: Sequence[Stratum]) -> PairedChange:
    """Weighted mean of the strata's mean changes, stratified and paired. No stratum may be empty.

    The test is `pooled_sign_flip_test`. The interval combines the strata's score intervals, which
    may be asymmetric, with MOVER (Zou, Huang and Zhang, Comput Stat Data Anal 53:1080, 2009).
    """
    total = sum(each.weight for each in strata)
    scales = [each.weight / total / (each.num_samples * len(each.changes)) for each in strata]
    parts = []
    for each in strata:
        interval = change_interval(
            [change / each.num_samples for change in each.changes], 1 / each.num_samples
        )
        parts.append(
            (sum(each.changes) / (each.num_samples * len(each.changes)), interval, each.weight)
        )
    difference, interval = pooled_mean(parts, lowest=-1.0)
    test = pooled_sign_flip_test(
        [(each.changes, scale) for each, scale in zip(strata, scales, strict=True)]
    )
    return _decided(
        sum(len(each.changes) for each in strata), difference, interval, test, max(scales)
    )


def pooled_mean(
    parts: Sequence[tuple[float, Interval, float]], lowest: float = 0.0
) -> tuple[float, Interval]:
    """Weighted mean of independent (mean, interval, weight), MOVER interval in [lowest, 1]."""
    total = sum(weight for _, _, weight in parts)
    pooled = sum(weight / total * mean for mean, _, weight in parts)
    below = math.sqrt(sum((weight / total * (mean - low)) ** 2 for mean, (low, _), weight in parts))
    above = math.sqrt(
        sum((weight / total * (high - mean)) ** 2 for mean, (_, high), weight in parts)
    )
    return pooled, (max(lowest, pooled - below), min(1.0, pooled + above))


def _decided(
    n: int, difference: float, interval: Interval, test: PValues, response: float
) -> PairedChange:
    """Move the interval to the side of zero that the test implies; a response weighs `response`."""
    low, high = interval
    # The standard errors needed for the power; at least what changes by one response in one
    # direction need.
    needed = _Z + NormalDist().inv_cdf(POWER)
    detectable = min(1.0, max(needed / _Z * (high - low) / 2, needed**2 * response))
    if test.p >= SIGNIFICANCE:
        low, high = min(low, 0.0), max(high, 0.0)
    elif difference > 0:
        low = max(low, _ABOVE_ZERO)
    else:
        high = min(high, -_ABOVE_ZERO)
    return PairedChange(n, difference, (low, high), test.p, test.mid_p, detectable)


def share_interval(values: Sequence[float], step: float = 1.0) -> Interval:
    """95 % score interval of the mean of values in [0, 1], such as shares right per item.

    `step` is the largest effect of one response on an item's value: 1 / k for the share of k
    responses. For single responses this is Wilson's interval with continuity correction. An item's
    samples form one value, so the spread over items includes sampling noise.
    """
    least, mean, most = min(values), sum(values) / len(values), max(values)
    if least == most:
        low, high = 0.0, 1.0
    else:
        reach = _SHARE_REACH * max(1.0, _REACH_ITEMS / len(values))
        low, high = max(0.0, mean - reach * (mean - least)), min(1.0, mean + reach * (most - mean))
    return _score_interval(values, low, high, step)


def change_interval(values: Sequence[float], step: float = 1.0) -> Interval:
    """95 % score interval of the mean of changes in [-1, 1], one per item.

    `step` is as in `share_interval`. For single responses this is Tango's interval (Stat Med 17,
    1998) with continuity correction.
    """
    reach = _CHANGE_REACH * max(1.0, _REACH_ITEMS / len(values)) * max(map(abs, values))
    reach = min(1.0, reach) or 1.0
    return _score_interval(values, -reach, reach, step)


def _score_interval(values: Sequence[float], low: float, high: float, step: float) -> Interval:
    """Means that a score test accepts, over distributions on the values, `low` and `high`.

    A mean is rejected if its distance from the observed mean, less half a step, exceeds 1.96
    standard errors under the most likely distribution with that mean. That distribution weights
    each observed value by 1 / (1 + tilt * (value - low)) (empirical likelihood, Owen 1988), so
    bisection over the tilt finds a bound.
    """
    distinct, counts = np.unique(np.asarray(values, dtype=float), return_counts=True)
    return (
        low + _least_mean(distinct - low, counts, step / 2),
        high - _least_mean(high - distinct, counts, step / 2),
    )


def _least_mean(values: np.ndarray, counts: np.ndarray, correction: float) -> float:
    """Smallest mean that is not rejected, for values >= 0. `correction` is in items."""
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
    """Holm's step-down adjustment (1979): at most 5 % chance of any p < 0.05 without change."""
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = highest
    return adjusted


def _fair_binomial(n: int) -> list[float]:
    """Probabilities of 0 to n heads in n fair coin tosses."""
    ways, chances = 1, []
    for heads in range(n + 1):
        chances.append(ways / 2**n)  # exact integers, so correctly rounded
        ways = ways * (n - heads) // (heads + 1)
    return chances
