"""Measures `dapo merge` against `cp` of the same bytes, on a warm cache, and prints one table.

verl's merger joins the table where verl is installed. Each measurement runs in a process of its own; peak memory
is what that process held beyond mapped files.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

EXAMPLE = """example, a checkpoint of 0.5 GB on the disk that matters:
  .venv/bin/python bench/merge.py --layers 4 --folder /data/scratch
"""
MIB = 1024**2


@dataclass(frozen=True)
class Measurement:
    """Medians over the rounds."""

    name: str
    seconds: float
    peak_bytes: int  # anonymous memory, beyond what the imports took
    shard_bytes: int  # largest file written


def main() -> None:
    """Write the checkpoints, measure each way of merging, print the table."""
    arguments = _parser().parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        model = write_model_files(Path(folder) / "model", arguments.layers, arguments.hidden)
        verl, ours = write_checkpoints(Path(folder), model, arguments.shards)
        num_bytes = sum(path.stat().st_size for path in verl.glob("*.pt"))
        rounds = arguments.rounds
        ways: list[tuple[str, Callable[[Path], None]]] = [
            ("cp", _Copy(verl)),
            ("cp, then fsync", _Copy(verl, is_synced=True)),
            ("ours, of verl's folder", _Merge(verl, arguments.max_shard_bytes)),
            ("ours, of our checkpoint", _Merge(ours, arguments.max_shard_bytes)),
        ]
        if importlib.util.find_spec("verl") is not None:
            ways.append(("verl's", _VerlMerge(verl)))
        measurements = [measure(name, way, Path(folder) / "target", rounds) for name, way in ways]
    print(
        f"{num_bytes / 1e9:.2f} GB in {arguments.shards} shards, float32, warm cache; medians of {rounds} rounds"
    )
    print(table(measurements))
    if len(ways) == 4:
        print("verl is not installed here, so its merger was not measured")


def table(measurements: list[Measurement]) -> str:
    """The figures as text; the ratios are of seconds, over cp without and with fsync."""
    first, synced = measurements[0].seconds, measurements[1].seconds
    lines = [f"{'':24} {'seconds':>8} {'/ cp':>6} {'/ cp+fsync':>11} {'peak MiB':>9} {'file MiB':>9}"]
    lines += [
        f"{row.name:24} {row.seconds:8.2f} {row.seconds / first:6.2f} {row.seconds / synced:11.2f} "
        f"{row.peak_bytes / MIB:9.0f} {row.shard_bytes / MIB:9.0f}"
        for row in measurements
    ]
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
    """The same random weights as a folder of verl and as a checkpoint of ours."""
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
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # it is meant to be
        dcp.save({"model": whole}, checkpoint_id=ours, no_dist=True)
    (ours / "tensor_names.json").write_text(json.dumps(list(names)))
    (ours / "trainer_state.json").write_text("{}")
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


def measure(name: str, way: Callable[[Path], None], target: Path, num_rounds: int) -> Measurement:
    """Run the way several times, each in a fresh process that has made its imports."""
    seconds, peaks, largest = [], [], 0
    for _ in range(num_rounds):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            spent, peak = pool.submit(_measure_once, way, target).result()
        seconds.append(spent)
        peaks.append(peak)
        largest = max(path.stat().st_size for path in target.iterdir())
        shutil.rmtree(target)
    return Measurement(name, statistics.median(seconds), max(peaks), largest)


def _measure_once(way: Callable[[Path], None], target: Path) -> tuple[float, int]:
    import torch.distributed.tensor  # noqa: F401 - what a merge imports is not its time
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    import dapo_core.merge.dcp
    import dapo_core.merge.verl  # noqa: F401

    before, peak, is_done = anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_done.wait(0.002):
            peak = max(peak, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    way(target)
    spent = time.perf_counter() - began
    is_done.set()
    watcher.join()
    return spent, max(peak - before, 0)


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
class _Merge:
    source: Path
    max_shard_bytes: int

    def __call__(self, target: Path) -> None:
        from dapo_core.merge import merge_checkpoint

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
    parser.add_argument("--rounds", type=int, default=3, help="of each way (default: %(default)s)")
    parser.add_argument(
        "--folder", type=Path, help="on the disk to measure (default: the system's temporary folder)"
    )
    return parser


if __name__ == "__main__":
    main()
