"""Size and power of `eval.paired` beside `nel compare` of NeMo Evaluator, on the same pairs.

    python bench/paired.py [--pairs 2000]

Each pair is two evaluations of n items with k responses each; the true accuracy of the second is
equal, 3 points lower or 3 points higher. Item difficulties are uniform. Shown is how often (in %)
each says worse or better, and a paired t-test at 5 % for comparison. False alarms of `eval.paired`
above 5 %, beyond simulation error, fail the benchmark.

NeMo Evaluator's rule is that of its commit ac66aff5 with its defaults: a one-sided test for a
regression (exact McNemar for k = 1, else 10,000 random sign patterns, here all of them), and BLOCK
if p < 0.05, the effect exceeds 0.05 and more problems got worse than better, where a problem counts
as right if any repeat was. Significant without these is WARN. It has no verdict for better.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval import EvaluationError, paired
from eval.results.statistics import SIGNIFICANCE, sign_flip_test

SETTINGS = ((500, 4), (500, 1), (100, 4), (30, 16))  # (items, responses per item)
CHANGES = (0.0, -0.03, 0.03)
MEAN = 0.5  # accuracy before, of uniform difficulties
MIN_EFFECT = 0.05  # --max-drop of nel compare
T_BOUND = 1.96


def nel_verdict(before: np.ndarray, after: np.ndarray) -> str:
    """BLOCK, WARN or "" by NeMo Evaluator's rule, for right (1) or wrong (0) responses [n, k]."""
    k = before.shape[1]
    drops = before.sum(axis=1) - after.sum(axis=1)
    two_sided = sign_flip_test(drops.tolist()).p
    if drops.sum() <= 0 or two_sided / 2 >= SIGNIFICANCE:
        return ""
    x, y = before.any(axis=1), after.any(axis=1)
    effect = drops.mean() if k == 1 else drops.mean() / drops.std(ddof=1)
    is_blocked = effect > MIN_EFFECT and (x & ~y).sum() > (~x & y).sum()
    return "BLOCK" if is_blocked else "WARN"


def t_verdict(before: np.ndarray, after: np.ndarray) -> str:
    """Better, worse or "" by a paired t-test of the items' means."""
    changes = after.mean(axis=1) - before.mean(axis=1)
    error = changes.std(ddof=1) / len(changes) ** 0.5
    distance = changes.mean() / error if error else 0.0
    return ("better" if distance > 0 else "worse") if abs(distance) > T_BOUND else ""


def simulate(n: int, k: int, change: float, pairs: int) -> Counter[str]:
    """Count verdicts, named by who gave them."""
    rng = np.random.default_rng([n, k, round(1000 * (1 + change))])
    counts: Counter[str] = Counter()
    for _ in range(pairs):
        chances = rng.random(n)
        later = (
            chances * (1 + change / MEAN) if change < 0 else chances + (1 - chances) * change / MEAN
        )
        before, after = (rng.random((n, k)) < each[:, None] for each in (chances, later))
        counts["ours " + paired.compare(before, after).direction] += 1
        counts["nel " + nel_verdict(before, after)] += 1
        counts["t " + t_verdict(before, after)] += 1
    return counts


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=2000)
    pairs = parser.parse_args(arguments).pairs
    error = 3 * (SIGNIFICANCE * (1 - SIGNIFICANCE) / pairs) ** 0.5
    names = ("ours worse", "ours better", "nel BLOCK", "nel WARN", "t worse", "t better")
    print("| items, responses | true change | " + " | ".join(names) + " |")
    missed = []
    for n, k in SETTINGS:
        for change in CHANGES:
            counts = simulate(n, k, change, pairs)
            cells = [f"{100 * counts[name] / pairs:.1f}" for name in names]
            print(f"| {n} x {k} | {100 * change:+.0f} | " + " | ".join(cells) + " |", flush=True)
            alarms = (counts["ours worse"] + counts["ours better"]) / pairs
            if not change and alarms > SIGNIFICANCE + error:
                missed.append(f"{n} x {k}: {alarms:.1%}")
    if missed:
        raise EvaluationError(f"false alarms above {SIGNIFICANCE:.0%}: {'; '.join(missed)}")


if __name__ == "__main__":
    main()
