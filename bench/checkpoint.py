"""Measures what digests cost a checkpoint: saves one state with and without them, alternating, in
one process.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from dapo_core.checkpoint.shards import _Writer

NUM_ROUNDS = 7  # per writer, after one warm-up


def main() -> None:
    """Save alternately; print medians and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--megabytes", type=int, default=1000, help="size of the state (default: %(default)s)"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="scratch folder on the disk to measure (default: the temporary one)",
    )
    arguments = parser.parse_args()
    tensors = {
        f"t{number}": torch.randn(2_000_000) for number in range(arguments.megabytes // 8)
    }  # 8 MB each
    writers = {"without digests": FileSystemWriter, "with digests": _Writer}
    seconds: dict[str, list[float]] = {name: [] for name in writers}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in writers}
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # expected
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for number in range(NUM_ROUNDS + 1):
            for name, writer in writers.items():
                began, cpu_began = time.perf_counter(), sum(os.times()[:2])
                dcp.save({"model": tensors}, storage_writer=writer(f"{folder}/step"), no_dist=True)
                if number:  # the first round warms up
                    seconds[name].append(time.perf_counter() - began)
                    cpu_seconds[name].append(sum(os.times()[:2]) - cpu_began)
                shutil.rmtree(f"{folder}/step")
    for name in writers:
        print(
            f"{name:16} {statistics.median(seconds[name]):6.2f} s, min {min(seconds[name]):.2f} s, "
            f"CPU {statistics.median(cpu_seconds[name]):.2f} s"
        )
    without, with_digests = seconds.values()
    ratios = [b / a for a, b in zip(without, with_digests, strict=True)]
    print(
        f"ratio {statistics.median(ratios):.3f}, of the minima "
        f"{min(with_digests) / min(without):.3f}; "
        f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()
