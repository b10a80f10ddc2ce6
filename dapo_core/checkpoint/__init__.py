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
    write_checkpoint,
)
from dapo_core.checkpoint.shards import load_shards, save_shards
from dapo_core.checkpoint.state import STATE_FILE, TrainerState, read_state

__all__ = [
    "HUGGINGFACE_FOLDER",
    "MANIFESTS",
    "NAMES_FILE",
    "PARTIAL",
    "STATE_FILE",
    "WEIGHT_SUFFIXES",
    "TrainerState",
    "best_checkpoint",
    "checkpoint_folders",
    "copy_model_files",
    "latest_checkpoint",
    "load_shards",
    "read_state",
    "save_shards",
    "write_checkpoint",
]
