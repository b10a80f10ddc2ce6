"""Measures `dapo merge` against `cp` of the same bytes, on a warm cache, and prints one table.

verl's merger joins the table where verl is installed. The ways take turns, so that a slow minute of a shared
machine slows them all, and each measurement has a process of its own, in which the way runs twice. The first run
gives the peak memory beyond mapped files. The second is timed: nothing watches it, its imports are done, and a
virtual machine has the memory back that its host took.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import mmap
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

EXAMPLE = """example, a checkpoint of 0.5 GB on the disk that matters:
  .venv/bin/python bench/merge.py --layers 4 --folder /data/scratch
"""
MIB = 1024**2


@dataclass(frozen=True)
class Measurement:
    """One way in one round."""

    seconds: float
    cpu_seconds: float  # of the process and what it started, in user and kernel mode
    peak_bytes: int  # anonymous memory, beyond what the imports took
    file_bytes: int  # largest file written


def main() -> None:
    """Write the checkpoints, measure each way of merging, print the table."""
    arguments = _parser().parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        model = write_model_files(Path(folder) / "model", arguments.layers, arguments.hidden)
        verl, ours = write_checkpoints(Path(folder), model, arguments.shards)
        num_bytes = sum(path.stat().st_size for path in verl.glob("*.pt"))
        ways: list[tuple[str, Callable[[Path], None]]] = [
            ("cp", _Copy(verl)),
            ("cp, then fsync", _Copy(verl, is_synced=True)),
            ("sha256 twice", _Digests(verl)),
            ("dapo merge, verl's", _Merge(verl, arguments.max_shard_bytes)),
            ("dapo merge, dapo's", _Merge(ours, arguments.max_shard_bytes)),
        ]
        if importlib.util.find_spec("verl") is not None:
            ways.append(("verl's merger", _VerlMerge(verl)))
        rounds: dict[str, list[Measurement]] = {name: [] for name, _ in ways}
        for _ in range(arguments.rounds):
            for name, way in ways:
                rounds[name].append(measure(way, Path(folder) / "target"))
    print(
        f"{num_bytes / 1e9:.2f} GB in {arguments.shards} shards, float32, warm cache, "
        f"{len(os.sched_getaffinity(0))} cores; medians of {arguments.rounds} rounds"
    )
    print(table(rounds))
    if len(ways) == 5:
        print("verl is not installed here, so its merger was not measured")


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


def write_model_files(folder: Path, num_layers: int, hidden_size: int) -> Path:
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
        tie_word_embeddings=False,
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

    from dapo_core.merge.verification import empty_model

    names = {name: parameter.shape for name, parameter in empty_model(model_files).named_parameters()}
    generator = torch.Generator().manual_seed(0)
    whole = {name: torch.randn(shape, generator=generator) for name, shape in names.items()}
    verl, ours = folder / "global_step_1" / "actor", folder / "step_000001"
    for place in (verl, ours):
        shutil.copytree(model_files, place / "huggingface")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as intended
        dcp.save({"model": whole}, checkpoint_id=ours, no_dist=True)
    (ours / "tensor_names.json").write_text(json.dumps(list(names)))
    (ours / "trainer_state.json").write_text(json.dumps({"step": 1, "metrics": {}}))
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

    before, peak, is_done = anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_done.wait(0.002):
            peak = max(peak, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    way(target)
    is_done.set()
    watcher.join()
    return max(peak - before, 0)


def _seconds(way: Callable[[Path], None], target: Path) -> tuple[float, float]:
    cpu_before, began = _cpu_seconds(), time.perf_counter()
    way(target)
    return time.perf_counter() - began, _cpu_seconds() - cpu_before


def _cpu_seconds() -> float:
    return sum(os.times()[:4])


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


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
    """The least that a merge costs: two digests of every byte, on every core."""

    source: Path

    def __call__(self, target: Path) -> None:
        target.mkdir()
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            digests = list(pool.map(_digest, 2 * sorted(self.source.glob("*.pt"))))
        (target / "digests").write_text("\n".join(digests))


def _digest(path: Path) -> str:
    with path.open("rb", buffering=0) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True)
class _Merge:
    source: Path
    max_shard_bytes: int

    def __call__(self, target: Path) -> None:
        from dapo_core.merge.run import merge_checkpoint

        merge_checkpoint([self.source], target, max_shard_bytes=self.max_shard_bytes)


@dataclass(frozen=True)
class _VerlMerge:
    source: Path

    def __call__(self, target: Path) -> None:
        command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
        subprocess.run(
            [*command, "--local_dir", str(self.source), "--target_dir", str(target)],
            check=True,
            capture_output=True,
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12, help="of the model (default: %(default)s, 0.87 GB)")
    parser.add_argument("--hidden", type=int, default=1024, help="its width (default: %(default)s)")
    parser.add_argument("--shards", type=int, default=4, help="ranks that wrote it (default: %(default)s)")
    parser.add_argument(
        "--max-shard-bytes", type=int, default=256 * MIB, help="size of an output file (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="of each way (default: %(default)s)")
    parser.add_argument(
        "--folder", type=Path, help="on the disk to measure (default: the system's temporary folder)"
    )
    return parser


if __name__ == "__main__":
    main()
