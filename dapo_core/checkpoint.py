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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_core.data import Prompt
from dapo_core.engines import Response
from dapo_core.errors import CheckpointError
from dapo_core.model_folder import MERGE_MANIFEST, weight_names
from dapo_core.rollout import Group, GroupRequest, Rollout

if TYPE_CHECKING:
    import torch
    from torch import nn

PARTIAL = ".partial"
STATE_FILE = "trainer_state.json"
HUGGINGFACE_FOLDER = "huggingface"
NAMES_FILE = "tensor_names.json"
MANIFESTS = ("manifest.json", MERGE_MANIFEST)  # of the folder a model came in, not of the checkpoint
WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf"})
_COMPLETE = re.compile(r"step_(\d+)")


@dataclass(frozen=True)
class TrainerState:
    """What the trainer needs beside the shards to continue where it stopped."""

    step: int  # training steps done
    policy_version: int
    prompt_position: int  # prompts taken from the stream
    surplus: list[tuple[int, Group]]  # (step that sampled its oldest token, group)
    unfinished: list[tuple[int, GroupRequest]]  # likewise, of groups to be continued
    kl_coefficient: float  # of KL in the reward
    metrics: dict[str, float]  # of the step, in case the process ends before metrics.jsonl has them
    identity: dict[str, Any]  # settings and data that every attempt at the training must share


def checkpoint_folders(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    matches = [(path, _COMPLETE.fullmatch(path.name)) for path in folder.glob("step_*") if path.is_dir()]
    steps = {path: int(match[1]) for path, match in matches if match}
    return sorted(steps, key=lambda path: steps[path])


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint."""
    folders = checkpoint_folders(folder)
    return folders[-1] if folders else None


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


def read_state(checkpoint: Path) -> TrainerState:
    """The trainer's state of a checkpoint; raises CheckpointError when it cannot be read."""
    try:
        values = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
        surplus = [(born, _group(group)) for born, group in values.pop("surplus")]
        unfinished = [(born, _group_request(request)) for born, request in values.pop("unfinished")]
        return TrainerState(surplus=surplus, unfinished=unfinished, **values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{checkpoint / STATE_FILE} cannot be read ({error!r}); remove the folder {checkpoint.name} "
            "to continue from the checkpoint before it"
        ) from error


def refuse_other_training(checkpoint: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise CheckpointError, naming what differs, when a checkpoint comes from other settings or other data."""
    changed = [
        f"{name} {before.get(name)!r} -> {now.get(name)!r}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]
    if changed:
        raise CheckpointError(
            f"{checkpoint} belongs to another training ({', '.join(changed)}); continuing would mix the two: "
            "name a new --output, or set these back"
        )


def _group(values: dict[str, Any]) -> Group:
    rollouts = [Rollout(**rollout) for rollout in values["rollouts"]]
    return Group(**{**values, "prompt": _prompt(values["prompt"]), "rollouts": rollouts})


def _group_request(values: dict[str, Any]) -> GroupRequest:
    responses = [Response(**response) for response in values["responses"]]
    return GroupRequest(**{**values, "prompt": _prompt(values["prompt"]), "responses": responses})


def _prompt(values: dict[str, Any]) -> Prompt:
    return Prompt(**{**values, "prompt_ids": tuple(values["prompt_ids"])})


def copy_model_files(source: Path, target: Path) -> None:
    """Copy everything of a model folder except weights: config, tokenizer, chat template, generation config."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        is_weight = path.suffix in WEIGHT_SUFFIXES or path.name.endswith(".index.json")
        if path.is_file() and not is_weight and path.name not in MANIFESTS:
            shutil.copy2(path, target / path.name)


def save_shards(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer, num_optimizer_steps: int) -> None:
    """Write this rank's part of parameters and optimizer. Collective."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(model, optimizer)
    dcp.save(
        {"model": weights, "optimizer": moments, "num_optimizer_steps": num_optimizer_steps}, checkpoint_id=folder
    )


def load_shards(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load parameters and optimizer in place, resharded to this number of ranks; returns the optimizer steps.

    Collective. Raises CheckpointError when the shards do not fit the model.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": moments, "num_optimizer_steps": 0}
    try:
        dcp.load(state, checkpoint_id=folder)
    except (CheckpointException, RuntimeError, ValueError, OSError) as error:
        raise CheckpointError(f"the shards in {folder} cannot be loaded: {error}") from error
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return int(state["num_optimizer_steps"])


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
