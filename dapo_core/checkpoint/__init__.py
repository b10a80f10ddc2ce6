"""Checkpoints: weights and optimizer in shards, the trainer's state, what a merge needs; published atomically."""

from dapo_core.checkpoint.folder import (
    CHECKPOINTS,
    HUGGINGFACE_FOLDER,
    MANIFESTS,
    NAMES_FILE,
    PARTIAL,
    WEIGHT_SUFFIXES,
    accuracy_of,
    best_checkpoint,
    checkpoint_folders,
    copy_model_files,
    latest_checkpoint,
)
from dapo_core.checkpoint.keeper import CheckpointKeeper
from dapo_core.checkpoint.resume import (
    end_again,
    find_start,
    locked,
    require_resume,
    require_same_training,
    resume_digest,
    resume_metrics,
)
from dapo_core.checkpoint.state import (
    STATE_FILE,
    TrainerState,
    read_state,
    read_step,
    read_step_metrics,
    state_files,
)
from dapo_core.checkpoint.writer import CheckpointWriter, Published, ShardWriter

__all__ = [
    "CHECKPOINTS",
    "HUGGINGFACE_FOLDER",
    "MANIFESTS",
    "NAMES_FILE",
    "PARTIAL",
    "STATE_FILE",
    "WEIGHT_SUFFIXES",
    "CheckpointKeeper",
    "CheckpointWriter",
    "Published",
    "ShardWriter",
    "TrainerState",
    "accuracy_of",
    "best_checkpoint",
    "checkpoint_folders",
    "copy_model_files",
    "end_again",
    "find_start",
    "latest_checkpoint",
    "locked",
    "read_state",
    "read_step",
    "read_step_metrics",
    "require_resume",
    "require_same_training",
    "resume_digest",
    "resume_metrics",
    "state_files",
]
