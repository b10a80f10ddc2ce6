"""Layout of a checkpoint folder: which checkpoints are complete, the latest and the best.

    checkpoints/
        step_000020/                a checkpoint
            .metadata, *.distcp     parameters and optimizer (torch.distributed.checkpoint)
            checkpoint_manifest.json  digests of all files, training id and step
            trainer_state.json      step, data position, metrics, identity
            carried_groups.json, carried_tokens.safetensors  groups carried over to the next step
            config.yaml             the resolved configuration, for people
            huggingface/            the model's config, tokenizer and generation config
            tensor_names.json       tensor names in the model's files
            adapter_config.json     under train.lora: the adapter and its base model, as in peft
        latest                      name of the newest checkpoint, such as step_000020
        *.partial                   being written or removed
        *.damaged                   set aside when training continued from an older checkpoint
        lock                        held while a training runs

A checkpoint is complete once `latest` names it or a later one. A folder newer than `latest` was
left by a kill between the two renames; training continues from `latest` and writes that step again.
If `latest` is missing or names a missing folder, every `step_NNNNNN` folder counts.
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

CHECKPOINTS = "checkpoints"  # folder in a training output
PARTIAL = ".partial"
DAMAGED = ".damaged"
LATEST_FILE = "latest"
CONFIG_FILE = "config.yaml"
HUGGINGFACE_FOLDER = "huggingface"
NAMES_FILE = "tensor_names.json"
ACCURACY = "validation/accuracy"  # the metric that ranks checkpoints
_STEP_FOLDER = re.compile(r"step_(\d+)")


def step_folder(folder: Path, step: int) -> Path:
    """Return the path of a step's checkpoint, whether or not it exists."""
    return folder / f"step_{step:06d}"


def named_step(path: Path) -> int | None:
    """Return the step in a checkpoint's name, or None if it is not a checkpoint name."""
    match = _STEP_FOLDER.fullmatch(path.name)
    return int(match[1]) if match else None


def step_folders(folder: Path) -> list[Path]:
    """Return all folders named like a checkpoint, ordered by step."""
    steps = {path: named_step(path) for path in folder.glob("step_*") if path.is_dir()}
    found = [(step, path) for path, step in steps.items() if step is not None]
    return [path for _, path in sorted(found)]


def checkpoint_folders(folder: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first: all up to the one that `latest` names."""
    folders = step_folders(folder)
    try:
        name = (folder / LATEST_FILE).read_text(encoding="utf-8", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return folders
    named = folder / name
    return folders[: folders.index(named) + 1] if named in folders else folders


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint, if any."""
    folders = checkpoint_folders(folder)
    return folders[-1] if folders else None


def best_checkpoints(folder: Path, count: int = 1) -> list[Path]:
    """Return up to `count` complete checkpoints, highest accuracy first; ties: earliest first."""
    accuracies = {
        path: accuracy
        for path in checkpoint_folders(folder)
        if (accuracy := _accuracy(path)) is not None
    }
    return sorted(accuracies, key=lambda path: -accuracies[path])[:count]


def accuracy_of(metrics: Mapping[str, float]) -> float | None:
    """Return the validation accuracy in a step's metrics, or None if it was not measured."""
    accuracy = metrics.get(ACCURACY)
    return accuracy if accuracy is not None and math.isfinite(accuracy) else None


def refuse_links(folder: Path) -> None:
    """Raise CheckpointError for links, which may point outside, and for pipes, which block."""
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise CheckpointError(
                f"{path} is a symbolic link, which is not followed; copy the target file instead"
            )
        if not (path.is_file() or path.is_dir()):
            raise CheckpointError(f"{path} is neither a file nor a folder; remove it")


def partial_path(path: Path) -> Path:
    """Return a unique temporary path beside `path`: ranks of a killed attempt may still write."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")


def tidy(folder: Path, keep_last: int, keep_best: int, keep_steps: Collection[int] = ()) -> None:
    """Remove leftovers and all checkpoints but the newest, the best and `keep_steps`."""
    for leftover in folder.glob(f"*{PARTIAL}"):
        remove(leftover)
    complete = checkpoint_folders(folder)
    kept = {*complete[-keep_last:], *best_checkpoints(folder, keep_best)}
    kept |= {path for path in complete if named_step(path) in keep_steps}
    for path in step_folders(folder):
        if path not in kept:
            logger.info("removing checkpoint %s", path.name)
            remove(path)


def remove(path: Path) -> None:
    """Remove a checkpoint or leftover; a failure is logged, since the next `tidy` tries again."""
    try:
        if path.suffix != PARTIAL:  # a half-removed checkpoint must not look complete
            path = path.rename(partial_path(path))
            sync(path.parent)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("could not remove %s, which still uses disk space: %s", path, error)


def _accuracy(checkpoint: Path) -> float | None:
    try:
        return accuracy_of(read_state_without_groups(checkpoint).metrics)
    except CheckpointError as error:
        logger.warning("ignored when choosing the best checkpoint: %s", error)
        return None
