"""Checkpoints that other trainers wrote: which are complete and how their weights are stored.

checkpoints/
    latest_checkpointed_iteration.txt   newest complete step; written last
    global_step_20/actor/               verl
        model_world_size_W_rank_R.pt    FSDP: one file per rank
        dist_ckpt/, model/dist_ckpt/    Megatron: torch.distributed.checkpoint with Megatron's names
        huggingface/, model/huggingface/  the model's files; with verl's bridge also its weights
    iter_0000020/                       MindSpeed: mp_rank_TT_PPP/model_optim_rng.pt of each rank
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
    """A checkpoint written by another trainer."""

    step: int
    path: Path  # the folder named after the step

    @property
    def actor(self) -> Path:
        """The policy's folder."""
        return self.path / "actor" if (self.path / "actor").is_dir() else self.path

    @property
    def form(self) -> Form:
        """The weight format; raises CheckpointError if it is unknown.

        shards: verl FSDP; model: a Hugging Face folder; distributed: Megatron; iteration:
        MindSpeed.
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
            f"{self.actor} has no weights in a known format: it contains {found}, but no "
            "model_world_size_W_rank_R.pt, safetensors or dist_ckpt; does the trainer save the "
            "model (verl: actor.checkpoint.save_contents)?"
        )

    @property
    def model_folder(self) -> Path | None:
        """The Hugging Face folder with weights, if the trainer wrote one."""
        places = (self.actor / name for name in MODEL_FOLDERS)
        return next((place for place in places if any(place.glob("*.safetensors"))), None)


def other_checkpoints(folder: Path) -> list[OtherCheckpoint]:
    """Return another trainer's complete checkpoints in a checkpoint folder, oldest first.

    Folders after the newest complete step are partial: the trainer was killed while writing them.
    """
    if (newest := _newest_step(folder / NEWEST_FILE)) is None:
        return []
    steps = {
        path: int(match[1])
        for path in folder.iterdir()
        if (match := _STEP_FOLDER.fullmatch(path.name))
    }
    found = [
        OtherCheckpoint(step, path)
        for path, step in steps.items()
        if step <= newest and path.is_dir()
    ]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def _newest_step(path: Path) -> int | None:
    """Return the step in the file, None if it is missing; raises CheckpointError for other text.

    Trainers truncate the file before writing it, so an empty one is read again.
    """
    for pause in (*PAUSES_SECONDS, 0.0):
        try:
            text = path.read_text(encoding="utf-8", errors="replace").strip()
        except (FileNotFoundError, NotADirectoryError):
            return None
        if text.isdecimal():
            return int(text)
        time.sleep(0.0 if text else pause)
    raise CheckpointError(
        f"{path} contains {text[:40]!r} instead of a step; write the newest complete step to it"
    )


def newest_other(folder: Path) -> OtherCheckpoint | None:
    """Return another trainer's newest complete checkpoint, if any."""
    found = other_checkpoints(folder)
    return found[-1] if found else None


def other_digest(resume: str) -> str | None:
    """Return a digest of the names, sizes and times of the files that checkpoint.resume names.

    None for auto and never. Raises CheckpointError if it is not another trainer's checkpoint.
    """
    if resume in ("auto", "never"):
        return None
    if checkpoint_at(Path(resume)) is None:
        raise CheckpointError(
            f"checkpoint.resume={resume} is not a checkpoint of another trainer; set it to a "
            "global_step_N folder"
        )
    digest = hashlib.sha256()
    for path in sorted(Path(resume).rglob("*")):
        stat = path.stat()
        digest.update(
            repr((str(path.relative_to(resume)), stat.st_size, stat.st_mtime_ns)).encode()
        )
    return digest.hexdigest()


def checkpoint_at(path: Path) -> OtherCheckpoint | None:
    """Return the checkpoint in a step folder or its `actor` folder; None for any other folder."""
    if path.name == "actor":
        path = path.parent
    match = _STEP_FOLDER.fullmatch(path.name)
    return OtherCheckpoint(int(match[1]), path) if match and path.is_dir() else None
