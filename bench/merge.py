"""Measures `dapo merge` against `cp` of the same bytes, on a warm cache, and prints one table.

The programs take turns, so that a slow minute of a shared machine slows them all. Each measurement
has its own process, which runs the program twice: once to record peak memory, then timed, without a
watching thread, with imports done and memory returned by the host, after pending writes are on
disk.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

EXAMPLE = """example, a checkpoint of 0.5 GB on the disk to measure:
  .venv/bin/python bench/merge.py --layers 1 --folder /data/scratch
"""
MIB = 1024**2
HIDDEN_SIZE, NUM_SHARDS = 2048, 4


@dataclass(frozen=True)
class Measurement:
    """One program in one round."""

    seconds: float
    cpu_seconds: float  # of the process and its children, in user and kernel mode
    peak_bytes: int  # resident memory above that of the imports
    file_bytes: int  # largest file written


def main() -> None:
    """Write checkpoints of an untied and a tied model; print a table for each."""
    arguments = _parser().parse_args()
    for is_tied in (False, True):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            model = write_model_files(Path(folder) / "model", arguments.layers, is_tied)
            verl, ours = write_checkpoints(Path(folder), model)
            programs: dict[str, Callable[[Path], None]] = {
                "cp": _Copy(verl),
                "cp, then fsync": _Copy(verl, is_synced=True),
                "dapo merge, verl's": _Merge(verl),
                "dapo merge, dapo's": _Merge(ours),
            }
            rounds: dict[str, list[Measurement]] = {name: [] for name in programs}
            for _ in range(arguments.rounds):
                for name, program in programs.items():
                    rounds[name].append(measure(program, Path(folder) / "target"))
            num_bytes = sum(path.stat().st_size for path in verl.glob("*.pt"))
        print(
            f"{'tied' if is_tied else 'untied'}, {num_bytes / 1e9:.2f} GB in {NUM_SHARDS} shards, "
            "float32, "
            f"warm cache, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}; "
            "medians of "
            f"{arguments.rounds} rounds"
        )
        print(table(rounds), flush=True)


def table(rounds: dict[str, list[Measurement]]) -> str:
    """The figures as text; ratios are of median seconds, to both kinds of cp."""
    medians = {
        name: (
            statistics.median(row.seconds for row in rows),
            min(row.seconds for row in rows),
            statistics.median(row.cpu_seconds for row in rows),
        )
        for name, rows in rounds.items()
    }
    (first, *_), (synced, *_) = list(medians.values())[:2]
    lines = [
        f"{'':24} {'seconds':>8} {'min':>6} {'/ cp':>6} {'/ cp+fsync':>11} {'CPU s':>6} "
        f"{'peak MiB':>9} "
        f"{'file MiB':>9}"
    ]
    for name, (seconds, least, cpu_seconds) in medians.items():
        peak, largest = (
            max(getattr(row, key) for row in rounds[name]) for key in ("peak_bytes", "file_bytes")
        )
        lines.append(
            f"{name:24} {seconds:8.2f} {least:6.2f} {seconds / first:6.2f} "
            f"{seconds / synced:11.2f} "
            f"{cpu_seconds:6.2f} {peak / MIB:9.0f} {largest / MIB:9.0f}"
        )
    return "\n".join(lines)


def write_model_files(folder: Path, num_layers: int, is_tied: bool) -> Path:
    """Write the configuration of a Qwen3, without weights."""
    from transformers import Qwen3Config

    config = Qwen3Config(
        vocab_size=32000,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=3 * HIDDEN_SIZE,
        num_hidden_layers=num_layers,
        num_attention_heads=HIDDEN_SIZE // 128,
        num_key_value_heads=HIDDEN_SIZE // 256,
        head_dim=128,
        tie_word_embeddings=is_tied,
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
    )
    config.save_pretrained(folder)
    return folder


def write_checkpoints(folder: Path, model_files: Path) -> tuple[Path, Path]:
    """Write the same random weights as a verl folder and as a checkpoint of `dapo train`."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from dapo_core.checkpoint.manifest import write_manifest
    from dapo_core.checkpoint.shards import _Writer
    from dapo_core.model.names import tied_names
    from dapo_core.model.pretrained import empty_causal_lm

    model = empty_causal_lm(model_files)
    generator = torch.Generator().manual_seed(0)
    whole = {
        name: torch.randn(tensor.shape, generator=generator)
        for name, tensor in model.state_dict().items()
    }
    tied = tied_names(model)
    whole = {name: tensor for name, tensor in whole.items() if name not in tied}
    verl, ours = folder / "global_step_1" / "actor", folder / "step_000001"
    for place in (verl, ours):
        shutil.copytree(model_files, place / "huggingface")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # expected
        dcp.save({"model": whole}, storage_writer=_Writer(str(ours)), no_dist=True)
    (ours / "tensor_names.json").write_text(json.dumps(list(whole)))
    (ours / "trainer_state.json").write_text(json.dumps({"step": 1, "metrics": {}}))
    write_manifest(ours, "bench", 1, {})
    for rank in range(NUM_SHARDS):
        torch.distributed.init_process_group(
            "fake", store=FakeStore(), rank=rank, world_size=NUM_SHARDS
        )
        mesh = DeviceMesh("cpu", list(range(NUM_SHARDS)), mesh_dim_names=("fsdp",))
        state = {
            name: DTensor.from_local(
                tensor.chunk(NUM_SHARDS)[rank].clone(),
                mesh,
                [Shard(0)],
                shape=tensor.shape,
                stride=tensor.stride(),
                run_check=False,
            )
            for name, tensor in whole.items()
        }
        state |= {name: state[kept] for name, kept in tied.items()}
        torch.save(state, verl / f"model_world_size_{NUM_SHARDS}_rank_{rank}.pt")
        torch.distributed.destroy_process_group()
    return verl, ours


def measure(program: Callable[[Path], None], target: Path) -> Measurement:
    """Run the program in a fresh process, and remove its output."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        peak = pool.submit(_peak_bytes, program, target).result()
        largest = max(path.stat().st_size for path in target.iterdir())
        shutil.rmtree(target)
        seconds, cpu_seconds = pool.submit(_seconds, program, target).result()
    shutil.rmtree(target)
    return Measurement(seconds, cpu_seconds, peak, largest)


def _peak_bytes(program: Callable[[Path], None], target: Path) -> int:
    import torch.distributed.tensor  # noqa: F401 - imports do not count
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    import dapo_core.merge.run  # noqa: F401

    before, peak, is_done = resident_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_done.wait(0.002):
            peak = max(peak, resident_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    program(target)
    is_done.set()
    watcher.join()
    return max(peak - before, 0)


def _seconds(program: Callable[[Path], None], target: Path) -> tuple[float, float]:
    os.sync()  # write back what the previous program left
    cpu_before, began = _cpu_seconds(), time.perf_counter()
    program(target)
    return time.perf_counter() - began, _cpu_seconds() - cpu_before


def _cpu_seconds() -> float:
    return sum(os.times()[:4])


def resident_bytes() -> int:
    """Resident memory of this process, including mapped files."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@dataclass(frozen=True)
class _Copy:
    source: Path
    is_synced: bool = False

    def __call__(self, target: Path) -> None:
        target.mkdir()
        copies = [target / path.name for path in self.source.glob("*.pt")]
        subprocess.run(["cp", *map(str, self.source.glob("*.pt")), str(target)], check=True)
        if self.is_synced:
            subprocess.run(["sync", *map(str, copies)], check=True)


@dataclass(frozen=True)
class _Merge:
    source: Path

    def __call__(self, target: Path) -> None:
        from dapo_core.merge.run import merge_checkpoint

        merge_checkpoint([self.source], target)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--layers", type=int, default=9, help="layers of the model (default: %(default)s, 2.3 GB)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default: %(default)s)")
    parser.add_argument(
        "--folder", type=Path, help="scratch folder on the disk to measure (default: temporary)"
    )
    return parser


if __name__ == "__main__":
    main()
