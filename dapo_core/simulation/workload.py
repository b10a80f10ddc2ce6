"""Response lengths and outcomes of simulated groups; lengths are log-normal."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist

import numpy as np

# of the published log of Qwen3-32B: tokens of a response, and the share cut at the limit
PUBLISHED_MEAN, PUBLISHED_CUT, PUBLISHED_LIMIT = 7385.14, 0.0390625, 20_480
BETWEEN_PROMPTS = 0.5  # share of the variance of log-lengths between prompts
NUM_QUANTILES, NUM_SAMPLED = 256, 1000  # of difficulty; groups
NORMAL = NormalDist()
QUANTILES = np.array(
    [NORMAL.inv_cdf((number + 0.5) / NUM_QUANTILES) for number in range(NUM_QUANTILES)]
)


@dataclass(frozen=True)
class Workload:
    """What engines are asked to sample.

    Logs of lengths are normal, and cut at the limit. A prompt's difficulty is standard normal; a
    response to it is right with the log-odds `ease` - `slope` x difficulty, and wrong if cut.
    `correlation` is that of difficulty and the prompt's mean log-length.
    """

    group_size: int
    prompt_tokens: int
    limit: int  # of a response
    log_mean: float
    log_sigma: float
    ease: float = 0.0
    slope: float = 2.0
    correlation: float = 1.0

    @property
    def mean_tokens(self) -> float:
        """Mean length of a response."""
        return cut_mean(self.log_mean, self.log_sigma, self.limit)

    @property
    def mean_context(self) -> float:
        """Mean tokens that precede a decoded token."""
        square = cut_mean(2 * self.log_mean, 2 * self.log_sigma, self.limit**2)
        return self.prompt_tokens + square / (2 * self.mean_tokens)

    @property
    def cut_share(self) -> float:
        return 1 - NORMAL.cdf((math.log(self.limit) - self.log_mean) / self.log_sigma)

    @property
    def signal_share(self) -> float:
        """Share of groups with signal, apart from cut responses."""
        return _signal_share(self.ease, self.slope, self.group_size)


@lru_cache(maxsize=1 << 17)
def outcomes(workload: Workload, group_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a group's response lengths and which are right; the same under every setting."""
    draw = np.random.default_rng([7, group_id])
    difficulty = draw.standard_normal()
    noise = math.sqrt(1 - BETWEEN_PROMPTS) * draw.standard_normal(workload.group_size)
    of_prompt = workload.correlation * difficulty
    if abs(workload.correlation) < 1:
        of_prompt += math.sqrt(1 - workload.correlation**2) * draw.standard_normal()
    deviations = math.sqrt(BETWEEN_PROMPTS) * of_prompt + noise
    lengths = np.exp(workload.log_mean + workload.log_sigma * deviations)
    odds = workload.ease - workload.slope * difficulty
    is_right = draw.random(workload.group_size) < 1 / (1 + math.exp(-odds))
    return lengths.clip(1, workload.limit).round().astype(np.int64), is_right & (
        lengths < workload.limit
    )


def correlated(workload: Workload, mean_with_signal: float) -> Workload:
    """Return the workload whose responses in groups with signal have this mean length."""
    choices = [replace(workload, correlation=value) for value in (-1.0, 0.0, 1.0)]
    means = []
    for choice in choices:
        groups = [outcomes(choice, number) for number in range(NUM_SAMPLED)]
        kept = [lengths for lengths, right in groups if 0 < right.sum() < len(right)]
        means.append(np.mean(kept) if kept else choice.mean_tokens)
    order = np.argsort(means)
    values = [choices[place].correlation for place in order]
    return replace(
        workload, correlation=float(np.interp(mean_with_signal, np.take(means, order), values))
    )


def log_normal(mean: float, limit: float, cut_share: float) -> tuple[float, float]:
    """Return mean and sigma of logs so that lengths cut at the limit have this mean and share."""
    quantile = NORMAL.inv_cdf(1 - cut_share)
    sigma = solve(
        lambda sigma: -cut_mean(math.log(limit) - quantile * sigma, sigma, limit), -mean, 1e-3, 5.0
    )
    return math.log(limit) - quantile * sigma, sigma


def with_mean(mean: float, limit: float, log_sigma: float) -> float:
    """Return the mean of logs so that lengths cut at the limit have this mean."""
    return solve(lambda log_mean: cut_mean(log_mean, log_sigma, limit), mean, 0.0, 20.0)


def cut_mean(log_mean: float, log_sigma: float, limit: float) -> float:
    """Return the mean of min(length, limit), where lengths are log-normal."""
    quantile = (math.log(limit) - log_mean) / log_sigma
    below = math.exp(log_mean + log_sigma**2 / 2) * NORMAL.cdf(quantile - log_sigma)
    return below + limit * (1 - NORMAL.cdf(quantile))


def chances(accuracy: float, signal_share: float, group_size: int) -> tuple[float, float]:
    """Return `ease` and `slope` so that responses have this accuracy, and groups this signal."""
    accuracy = min(max(accuracy, 0.001), 0.999)

    def ease(slope: float) -> float:
        return solve(lambda ease: _accuracy(ease, slope), accuracy, -60.0, 60.0)

    slope = solve(
        lambda slope: -_signal_share(ease(slope), slope, group_size), -signal_share, 0, 40
    )
    return ease(slope), slope


def solve(rising: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Return where a rising function takes a value, within the bounds."""
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < target else (low, middle)
    return (low + high) / 2


def _accuracy(ease: float, slope: float) -> float:
    return float(_right(ease, slope).mean())


def _signal_share(ease: float, slope: float, group_size: int) -> float:
    right = _right(ease, slope)
    return float((1 - right**group_size - (1 - right) ** group_size).mean())


def _right(ease: float, slope: float) -> np.ndarray:
    """Return the chance of a right response at each quantile of difficulty."""
    return 1 / (1 + np.exp(slope * QUANTILES - ease))
