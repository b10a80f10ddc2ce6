"""What lies where: the checkpoints of a training, which of them count, and which is the latest or the best.

    checkpoints/
        step_000020/                a checkpoint
            .metadata, *.distcp     parameters and optimizer (torch.distributed.checkpoint)
            trainer_state.json      step, position in the data, metrics, identity
            carried_groups.json     groups carried to the next step
            config.yaml             the resolved configuration, for people
            huggingface/            config, tokenizer, generation config of the model
            tensor_names.json       what the tensors in the model's files are called
        latest                      the name of the newest checkpoint, such as step_000020
        *.partial                   being written, or being removed
        lock                        while a training runs

A checkpoint counts once `latest` has named it: a newer folder is one whose writer was killed between the two
renames, and the training that goes on from the one before it writes that step anew. Without `latest`, or when it
names a folder that is not there any more, every folder `step_NNNNNN` counts.
"""

from __future__ import annotations

import logging
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from dapo_core.checkpoint.state import read_step_metrics
from dapo_core.errors import CheckpointError
from dapo_core.model_folder import MERGE_MANIFEST

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"  # in a training's output
PARTIAL = ".partial"
LATEST_FILE = "latest"
CONFIG_FILE = "config.yaml"
HUGGINGFACE_FOLDER = "huggingface"
NAMES_FILE = "tensor_names.json"
ACCURACY = "validation/accuracy"  # the metric by which checkpoints are better or worse
MANIFESTS = ("manifest.json", MERGE_MANIFEST)  # of the folder a model came in, not of the checkpoint
WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf"})
_STEP_FOLDER = re.compile(r"step_(\d+)")


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of that step is, or would be."""
    return folder / f"step_{step:06d}"


def step_folders(folder: Path) -> list[Path]:
    """Every folder named as a checkpoint is, by step."""
    matches = [(path, _STEP_FOLDER.fullmatch(path.name)) for path in folder.glob("step_*") if path.is_dir()]
    steps = {path: int(match[1]) for path, match in matches if match}
    return sorted(steps, key=lambda path: steps[path])


def checkpoint_folders(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first: all up to the one that `latest` names."""
    folders = step_folders(folder)
    try:
        named = folder / (folder / LATEST_FILE).read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return folders
    return folders[: folders.index(named) + 1] if named in folders else folders


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint."""
    folders = checkpoint_folders(folder)
    return folders[-1] if folders else None


def best_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint of the highest validation/accuracy, of equals the earliest; None without any."""
    best = best_checkpoints(folder, 1)
    return best[0] if best else None


def best_checkpoints(folder: Path, count: int) -> list[Path]:
    """At most `count` complete checkpoints of the highest validation/accuracy, the best first."""
    accuracies = {path: accuracy for path, accuracy in _accuracies(folder).items() if accuracy is not None}
    return sorted(accuracies, key=lambda path: -accuracies[path])[:count]  # stable: of equals the earlier first


def accuracy_of(metrics: Mapping[str, float]) -> float | None:
    """The accuracy that a step's metrics hold, if any."""
    accuracy = metrics.get(ACCURACY)
    return accuracy if accuracy is not None and math.isfinite(accuracy) else None


def copy_model_files(source: Path, target: Path) -> None:
    """Copy everything of a model folder except weights: config, tokenizer, chat template, generation config."""
    target.mkdir(parents=True, exist_ok=True)
    for path in model_files(source):
        shutil.copy2(path, target / path.name)


def model_files(source: Path) -> list[Path]:
    """The files of a model folder that are not weights."""
    return [
        path
        for path in sorted(source.iterdir())
        if path.is_file()
        and path.suffix not in WEIGHT_SUFFIXES
        and not path.name.endswith(".index.json")
        and path.name not in MANIFESTS
    ]


def _accuracies(folder: Path) -> dict[Path, float | None]:
    """By complete checkpoint; one whose metrics cannot be read has none."""
    accuracies: dict[Path, float | None] = {}
    for path in checkpoint_folders(folder):
        try:
            accuracies[path] = accuracy_of(read_step_metrics(path))
        except CheckpointError as error:
            logger.warning("not counted among the best: %s", error)
            accuracies[path] = None
    return accuracies
