"""Checkpoints: weights and optimizer in shards, the trainer's state, what a merge needs; published atomically."""

from dapo_core.checkpoint.folder import (
    HUGGINGFACE_FOLDER,
    MANIFESTS,
    NAMES_FILE,
    PARTIAL,
    WEIGHT_SUFFIXES,
    best_checkpoint,
    checkpoint_folders,
    copy_model_files,
    latest_checkpoint,
)
<<<<<<< HEAD
from dapo_core.checkpoint.resume import find_start, locked, require_resume
from dapo_core.checkpoint.shards import load_shards, save_shards
from dapo_core.checkpoint.state import STATE_FILE, TrainerState, read_state, read_step_metrics, state_files
from dapo_core.checkpoint.writer import CheckpointWriter, Published, ShardWriter
=======
from dapo_core.checkpoint.state import STATE_FILE, TrainerState, read_state
>>>>>>> shards

__all__ = [
    "HUGGINGFACE_FOLDER",
    "MANIFESTS",
    "NAMES_FILE",
    "PARTIAL",
    "STATE_FILE",
    "WEIGHT_SUFFIXES",
    "CheckpointWriter",
    "Published",
    "ShardWriter",
    "TrainerState",
    "best_checkpoint",
    "checkpoint_folders",
    "copy_model_files",
    "find_start",
    "latest_checkpoint",
<<<<<<< HEAD
    "load_shards",
    "locked",
    "read_state",
    "read_step_metrics",
    "require_resume",
    "save_shards",
    "state_files",
=======
    "read_state",
    "write_checkpoint",
>>>>>>> shards
]
