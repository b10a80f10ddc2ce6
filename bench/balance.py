"""Compares longest-first balancing over ranks with Karmarkar-Karp, which verl uses: evenness and
time.

Example: .venv/bin/python bench/balance.py --sequences 16384 --ranks 64
"""

from __future__ import annotations

import argparse
import heapq
import statistics
import time
from collections.abc import Callable

import numpy as np

from dapo_core.algorithm.balance import balance_over_ranks, workload

Balance = Callable[[np.ndarray, int], list[np.ndarray]]
NUM_ROUNDS = 9  # of longest first; Karmarkar-Karp runs once


def main() -> None:
    """Measure both methods on the same lengths and print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sequences",
        type=int,
        default=16_384,
        help="sequences in the batch (default: %(default)s)",
    )
    parser.add_argument(
        "--ranks", type=int, default=64, help="data-parallel ranks (default: %(default)s)"
    )
    arguments = parser.parse_args()
    print(
        f"{arguments.sequences} sequences on {arguments.ranks} ranks; max/mean cost per rank, and "
        "median time"
    )
    print(f"{'lengths':<26}{'longest first':>24}{'Karmarkar-Karp':>26}{'speedup':>15}")
    for name, lengths in _lengths(arguments.sequences).items():
        costs = workload(lengths, hidden_size=4096)
        evenness, seconds = _measure(balance_over_ranks, costs, arguments.ranks, NUM_ROUNDS)
        peer_evenness, peer_seconds = _measure(karmarkar_karp, costs, arguments.ranks, 1)
        print(
            f"{name:<26}{evenness:>12.6f}{seconds * 1e3:>9.1f} ms"
            f"{peer_evenness:>14.6f}{peer_seconds * 1e3:>9.0f} ms{peer_seconds / seconds:>15.0f}"
        )


def _lengths(count: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {
        "uniform 50-20,000": draw.integers(50, 20_000, size=count),
        "log-normal, median 1,800": draw.lognormal(7.5, 1.0, size=count)
        .clip(20, 22_528)
        .astype(np.int64),
        "one in ten at 20,480": np.where(
            draw.random(count) < 0.1, 20_480, draw.integers(200, 3000, count)
        ),
    }


def _measure(
    balance: Balance, costs: np.ndarray, num_ranks: int, num_rounds: int
) -> tuple[float, float]:
    """Returns max/mean of the ranks' costs and the median seconds."""
    seconds = []
    for _ in range(num_rounds):
        started = time.perf_counter()
        parts = balance(costs, num_ranks)
        seconds.append(time.perf_counter() - started)
    loads = np.array([costs[part].sum() for part in parts])
    return float(loads.max() / loads.mean()), statistics.median(seconds)


def karmarkar_karp(costs: np.ndarray, num_ranks: int) -> list[np.ndarray]:
    """Largest differencing: repeatedly merge the two most uneven partitions, heavy shares with
    light ones.
    """
    partitions: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for index, cost in enumerate(costs.tolist()):
        shares: list[tuple[float, list[int]]] = [(cost, [index])] + [
            (0.0, []) for _ in range(num_ranks - 1)
        ]
        partitions.append((-cost, index, shares))
    heapq.heapify(partitions)
    while len(partitions) > 1:
        _, number, first = heapq.heappop(partitions)
        _, _, second = heapq.heappop(partitions)
        joined = [
            (load + other, items + others)
            for (load, items), (other, others) in zip(first, reversed(second), strict=True)
        ]
        joined.sort(key=lambda share: -share[0])
        heapq.heappush(partitions, (joined[-1][0] - joined[0][0], number, joined))
    return [np.array(items, dtype=np.int64) for _, items in partitions[0][2]]


if __name__ == "__main__":
    main()
