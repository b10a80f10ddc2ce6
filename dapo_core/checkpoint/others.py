"""Checkpoints of other trainers in a training's output: which are complete, and in what form their weights are.

checkpoints/
    latest_checkpointed_iteration.txt   the newest complete step, a number; written last
    global_step_20/actor/               verl
        model_world_size_W_rank_R.pt    FSDP: one file of each rank
        dist_ckpt/, model/dist_ckpt/    Megatron: torch.distributed.checkpoint with Megatron's names
        huggingface/, model/huggingface/  the model's files; with verl's bridge its weights too
    iter_0000020/                       MindSpeed: one file of each rank, mp_rank_TT_PPP/model_optim_rng.pt
"""

from __future__ import annotations

import hashlib
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dapo_core.errors import CheckpointError

Form = Literal["shards", "model", "distributed", "iteration"]

PAUSES_SECONDS = (0.01, 0.1, 1.0)
NEWEST_FILE = "latest_checkpointed_iteration.txt"
MODEL_FOLDERS = ("model/huggingface", "huggingface")
DISTRIBUTED_FOLDERS = ("model/dist_ckpt", "dist_ckpt")
_STEP_FOLDER = re.compile(r"(?:global_step_|iter_)(\d+)")


@dataclass(frozen=True)
class OtherCheckpoint:
    """A checkpoint that another trainer wrote."""

    step: int
    path: Path  # the folder named after the step

    @property
    def actor(self) -> Path:
        """The folder of the policy."""
        return self.path / "actor" if (self.path / "actor").is_dir() else self.path

    @property
    def form(self) -> Form:
        """How the weights are stored.

        shards: verl's FSDP; model: a Hugging Face folder; distributed: Megatron's; iteration: MindSpeed's.
        Raises CheckpointError when it is none of these.
        """
        if any(self.actor.glob("model_world_size_*_rank_*.pt")):
            return "shards"
        if self.model_folder is not None:
            return "model"
        if any((self.actor / name).is_dir() for name in DISTRIBUTED_FOLDERS):
            return "distributed"
        if self.path.name.startswith("iter_"):
            return "iteration"
        found = ", ".join(sorted(path.name for path in self.actor.iterdir())[:5]) or "nothing"
        raise CheckpointError(
            f"{self.actor} holds no weights that are known: neither model_world_size_W_rank_R.pt nor safetensors "
            f"nor dist_ckpt, but {found}; does the trainer save the model (verl: actor.checkpoint.save_contents)?"
        )

    @property
    def model_folder(self) -> Path | None:
        """The Hugging Face folder with weights that the trainer wrote, if it did."""
        places = (self.actor / name for name in MODEL_FOLDERS)
        return next((place for place in places if any(place.glob("*.safetensors"))), None)


def other_checkpoints(folder: Path) -> list[OtherCheckpoint]:
    """Complete checkpoints of another trainer in a training's folder of checkpoints, oldest first.

    Folders beyond the newest complete step were being written when the trainer was killed.
    """
    if (newest := _newest_step(folder / NEWEST_FILE)) is None:
        return []
    steps = {path: int(match[1]) for path in folder.iterdir() if (match := _STEP_FOLDER.fullmatch(path.name))}
    found = [OtherCheckpoint(step, path) for path, step in steps.items() if step <= newest and path.is_dir()]
    return sorted(found, key=lambda one: one.step)


def _newest_step(path: Path) -> int | None:
    """The step that the file names, None without a file; raises CheckpointError for anything else in it.

    Trainers truncate the file before they write it, so that an empty one is read again.
    """
    for pause in (*PAUSES_SECONDS, 0.0):
        try:
            text = path.read_text(encoding="utf-8", errors="replace").strip()
        except (FileNotFoundError, NotADirectoryError):
            return None
        if text.isdecimal():
            return int(text)
        time.sleep(0.0 if text else pause)
    raise CheckpointError(f"{path} holds {text[:40]!r} instead of a step; write the newest complete step into it")


def newest_other(folder: Path) -> OtherCheckpoint | None:
    """The newest complete checkpoint of another trainer; raises CheckpointError when it is gone."""
    found = other_checkpoints(folder)
    return found[-1] if found else None


def other_digest(resume: str) -> str | None:
    """Identifies another trainer's checkpoint that checkpoint.resume names by its files' names, sizes and times.

    None for auto and never. Raises CheckpointError for a folder that is none.
    """
    if resume in ("auto", "never"):
        return None
    if checkpoint_at(Path(resume)) is None:
        raise CheckpointError(
            f"checkpoint.resume={resume} is no checkpoint of another trainer; name its global_step_N"
        )
    digest = hashlib.sha256()
    for path in sorted(Path(resume).rglob("*")):
        stat = path.stat()
        digest.update(repr((str(path.relative_to(resume)), stat.st_size, stat.st_mtime_ns)).encode())
    return digest.hexdigest()


def checkpoint_at(path: Path) -> OtherCheckpoint | None:
    """The checkpoint that a folder named after a step, or `actor` in one, is; None for another folder."""
    if path.name == "actor":
        path = path.parent
    match = _STEP_FOLDER.fullmatch(path.name)
    return OtherCheckpoint(int(match[1]), path) if match and path.is_dir() else None
