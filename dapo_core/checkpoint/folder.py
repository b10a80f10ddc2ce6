"""Checkpoints: sharded weights and optimizer, the trainer's state, and what a merge needs, published atomically.

A checkpoint is a folder `step_000020` with
    .metadata, *.distcp     parameters and optimizer (torch.distributed.checkpoint)
    trainer_state.json      step, position in the data, groups carried to the next step
    huggingface/            config, tokenizer, generation config of the model
    tensor_names.json       what the tensors in the model's files are called
It is written as `step_000020.partial` and renamed when all of it is on disk, so a folder without that suffix is
complete.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from dapo_core.checkpoint.state import STATE_FILE, TrainerState
from dapo_core.model_folder import MERGE_MANIFEST, weight_names

PARTIAL = ".partial"
HUGGINGFACE_FOLDER = "huggingface"
NAMES_FILE = "tensor_names.json"
MANIFESTS = ("manifest.json", MERGE_MANIFEST)  # of the folder a model came in, not of the checkpoint
WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf"})
_COMPLETE = re.compile(r"step_(\d+)")


def checkpoint_folders(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    matches = [(path, _COMPLETE.fullmatch(path.name)) for path in folder.glob("step_*") if path.is_dir()]
    steps = {path: int(match[1]) for path, match in matches if match}
    return sorted(steps, key=lambda path: steps[path])


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint."""
    folders = checkpoint_folders(folder)
    return folders[-1] if folders else None


def best_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint of the highest validation/accuracy, of equal ones the earliest."""
    accuracies = {}
    for path in checkpoint_folders(folder):
        metrics = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))["metrics"]
        if "validation/accuracy" in metrics:
            accuracies[path] = metrics["validation/accuracy"]
    return max(accuracies, key=lambda path: accuracies[path]) if accuracies else None


def write_checkpoint(
    folder: Path, state: TrainerState, model_path: Path, save: Callable[[str], None], keep_last: int
) -> Path:
    """Publish a checkpoint of `state`; `save` writes the shards into the path it is given.

    The new checkpoint is complete before older ones, beyond `keep_last`, are removed. Leftovers of writers that
    were killed are removed as well.
    """
    target = folder / f"step_{state.step:06d}"
    for leftover in folder.glob(f"step_*{PARTIAL}"):
        shutil.rmtree(leftover)
    partial = target.with_name(target.name + PARTIAL)
    partial.mkdir(parents=True)
    save(str(partial))
    copy_model_files(model_path, partial / HUGGINGFACE_FOLDER)
    (partial / NAMES_FILE).write_text(json.dumps(sorted(weight_names(model_path))), encoding="utf-8")
    (partial / STATE_FILE).write_text(json.dumps(dataclasses.asdict(state)), encoding="utf-8")
    _fsync_tree(partial)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    _fsync(folder)
    for old in checkpoint_folders(folder)[:-keep_last]:
        shutil.rmtree(old.rename(old.with_name(old.name + PARTIAL)))  # half removed, it must not look complete
    return target


def copy_model_files(source: Path, target: Path) -> None:
    """Copy everything of a model folder except weights: config, tokenizer, chat template, generation config."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        is_weight = path.suffix in WEIGHT_SUFFIXES or path.name.endswith(".index.json")
        if path.is_file() and not is_weight and path.name not in MANIFESTS:
            shutil.copy2(path, target / path.name)


def _fsync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        _fsync(path)
    _fsync(folder)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
