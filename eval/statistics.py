"""Statistics for two evaluations of the same items. Standard library and numpy only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np


def mcnemar_exact(b: int, c: int) -> float:
    """Two-sided exact p-value of McNemar's test on the discordant pairs.

    `b` items were right before and wrong after (lost), `c` wrong before and right after (gained). Under "no
    change" b is binomial(b + c, 1/2); p is twice its smaller tail, at most 1.
    """
    num_discordant = b + c
    tail = ways = 1  # exact integers: ways = C(num_discordant, k)
    for k in range(min(b, c)):
        ways = ways * (num_discordant - k) // (k + 1)
        tail += ways
    return min(1.0, 2 * tail / 2**num_discordant)


def paired_bootstrap(
    before: Sequence[float],
    after: Sequence[float],
    confidence: float = 0.95,
    num_resamples: int = 20_000,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile interval of mean(after) - mean(before) when the items are drawn again with replacement.

    Drawing items is drawing how often each distinct difference occurs, hence the multinomial: the same
    distribution as resampling indices, without num_resamples * n numbers.
    """
    changes = np.asarray(after, dtype=float) - np.asarray(before, dtype=float)
    values, counts = np.unique(changes, return_counts=True)
    draws = np.random.default_rng(seed).multinomial(len(changes), counts / len(changes), size=num_resamples)
    means = draws @ values / len(changes)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


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


def wilson_interval(num_right: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of an accuracy; (0, 1) without items."""
    if n == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = num_right / n
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return max(0.0, centre - half), min(1.0, centre + half)
