"""Simulated coverage of the 95 % intervals, for evaluations of n items with k responses each.

    python bench/intervals.py [--repeats 500]

Each line shows how often the interval contains the true accuracy and the true change between two
models (mean and minimum over several item distributions), next to the percentile bootstrap over
items. Then, for suites: how often the interval contains the true pooled change, and how often p
is below 0.05 without a change. Coverage below 94 % or false alarms above 5 %, beyond simulation
error, fail the benchmark.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval import EvaluationError
from eval.results.statistics import (
    SIGNIFICANCE,
    Stratum,
    measure_change,
    measure_pooled_change,
    share_interval,
)

REQUIRED = 0.94
# Beta distributions of the probability of a right response over items, from polarized to uniform
# difficulty.
ITEMS = ((0.1, 1.0), (0.3, 0.3), (0.5, 1.5), (1.0, 1.0), (2.0, 5.0))
# benchmarks as (items, responses per item, index into ITEMS, weight)
SUITES = {
    "500, 272, 40, 30, 30 items": (
        (500, 1, 3, 1),
        (272, 1, 2, 1),
        (40, 1, 3, 1),
        (30, 1, 1, 1),
        (30, 1, 0, 1),
    ),
    "100, 100 items": ((100, 1, 3, 1), (100, 1, 1, 1)),
    "30, 30 items": ((30, 1, 3, 1), (30, 1, 1, 1)),
    "30 x 4, 30 x 4, 500 items": ((30, 4, 1, 1), (30, 4, 0, 1), (500, 1, 3, 2)),
}
CHANGED = 0.2  # share of items whose probability is redrawn from a better distribution


def coverage(
    setting: tuple[int, int, tuple[float, float], int],
) -> tuple[float, float, float, float]:
    """Coverage of (accuracy, change, accuracy by bootstrap, change by bootstrap)."""
    n, k, (a, b), repeats = setting
    rng = np.random.default_rng([n, k, int(10 * a)])
    truth = a / (a + b)
    gain = CHANGED * ((a + 1) / (a + 1 + b) - truth)
    hits = np.zeros(4)
    for _ in range(repeats):
        chances = rng.beta(a, b, size=n)
        later = np.where(rng.random(n) < CHANGED, rng.beta(a + 1, b, size=n), chances)
        before, after = rng.binomial(k, chances), rng.binomial(k, later)
        hits += (
            holds(_share_interval(tuple(sorted(before.tolist())), k), truth),
            holds(_change_interval(tuple(sorted((after - before).tolist())), k), gain),
            holds(bootstrap(before / k, rng), truth),
            holds(bootstrap((after - before) / k, rng), gain),
        )
    return tuple((hits / repeats).tolist())


def suite_coverage(setting: tuple[str, int]) -> tuple[float, float]:
    """(coverage of the true pooled change, share of p < 0.05 without a change)."""
    name, repeats = setting
    rng, total = np.random.default_rng(len(name)), sum(weight for *_, weight in SUITES[name])
    covered = alarms = 0
    for changed in (CHANGED, 0.0):
        for _ in range(repeats):
            strata, truth = [], 0.0
            for n, k, kind, weight in SUITES[name]:
                a, b = ITEMS[kind]
                truth += weight / total * changed * ((a + 1) / (a + 1 + b) - a / (a + b))
                chances = rng.beta(a, b, size=n)
                later = np.where(rng.random(n) < changed, rng.beta(a + 1, b, size=n), chances)
                strata.append(
                    Stratum((rng.binomial(k, later) - rng.binomial(k, chances)).tolist(), k, weight)
                )
            change = measure_pooled_change(strata)
            covered += bool(changed) and holds(change.ci95, truth)
            alarms += not changed and change.p < SIGNIFICANCE
    return covered / repeats, alarms / repeats


def holds(interval: tuple[float, float], truth: float) -> bool:
    """True if the interval contains the truth."""
    return interval[0] <= truth <= interval[1]


@functools.cache
def _share_interval(right: tuple[int, ...], k: int) -> tuple[float, float]:
    return share_interval([count / k for count in right], 1 / k)


@functools.cache
def _change_interval(changes: tuple[int, ...], k: int) -> tuple[float, float]:
    return measure_change(changes, k).ci95


def bootstrap(values: np.ndarray, rng: np.random.Generator) -> tuple[float, float]:
    """Percentile bootstrap over items."""
    distinct, counts = np.unique(values, return_counts=True)
    draws = rng.multinomial(len(values), counts / len(values), size=400) @ distinct / len(values)
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(low), float(high)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=500)
    parser.add_argument("--items", type=int, nargs="+", default=[30, 60, 100, 500])
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 4, 32])
    chosen = parser.parse_args(arguments)
    error = 3 * (REQUIRED * (1 - REQUIRED) / chosen.repeats) ** 0.5
    missed = []
    print(
        "  n   k  accuracy: mean lowest bootstrap   change: mean lowest bootstrap   (coverage in %)"
    )
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for n in chosen.items:
            for k in chosen.samples:
                found = np.array(
                    pool.map(coverage, [(n, k, shape, chosen.repeats) for shape in ITEMS])
                )
                mean, lowest = 100 * found.mean(axis=0), 100 * found.min(axis=0)
                print(
                    f"{n:3} {k:3}           {mean[0]:.1f}   {lowest[0]:.1f}      {mean[2]:.1f}"
                    f"           {mean[1]:.1f}   {lowest[1]:.1f}      {mean[3]:.1f}",
                    flush=True,
                )
                if min(mean[:2]) < 100 * REQUIRED or min(lowest[:2]) < 100 * (REQUIRED - error):
                    missed.append(f"n={n}, k={k}")
        print("suite: coverage of the pooled change, p below 0.05 without a change (%)")
        jobs = [(name, chosen.repeats) for name in SUITES]
        for (name, _), (covered, alarms) in zip(jobs, pool.map(suite_coverage, jobs), strict=True):
            print(f"{name:28} {100 * covered:.1f} {100 * alarms:.1f}", flush=True)
            if covered < REQUIRED - error or alarms > SIGNIFICANCE + error:
                missed.append(name)
    if missed:
        raise EvaluationError(f"coverage below {REQUIRED:.0%}: {'; '.join(missed)}")


if __name__ == "__main__":
    main()
