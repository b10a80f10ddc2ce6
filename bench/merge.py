"""Measures `dapo merge` against `cp` of the same bytes, on a warm cache, and prints one table.

The ways take turns, so that a slow minute of a shared machine slows them all, and each measurement has a process
of its own, in which the way runs twice. The first run gives the peak memory. The second is timed: nothing watches
it, its imports are done, a virtual machine has the memory back that its host took, and the disk has written all
that was to be written before it begins.
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
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

EXAMPLE = """example, a checkpoint of 0.5 GB on the disk that matters:
  .venv/bin/python bench/merge.py --layers 1 --folder /data/scratch
"""
MIB = 1024**2


@dataclass(frozen=True)
class Measurement:
    """One way in one round."""

    seconds: float
    cpu_seconds: float  # of the process and what it started, in user and kernel mode
    peak_bytes: int  # memory beyond what the imports took
    file_bytes: int  # largest file written


def main() -> None:
    """Write the checkpoints, measure each way, print a table for an untied and one for a tied model."""
    arguments = _parser().parse_args()
    for is_tied in (False, True):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            model = write_model_files(Path(folder) / "model", arguments.layers, arguments.hidden, is_tied)
            verl, ours = write_checkpoints(Path(folder), model, arguments.shards)
            ways: list[tuple[str, Callable[[Path], None]]] = [
                ("cp", _Copy(verl)),
                ("cp, then fsync", _Copy(verl, is_synced=True)),
                ("blake3 alone", _Digests(verl)),
                ("dapo merge, verl's", _Merge(verl, arguments.max_shard_bytes)),
                ("dapo merge, dapo's", _Merge(ours, arguments.max_shard_bytes)),
            ]
            rounds: dict[str, list[Measurement]] = {name: [] for name, _ in ways}
            for _ in range(arguments.rounds):
                for name, way in ways:
                    rounds[name].append(measure(way, Path(folder) / "target"))
            num_bytes = sum(path.stat().st_size for path in verl.glob("*.pt"))
        print(
            f"{'tied' if is_tied else 'untied'}, {num_bytes / 1e9:.2f} GB in {arguments.shards} shards, float32, "
            f"warm cache, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}; medians of "
            f"{arguments.rounds} rounds"
        )
        print(table(rounds), flush=True)


def table(rounds: dict[str, list[Measurement]]) -> str:
    """The figures as text; the ratios are of median seconds, over the two kinds of cp."""
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
        f"{'':24} {'seconds':>8} {'least':>6} {'/ cp':>6} {'/ cp+fsync':>11} {'CPU s':>6} {'peak MiB':>9} "
        f"{'file MiB':>9}"
    ]
    for name, (seconds, least, cpu_seconds) in medians.items():
        peak, largest = (max(getattr(row, what) for row in rounds[name]) for what in ("peak_bytes", "file_bytes"))
        lines.append(
            f"{name:24} {seconds:8.2f} {least:6.2f} {seconds / first:6.2f} {seconds / synced:11.2f} "
            f"{cpu_seconds:6.2f} {peak / MIB:9.0f} {largest / MIB:9.0f}"
        )
    return "\n".join(lines)


def write_model_files(folder: Path, num_layers: int, hidden_size: int, is_tied: bool) -> Path:
    """Configuration of a Qwen3 without its weights."""
    from transformers import Qwen3Config

    config = Qwen3Config(
        vocab_size=32000,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 128,
        num_key_value_heads=hidden_size // 256,
        head_dim=128,
        tie_word_embeddings=is_tied,
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
    )
    config.save_pretrained(folder)
    return folder


def write_checkpoints(folder: Path, model_files: Path, num_shards: int) -> tuple[Path, Path]:
    """The same random weights as a folder of verl and as a checkpoint of dapo train."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from dapo_core.checkpoint.manifest import write_manifest
    from dapo_core.checkpoint.shards import _Writer
    from dapo_core.merge.verification import empty_model
    from dapo_core.parameter_names import tied_names

    model = empty_model(model_files)
    generator = torch.Generator().manual_seed(0)
    whole = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in model.state_dict().items()}
    tied = tied_names(model)
    whole = {name: tensor for name, tensor in whole.items() if name not in tied}
    verl, ours = folder / "global_step_1" / "actor", folder / "step_000001"
    for place in (verl, ours):
        shutil.copytree(model_files, place / "huggingface")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as intended
        dcp.save({"model": whole}, storage_writer=_Writer(str(ours)), no_dist=True)
    (ours / "tensor_names.json").write_text(json.dumps(list(whole)))
    (ours / "trainer_state.json").write_text(json.dumps({"step": 1, "metrics": {}}))
    write_manifest(ours, "bench", 1, {})
    for rank in range(num_shards):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_shards)
        mesh = DeviceMesh("cpu", list(range(num_shards)), mesh_dim_names=("fsdp",))
        state = {
            name: DTensor.from_local(
                tensor.chunk(num_shards)[rank].clone(),
                mesh,
                [Shard(0)],
                shape=tensor.shape,
                stride=tensor.stride(),
                run_check=False,
            )
            for name, tensor in whole.items()
        }
        state |= {name: state[kept] for name, kept in tied.items()}
        torch.save(state, verl / f"model_world_size_{num_shards}_rank_{rank}.pt")
        torch.distributed.destroy_process_group()
    return verl, ours


def measure(way: Callable[[Path], None], target: Path) -> Measurement:
    """Run the way in a fresh process, and remove what it wrote."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        peak = pool.submit(_peak_bytes, way, target).result()
        largest = max(path.stat().st_size for path in target.iterdir())
        shutil.rmtree(target)
        seconds, cpu_seconds = pool.submit(_seconds, way, target).result()
    shutil.rmtree(target)
    return Measurement(seconds, cpu_seconds, peak, largest)


def _peak_bytes(way: Callable[[Path], None], target: Path) -> int:
    import torch.distributed.tensor  # noqa: F401 - what a merge imports is not its memory
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    import dapo_core.merge.run  # noqa: F401

    before, peak, is_done = resident_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_done.wait(0.002):
            peak = max(peak, resident_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    way(target)
    is_done.set()
    watcher.join()
    return max(peak - before, 0)


def _seconds(way: Callable[[Path], None], target: Path) -> tuple[float, float]:
    os.sync()  # or a way would wait for what the one before it left
    cpu_before, began = _cpu_seconds(), time.perf_counter()
    way(target)
    return time.perf_counter() - began, _cpu_seconds() - cpu_before


def _cpu_seconds() -> float:
    return sum(os.times()[:4])


def resident_bytes() -> int:
    """Memory of this process, mapped files included."""
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
class _Digests:
    """The least that digests cost: blake3 of every byte, on every core."""

    source: Path

    def __call__(self, target: Path) -> None:
        from dapo_core.digests import file_digest

        target.mkdir()
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            digests = list(pool.map(file_digest, sorted(self.source.glob("*.pt"))))
        (target / "digests").write_text("\n".join(digests))


@dataclass(frozen=True)
class _Merge:
    source: Path
    max_shard_bytes: int

    def __call__(self, target: Path) -> None:
        from dapo_core.merge.run import merge_checkpoint

        merge_checkpoint([self.source], target, max_shard_bytes=self.max_shard_bytes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=9, help="of the model (default: %(default)s, 2.3 GB)")
    parser.add_argument("--hidden", type=int, default=2048, help="its width (default: %(default)s)")
    parser.add_argument("--shards", type=int, default=4, help="ranks that wrote it (default: %(default)s)")
    parser.add_argument(
        "--max-shard-bytes", type=int, default=5_000_000_000, help="size of an output file (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="of each way (default: %(default)s)")
    parser.add_argument(
        "--folder", type=Path, help="on the disk to measure (default: the system's temporary folder)"
    )
    return parser


if __name__ == "__main__":
    main()
