"""Statistics for two evaluations of the same items. Standard library and numpy only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

SIGNIFICANCE = 0.05
IntervalMethod = Literal["paired bootstrap", "adjusted Wald"]


@dataclass(frozen=True)
class PValues:
    """Two-sided p-values of "no change": the exact one decides, the mid-p stands beside it."""

    p: float
    mid_p: float


def mcnemar(b: int, c: int) -> PValues:
    """McNemar's test on the discordant pairs: `b` right before and wrong after, `c` wrong before and right after.

    Under "no change" b is binomial(b + c, 1/2); p is the probability of a split at least as uneven as this one.
    The mid-p counts splits that are exactly as uneven by half (Fagerland et al., BMC Med Res Methodol 13:91,
    2013); it is less conservative, and rejects slightly more often than 5 % of the time. Both are 1 without
    discordant pairs.
    """
    num_discordant = b + c
    if num_discordant == 0:
        return PValues(1.0, 1.0)
    tail = ways = 1  # exact integers: ways = C(num_discordant, k)
    for k in range(min(b, c)):
        ways = ways * (num_discordant - k) // (k + 1)
        tail += ways
    if b == c:  # every split is at least as uneven; the even one lies in both tails, once
        return PValues(1.0, 1 - ways / 2 / 2**num_discordant)
    return PValues(2 * tail / 2**num_discordant, (2 * tail - ways) / 2**num_discordant)


def sign_flip_test(changes: Sequence[int]) -> PValues:
    """Exact permutation test of "no change" on integer changes, one per item: McNemar's test for several samples.

    Under "no change" before and after are exchangeable item by item, so each change is as likely with the other
    sign. p is the share of all 2**items sign patterns whose sum is at least as far from zero. With changes of -1,
    0 and 1 it equals McNemar's exact p.
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


def test_changes(changes: Sequence[int], num_samples: int) -> PValues:
    """The exact test of "no change" on each item's change in right responses: McNemar's, or the sign-flip test."""
    if num_samples == 1:
        return mcnemar(changes.count(-1), changes.count(1))
    return sign_flip_test(changes)


def change_interval(changes: Sequence[int], num_samples: int) -> tuple[tuple[float, float], IntervalMethod]:
    """95 % interval of the mean change in accuracy: bootstrap, or adjusted Wald where all items changed alike."""
    shares = [change / num_samples for change in changes]
    if len(set(changes)) == 1:  # a bootstrap would have no width
        return adjusted_interval(shares), "adjusted Wald"
    return bootstrap_mean(shares), "paired bootstrap"


def accuracy_interval(right: Sequence[int], num_samples: int) -> tuple[float, float]:
    """95 % interval of an accuracy from each item's right responses.

    One sample per item: Wilson's. Several: bootstrap over items, or Wilson's over as many items where the items do
    not differ and a bootstrap would have no width.
    """
    if num_samples == 1 or len(set(right)) == 1:
        return wilson_interval(round(sum(right) / num_samples), len(right))
    return bootstrap_mean([count / num_samples for count in right])


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment: below 0.05 anywhere with at most 5 % chance when nothing changed (1979)."""
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = highest
    return adjusted


def bootstrap_mean(
    values: Sequence[float], confidence: float = 0.95, num_resamples: int = 20_000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of one value per item.

    An item's samples stay together in its value: the spread between items already contains the sampling noise, and
    resampling inside the items would count it twice. Resampling items amounts to drawing how often each distinct
    value occurs, so one multinomial draw replaces num_resamples * items numbers.
    """
    distinct, counts = np.unique(np.asarray(values, dtype=float), return_counts=True)
    draws = np.random.default_rng(seed).multinomial(len(values), counts / len(values), size=num_resamples)
    low, high = np.quantile(draws @ distinct / len(values), [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def paired_bootstrap(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """95 % percentile bootstrap interval of mean(after) - mean(before) over items."""
    return bootstrap_mean((np.asarray(after, dtype=float) - np.asarray(before, dtype=float)).tolist())


def adjusted_interval(changes: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Interval of the mean change that is valid for few items, and when all items changed alike.

    Wald's interval after adding one item that got better and one that got worse (Bonett and Price, J Educ Behav
    Stat 37, 2012). A bootstrap over seven unchanged items has no width; this interval does.
    """
    padded = np.array([1.0, -1.0, *changes])
    half = NormalDist().inv_cdf((1 + confidence) / 2) * float(padded.std()) / math.sqrt(len(padded))
    centre = float(padded.mean())
    return max(-1.0, centre - half), min(1.0, centre + half)


def minimal_detectable_difference(n: int, num_discordant: int, alpha: float = 0.05, power: float = 0.8) -> float:
    """Smallest true difference in accuracy that McNemar's test on `n` pairs finds with the given power.

    Solves Connor's sample size (Biometrics 43, 1987) for the difference d, with q = num_discordant / n as the
    share of discordant pairs and z1, z2 the normal quantiles of 1 - alpha/2 and of the power:

        d * sqrt(n) = z1 * sqrt(q) + z2 * sqrt(q - d^2)

    d cannot exceed q; where it would, all discordant pairs go one way (q = d), and the same equation is
    solved for that, the best case for detection.
    """
    z1, z2 = NormalDist().inv_cdf(1 - alpha / 2), NormalDist().inv_cdf(power)
    q = num_discordant / n
    root = n * q * z1**2 - (n + z2**2) * q * (z1**2 - z2**2)
    d = (math.sqrt(n * q) * z1 + math.sqrt(max(root, 0.0))) / (n + z2**2)
    if 0 < d <= q:
        return d
    d = min(1.0, (z1 + z2) ** 2 / n)
    for _ in range(100):
        d = min(1.0, (z1 + z2 * math.sqrt(1 - d)) ** 2 / n)
    return d


def minimal_detectable_mean(changes: Sequence[float], alpha: float = 0.05, power: float = 0.8) -> float:
    """Smallest true mean change that is found with the given power, for several samples per item.

    (z1 + z2) times the standard error of these changes, padded as in `adjusted_interval`: items without any change
    would otherwise give zero.
    """
    z1, z2 = NormalDist().inv_cdf(1 - alpha / 2), NormalDist().inv_cdf(power)
    padded = np.array([1.0, -1.0, *changes])
    return min(1.0, (z1 + z2) * float(padded.std()) / math.sqrt(len(padded)))


def wilson_interval(num_right: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of an accuracy; (0, 1) without items."""
    if n == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = num_right / n
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def _fair_binomial(n: int) -> np.ndarray:
    """Chances of 0 to n heads in n fair throws."""
    logs = np.array([math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in range(n + 1)])
    return np.exp(logs - n * math.log(2))
