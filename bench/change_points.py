"""Detection rate of change points in simulated series of runs, without a change and with one of
known size.

    python bench/change_points.py [--repeats 1000]

Each line of the table shows the share of series with a change point: without a change, for three
kinds of noise, and with a change of 1, 2 and 3 standard deviations in the middle. A false-alarm
rate above 5 %, beyond simulation error, fails the benchmark.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval import EvaluationError
from eval.change_points import find_change_points
from eval.statistics import SIGNIFICANCE

SPREAD = 0.02  # standard deviation of the accuracies of runs
CHANGES = (1, 2, 3)
NUM_ORDERS = 499


def draw(kind: str, rng: np.random.Generator, repeats: int, num_runs: int) -> np.ndarray:
    """[repeats, num_runs] accuracies without a change."""
    if kind == "30 items":
        return rng.binomial(30, 0.4, (repeats, num_runs)) / 30
    noise = rng.normal(0.6, SPREAD, (repeats, num_runs))
    return noise if kind == "normal" else np.where(rng.random(noise.shape) < 0.1, 0.1, noise)


def share_marked(lines: np.ndarray) -> float:
    """Share of lines with at least one change point."""
    return float(
        np.mean([bool(find_change_points([line.tolist()], NUM_ORDERS)[0]) for line in lines])
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--runs", type=int, nargs="+", default=[8, 14, 30, 90])
    chosen = parser.parse_args(arguments)
    rng, kinds = np.random.default_rng(5), ("normal", "30 items", "outliers")
    allowed = SIGNIFICANCE + 3 * (SIGNIFICANCE * (1 - SIGNIFICANCE) / chosen.repeats) ** 0.5
    worst = 0.0
    changes = ", ".join(map(str, CHANGES))
    print(f"runs  no change: {', '.join(kinds)}   change of {changes} sd   (% marked)")
    for num_runs in chosen.runs:
        alarms = [share_marked(draw(kind, rng, chosen.repeats, num_runs)) for kind in kinds]
        half = np.arange(num_runs) >= num_runs // 2
        found = [
            share_marked(draw("normal", rng, chosen.repeats, num_runs) + size * SPREAD * half)
            for size in CHANGES
        ]
        figures = [
            " ".join(f"{100 * share:5.1f}" for share in shares) for shares in (alarms, found)
        ]
        print(f"{num_runs:4}       {figures[0]}               {figures[1]}", flush=True)
        worst = max(worst, *alarms)
    if worst > allowed:
        raise EvaluationError(
            f"{worst:.1%} of lines without a change are marked, more than {allowed:.1%}"
        )


if __name__ == "__main__":
    main()
