"""Finds the weights in another trainer's output: verl's shards, or a Hugging Face folder.

OUTPUT/
    latest_checkpointed_iteration.txt    verl, MindSpeed: newest complete step; written last
    global_step_20/actor/                verl
        model_world_size_W_rank_R.pt     FSDP: one file per rank
        huggingface/, model/huggingface/ the model's files; with verl's bridge also its weights
        dist_ckpt/, model/dist_ckpt/     Megatron
    iter_0000020/                        MindSpeed: mp_rank_TT_PPP/model_optim_rng.pt of each rank
    checkpoint-20/                       TRL: a Hugging Face folder; trainer_state.json is last
"""

from __future__ import annotations

import re
from pathlib import Path

from dapo_core.errors import CheckpointError

NEWEST_FILE, COMPLETE_FILE = "latest_checkpointed_iteration.txt", "trainer_state.json"
_STEP_FOLDER = re.compile(r"(?:global_step_|iter_|checkpoint-)(\d+)")
_VERL = (
    "verl",
    "python -m verl.model_merger merge --backend megatron --local_dir {folder} --target_dir MODEL",
)
_MINDSPEED = ("MindSpeed", "its convert_ckpt.py (MindSpeed-RL) or mm-convert (MindSpeed-MM)")
_OF_MEGATRON = {"dist_ckpt": _VERL, "model/dist_ckpt": _VERL, "mp_rank_*": _MINDSPEED}


def weights_in(folder: Path) -> Path:
    """Return the folder with shards or a model in another trainer's output or checkpoint.

    In an output, that is the newest complete checkpoint. Any other folder is returned unchanged.
    Raises CheckpointError for Megatron's weights, which only their trainer can convert.
    """
    if _is_model(folder):
        return folder
    step = _newest_step(folder) or folder
    actor = step / "actor" if (step / "actor").is_dir() else step
    if any(actor.glob("model_world_size_*_rank_*.pt")):
        return actor
    for place in (actor / "model/huggingface", actor / "huggingface", actor):
        if _is_model(place):
            return place
    for pattern, (trainer, converter) in _OF_MEGATRON.items():
        if any(actor.glob(pattern)):
            command = converter.format(folder=actor)
            raise CheckpointError(
                f"{actor} contains Megatron weights of {trainer}, which only {trainer} can "
                f"convert: run {command}, and give the folder that it writes"
            )
    return folder


def step_of(folder: Path) -> int | None:
    """Return the step in the name of a checkpoint folder or of a folder above its weights."""
    names = [part for part in folder.absolute().parts[-4:] if _STEP_FOLDER.fullmatch(part)]
    return int(re.sub(r"\D", "", names[-1])) if names else None


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def _newest_step(folder: Path) -> Path | None:
    """Return the folder of the newest complete step; None if there is none."""
    pointer = folder / NEWEST_FILE
    if pointer.is_file():
        text = pointer.read_text(encoding="utf-8", errors="replace").strip()
        named = [folder / f"global_step_{text}", folder / f"iter_{text.zfill(7)}"]
        if found := [path for path in named if path.is_dir()]:
            return found[0]
        raise CheckpointError(
            f"{pointer} contains {text[:40]!r}, but {named[0]} does not exist; write the newest "
            "complete step to it, or name the checkpoint's folder"
        )
    steps = [path.parent for path in folder.glob(f"checkpoint-*/{COMPLETE_FILE}")]
    return max(steps, key=lambda path: step_of(path) or 0, default=None)
