"""Checkpoints for tests: a state with awkward values, and shards without tensors."""

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import Metadata

from dapo_core.checkpoint import resume
from dapo_core.checkpoint.folder import HUGGINGFACE_FOLDER, NAMES_FILE
from dapo_core.checkpoint.manifest import (
    MANIFEST_FILE,
    require_complete,
    require_files,
    verify_shards,
    write_shards,
)
from dapo_core.checkpoint.metadata import METADATA_FILE
from dapo_core.checkpoint.state import TrainerState, read_state, state_files
from dapo_core.checkpoint.writer import CheckpointWriter
from dapo_core.draw.groups import GroupRequest
from dapo_core.draw.prompts import Prompt
from dapo_core.engines.base import Response
from dapo_core.machine.digests import content_part
from dapo_core.machine.timers import PhaseTimer
from dapo_core.model.inputs import ModelInput
from tests.batches import make_group
from tests.configs import make_config
from tests.plain import plain

NO_TENSORS = pickle.dumps(Metadata({}, storage_data={}))
MODEL_FILES = ("additional_chat_templates/tool.jinja", "config.json", "tokenizer.json")


def flip(name: str, offset: int = -1) -> Callable[[Path], None]:
    """Return a function that flips a bit at the offset of a checkpoint's file."""

    def damage(checkpoint: Path) -> None:
        content = bytearray((checkpoint / name).read_bytes())
        content[offset] ^= 1
        (checkpoint / name).write_bytes(content)

    return damage


def replace_file(checkpoint: Path, name: str, content: bytes) -> None:
    """Replace a file's content, and its digest in the manifest."""
    (checkpoint / name).write_bytes(content)
    manifest = json.loads((checkpoint / MANIFEST_FILE).read_text(encoding="utf-8"))
    manifest["files"][name] = [content_part(content)]
    (checkpoint / MANIFEST_FILE).write_text(json.dumps(manifest), encoding="utf-8")


def make_state(step: int, accuracy: float | None = None) -> TrainerState:
    """Make a state after `step` with every kind of group and floats that need all digits."""
    groups = [make_group([1.0, -1.0], index, [3, 0], policy_version=index) for index in (4, 9)]
    awkward = [
        replace(
            groups[0].rollouts[0],
            rollout_log_probs=np.array([-0.1, -1 / 3, -1e-45], np.float32),
            overlong_penalty=-0.3,
        )
    ]
    prompt = Prompt(7, ModelInput((3, 4)), "arithmetic", "1", {"level": 3, "answers": [1.5, None]})
    ids = np.array([5, 6], np.int32)
    routing = np.arange(24, dtype=np.uint8).reshape(4, 3, 2)
    responses = [
        Response("12/0", ids, np.array([-0.1, -1 / 3], np.float32), "stop", routing),
        Response("12/1", ids[:1], np.array([-2.5], np.float32), "abort"),
    ]
    validated = {} if accuracy is None else {"validation/accuracy": accuracy}
    return TrainerState(
        step=step,
        policy_version=step * 16,
        prompt_position=123,
        surplus=[replace(groups[0], rollouts=awkward), groups[1]],
        unfinished=[
            GroupRequest(12, prompt, step - 1, responses, [[(8, 1), (9, 1)], [(9, 1)]]),
            GroupRequest(13, replace(prompt, index=8), step),
        ],
        kl_coefficient=0.001,
        metrics={"critic/score/mean": -1 / 3, **validated},
        identity={"run.seed": 3, "train.learning_rate": 1e-6},
        visits=[[7, 2, 1], [4, 0, 3]],
    )


def write_state(folder: Path, state: TrainerState) -> Path:
    """Write a checkpoint of the state, without shards."""
    checkpoint = folder / f"step_{state.step:06d}"
    checkpoint.mkdir(parents=True)
    for name, content in state_files(state).items():
        (checkpoint / name).write_bytes(content)
    return checkpoint


class FileShards:
    """A policy group of two files; a background save writes the second one at the second poll."""

    num_bytes = 42  # of both files

    def verify(self, checkpoint: Path) -> None:
        """Finds no damage."""

    def __init__(self) -> None:
        self.late: list[Path] = []

    def save(self, folder: str, asynchronous: bool) -> None:
        first, second = (Path(folder) / f"__{rank}_0.distcp" for rank in range(2))
        first.write_text(_shard_text(Path(folder)), encoding="utf-8")
        self.late = [second, second]
        while self.late and not asynchronous:
            self.is_saved()

    def is_saved(self) -> bool:
        if len(self.late) == 1:
            folder = self.late[0].parent
            self.late[0].write_text(_shard_text(folder), encoding="utf-8")
            (folder / METADATA_FILE).write_bytes(NO_TENSORS)
            part = content_part(_shard_text(folder).encode())
            parts = {f"__{rank}_0.distcp": [part] for rank in range(2)}
            write_shards(folder, {**parts, METADATA_FILE: [content_part(NO_TENSORS)]})
        self.late = self.late[1:]
        return not self.late

    def checkpoint_bytes(self) -> int:
        return self.num_bytes

    def refresh_reference(self, step: int, timer: PhaseTimer) -> None:
        """Do nothing: there is no reference model."""


def _shard_text(folder: Path) -> str:
    return f"shard of {folder.name.partition('.')[0]}\n"  # 21 bytes: 9 + 11 of the name + 1


class ShardsOf:
    """A policy group that saves by calling a function with the folder."""

    def __init__(self, save: Callable[[str], None]) -> None:
        self._save = save

    def save(self, folder: str, asynchronous: bool) -> None:
        self._save(folder)

    def is_saved(self) -> bool:
        return True

    def checkpoint_bytes(self) -> int:
        return 0


class Harmful:
    """A pickle that would create a file when loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return open, ("harmed", "w")


def make_model_folder(folder: Path) -> Path:
    """Make a model folder in which only file and tensor names are realistic."""
    (folder / "additional_chat_templates").mkdir(parents=True)
    weights = ("pytorch_model.bin", "tf_model.h5", "x.gguf")
    for name in (*MODEL_FILES, *weights, "manifest.json"):
        (folder / name).write_text(name, encoding="utf-8")
    tensors = {name: torch.zeros(1) for name in ("model.norm.weight", "lm_head.weight")}
    save_file(tensors, folder / "model.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def make_writer(
    folder: Path, model_path: Path, shards: FileShards | None = None, **settings: object
) -> CheckpointWriter:
    """Make a writer with these keys of the checkpoint section."""
    config = make_config(model_path, checkpoint=settings, validation={"every": 5})
    return CheckpointWriter(folder, model_path, shards or FileShards(), config)


def write(writer: CheckpointWriter, *states: TrainerState) -> None:
    """Publish a checkpoint of each state."""
    for state in states:
        writer.begin(state)
        writer.poll()  # the first of two polls, so that `finish` need not wait
        writer.finish()


def end(writer: CheckpointWriter) -> None:
    """Tidy up after the last step."""
    with writer.ending():
        pass


def verify(checkpoint: Path) -> None:
    """Verify every file, as the ranks do together."""
    require_complete(checkpoint)
    for share in (0, 1):
        verify_shards(checkpoint, share, 2)


def find_start(folder: Path, source: str, on_damage: resume.OnDamage = "previous") -> Path | None:
    """Return the checkpoint to continue from, of which every file is verified."""
    return resume.find_start(folder, source, on_damage, verify)


def assert_complete(checkpoint: Path, state: TrainerState) -> None:
    """Assert that every part of the checkpoint exists and belongs to that state."""
    assert checkpoint.name == f"step_{state.step:06d}"
    assert plain(read_state(checkpoint)) == plain(state)
    require_files(checkpoint)
    shards = [path.read_text(encoding="utf-8") for path in checkpoint.glob("*.distcp")]
    assert shards == [f"shard of {checkpoint.name}\n"] * 2
    assert json.loads((checkpoint / NAMES_FILE).read_text()) == [
        "lm_head.weight",
        "model.norm.weight",
    ]
    assert files_below(checkpoint / HUGGINGFACE_FOLDER) == list(MODEL_FILES)


def files_below(folder: Path) -> list[str]:
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
