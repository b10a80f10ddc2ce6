"""Size and power of `eval.paired` beside `nel compare` of NeMo Evaluator, on the same pairs.

    python bench/paired.py [--pairs 20000]

Each pair is two evaluations of n items with k responses each; the true accuracy of the second is
equal, 3 points lower or 3 points higher. Item difficulties are uniform. Shown is how often (in %)
each says worse or better, and a paired t-test at 5 % for comparison.

Two figures need no luck. The size is the chance of a false verdict: with the sizes of a pair's
changes given, all signs are equally likely, so it is the largest attainable p below 5 %, averaged
over the pairs. No pair's may reach 5 %. And "at 5 %" is what the same test finds if a drawn number
decides at the border, so that its size is exactly 5 %: the most it can find.

NeMo Evaluator's rule is that of its commit ac66aff5 with its defaults: a one-sided test for a
regression (exact McNemar for k = 1, else 10,000 random sign patterns, here all of them), and BLOCK
if p < 0.05, the effect exceeds 0.05 and more problems got worse than better, where a problem counts
as right if any repeat was. Significant without these is WARN. It has no verdict for better.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval import EvaluationError, paired
from eval.results.statistics import SIGNIFICANCE

SETTINGS = ((500, 4), (500, 1), (100, 4), (30, 16))  # (items, responses per item)
CHANGES = (0.0, -0.03, 0.03)
MEAN = 0.5  # accuracy before, of uniform difficulties
MIN_EFFECT = 0.05  # --max-drop of nel compare
T_BOUNDS = {500: 1.9647, 100: 1.9842, 30: 2.0452}  # 97.5 % points of Student's t, n - 1
BLOCK = 500  # pairs at a time
COMPARED = 2  # of them are judged by `eval.paired` too
VERDICTS = ("worse", "better", "size", "at 5 %", "nel BLOCK", "nel WARN", "t worse", "t better")


@dataclass(frozen=True)
class Tests:
    """The sign-flip test of many pairs. Arrays [pairs]."""

    p: np.ndarray
    beyond: np.ndarray  # chance of sums farther from zero than the observed one
    size: np.ndarray  # largest attainable p below 5 %


def sign_flip_tests(changes: np.ndarray) -> Tests:
    """Test each row of whole changes [pairs, items], by the characteristic function of its sum."""
    sizes = np.abs(changes)
    reach = int(sizes.sum(axis=1).max()) + 1
    length = 2 ** (2 * reach).bit_length()
    angles = 2 * np.pi / length * np.arange(length // 2 + 1)
    spectrum = np.ones((len(changes), len(angles)))
    for size in range(1, sizes.max() + 1):
        spectrum *= np.cos(size * angles) ** (sizes == size).sum(axis=1)[:, None]
    chances = np.clip(np.fft.irfft(spectrum, length), 0.0, None)[:, : reach + 1]
    chances[:, 1:] *= 2  # both signs of a sum
    tails = np.cumsum(chances[:, ::-1], axis=1)[:, ::-1]
    observed, rows = np.abs(changes.sum(axis=1)), np.arange(len(changes))
    size = np.where(tails < SIGNIFICANCE, tails, 0.0).max(axis=1)
    return Tests(tails[rows, observed], tails[rows, observed + 1], size)


def nel_verdicts(
    before: np.ndarray, after: np.ndarray, p: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """BLOCK and WARN [pairs] by NeMo Evaluator's rule, for right (1) or wrong (0) [pairs, n, k]."""
    drops = before.sum(axis=2) - after.sum(axis=2)
    is_found = (drops.sum(axis=1) > 0) & (p / 2 < SIGNIFICANCE)
    x, y = before.any(axis=2), after.any(axis=2)
    spread = drops.std(axis=1, ddof=1) if before.shape[2] > 1 else 1.0
    is_blocked = (drops.mean(axis=1) / spread > MIN_EFFECT) & (x.sum(axis=1) > y.sum(axis=1))
    return is_found & is_blocked, is_found & ~is_blocked


def t_distances(changes: np.ndarray) -> np.ndarray:
    """Student's t [pairs] of the items' changes."""
    error = changes.std(axis=1, ddof=1) / changes.shape[1] ** 0.5
    return np.divide(changes.mean(axis=1), error, out=np.zeros(len(changes)), where=error > 0)


def simulate(n: int, k: int, change: float, pairs: int) -> dict[str, float]:
    """Shares of the verdicts, and the mean size of the tests."""
    rng = np.random.default_rng([n, k, round(1000 * (1 + change))])
    sums = np.zeros(len(VERDICTS))
    for start in range(0, pairs, BLOCK):
        chances = rng.random((min(BLOCK, pairs - start), n, 1))
        later = (
            chances * (1 + change / MEAN) if change < 0 else chances + (1 - chances) * change / MEAN
        )
        before, after = (rng.random((*chances.shape[:2], k)) < each for each in (chances, later))
        found = judge(before, after)
        sums += [found[name].sum() for name in VERDICTS]
    return dict(zip(VERDICTS, (sums / pairs).tolist(), strict=True))


def judge(before: np.ndarray, after: np.ndarray) -> dict[str, np.ndarray]:
    """Verdicts on pairs of right or wrong responses [pairs, n, k]. Raises EvaluationError."""
    changes = after.sum(axis=2) - before.sum(axis=2)
    tests = sign_flip_tests(changes)
    require_equal(before, after, tests.p)
    if tests.size.max() >= SIGNIFICANCE:
        raise EvaluationError(f"a pair's test has size {tests.size.max():.3%}")
    sums, is_found = changes.sum(axis=1), tests.p < SIGNIFICANCE
    border = (SIGNIFICANCE - tests.beyond) / np.maximum(tests.p - tests.beyond, 1e-300)
    blocked, warned = nel_verdicts(before, after, tests.p)
    distances, bound = t_distances(changes), T_BOUNDS[changes.shape[1]]
    return {
        "worse": is_found & (sums < 0),
        "better": is_found & (sums > 0),
        "size": tests.size,
        "at 5 %": np.where(is_found, 1.0, np.clip(border, 0.0, 1.0)),
        "nel BLOCK": blocked,
        "nel WARN": warned,
        "t worse": distances < -bound,
        "t better": distances > bound,
    }


def require_equal(before: np.ndarray, after: np.ndarray, p: np.ndarray) -> None:
    """Raise EvaluationError unless `eval.paired` has these p."""
    for x, y, expected in zip(before[:COMPARED], after[:COMPARED], p[:COMPARED], strict=True):
        if abs((found := paired.compare(x, y).p) - expected) > 1e-9:
            raise EvaluationError(f"eval.paired has p {found}, the simulation {expected}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=20_000)
    pairs = parser.parse_args(arguments).pairs
    error = 3 * (SIGNIFICANCE * (1 - SIGNIFICANCE) / pairs) ** 0.5
    print("| items x responses | true change | " + " | ".join(VERDICTS) + " |")
    missed = []
    for n, k in SETTINGS:
        for change in CHANGES:
            shares = simulate(n, k, change, pairs)
            cells = [f"{100 * share:.1f}" for share in shares.values()]
            print(f"| {n} x {k} | {100 * change:+.0f} | " + " | ".join(cells) + " |", flush=True)
            alarms = shares["worse"] + shares["better"]
            if not change and alarms > shares["size"] + error:
                missed.append(f"{n} x {k}: {alarms:.1%}")
    if missed:
        raise EvaluationError(f"more false alarms than the tests' size: {'; '.join(missed)}")


if __name__ == "__main__":
    main()
