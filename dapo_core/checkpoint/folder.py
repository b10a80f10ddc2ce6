"""The checkpoints of a training: where they are, which are complete, which is the latest or the best.

    checkpoints/
        step_000020/                a checkpoint
            .metadata, *.distcp     parameters and optimizer (torch.distributed.checkpoint)
            checkpoint_manifest.json  digests of all files, the training and the step
            trainer_state.json      step, position in the data, metrics, identity
            carried_groups.json, carried_tokens.safetensors  groups carried to the next step
            config.yaml             the resolved configuration, for people
            huggingface/            config, tokenizer, generation config of the model
            tensor_names.json       names of the tensors in the model's files
        latest                      the name of the newest checkpoint, such as step_000020
        *.partial                   being written, or being removed
        *.damaged                   set aside when a training continued from an older one
        lock                        while a training runs

A checkpoint is complete once `latest` names it or a later one. A folder beyond `latest` was left by a kill between
the two renames; training continues from `latest` and writes that step again. Without `latest`, or when the folder
it names is gone, every folder `step_NNNNNN` counts.
"""

from __future__ import annotations

import logging
import math
import re
import secrets
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

from dapo_core.checkpoint.state import read_state_without_groups
from dapo_core.errors import CheckpointError
from durable import sync

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"  # in a training's output
PARTIAL = ".partial"
DAMAGED = ".damaged"
LATEST_FILE = "latest"
CONFIG_FILE = "config.yaml"
HUGGINGFACE_FOLDER = "huggingface"
NAMES_FILE = "tensor_names.json"
ACCURACY = "validation/accuracy"  # the metric that ranks checkpoints
_STEP_FOLDER = re.compile(r"step_(\d+)")


def step_folder(folder: Path, step: int) -> Path:
    """The path of a step's checkpoint, whether or not it exists."""
    return folder / f"step_{step:06d}"


def named_step(path: Path) -> int | None:
    """The step in the name of a checkpoint, None for another name."""
    match = _STEP_FOLDER.fullmatch(path.name)
    return int(match[1]) if match else None


def step_folders(folder: Path) -> list[Path]:
    """Every folder named like a checkpoint, by step."""
    steps = {path: named_step(path) for path in folder.glob("step_*") if path.is_dir()}
    return sorted((path for path, step in steps.items() if step is not None), key=lambda path: steps[path] or 0)


def checkpoint_folders(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first: all up to the one that `latest` names."""
    folders = step_folders(folder)
    try:
        named = folder / (folder / LATEST_FILE).read_text(encoding="utf-8", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return folders
    return folders[: folders.index(named) + 1] if named in folders else folders


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint."""
    folders = checkpoint_folders(folder)
    return folders[-1] if folders else None


def best_checkpoints(folder: Path, count: int = 1) -> list[Path]:
    """At most `count` complete checkpoints by validation/accuracy, the highest first; of equals the earliest."""
    accuracies = {
        path: accuracy for path in checkpoint_folders(folder) if (accuracy := _accuracy(path)) is not None
    }
    return sorted(accuracies, key=lambda path: -accuracies[path])[:count]


def accuracy_of(metrics: Mapping[str, float]) -> float | None:
    """The validation accuracy in a step's metrics, None when it was not measured."""
    accuracy = metrics.get(ACCURACY)
    return accuracy if accuracy is not None and math.isfinite(accuracy) else None


def refuse_links(folder: Path) -> None:
    """Raise CheckpointError for what is neither file nor folder: a link may lead outside, and a pipe blocks."""
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise CheckpointError(f"{path} is a symbolic link, which is not followed; copy the file itself")
        if not (path.is_file() or path.is_dir()):
            raise CheckpointError(f"{path} is neither a file nor a folder; remove it")


def partial_path(path: Path) -> Path:
    """A temporary name beside the path; unique, since a killed attempt's ranks may still write to its own."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")


def tidy(folder: Path, keep_last: int, keep_best: int, keep_steps: Collection[int] = ()) -> None:
    """Remove leftovers of killed attempts, and all checkpoints but the newest, the best and those to keep."""
    for leftover in folder.glob(f"*{PARTIAL}"):
        remove(leftover)
    kept = {*checkpoint_folders(folder)[-keep_last:], *best_checkpoints(folder, keep_best)}
    for path in step_folders(folder):
        if path not in kept and named_step(path) not in keep_steps:
            logger.info("checkpoint %s is removed", path.name)
            remove(path)


def remove(path: Path) -> None:
    """Remove a checkpoint or a leftover; what cannot be removed only takes room, and is tried again later."""
    try:
        if path.suffix != PARTIAL:  # half removed, it must not look complete
            path = path.rename(partial_path(path))
            sync(path.parent)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s could not be removed and takes room: %s", path, error)


def _accuracy(checkpoint: Path) -> float | None:
    try:
        return accuracy_of(read_state_without_groups(checkpoint).metrics)
    except CheckpointError as error:
        logger.warning("not counted among the best: %s", error)
        return None
