"""One training at a time: a kernel lock, which the training's supervisor inherits.

So the lock outlives a flow that was killed. What the file says is for people, and true only while it is locked.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import durable
from tasks.artifacts.stage_key import SHORT_KEY_LENGTH
from tasks.config import ChainConfig
from tasks.runs.plan import plan_chain
from tasks.runs.run import RunSkipped
from tasks.time_limit import clock_stopped

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 1.0  # of a run that does not wait: durable.is_locked holds the lock for an instant
REMIND_SECONDS = 600.0
TRAINING_LOCK = "training.lock"


def training_lock_path(config: ChainConfig) -> Path:
    """flow.lock_path, or a file beside the locks of the store."""
    default = Path(config.store.path) / ".locks" / TRAINING_LOCK
    return Path(config.flow.lock_path or default).absolute()


def nightly_lock_path(config: ChainConfig) -> Path:
    """What a nightly run holds from its start to its end: a file beside the training's lock, named after it."""
    path = training_lock_path(config)
    return path.with_name(f"nightly-{path.name}")


@contextlib.contextmanager
def hold(path: Path, run: str, key: str = "", skips_if_locked: bool = False) -> Iterator[int]:
    """Hold the lock for the block and yield its descriptor, for a child that is to hold it too.

    While another process has it: waits, naming the holder at once and every ten minutes; or raises RunSkipped.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remind_at = 0.0

    def on_wait(process: str, seconds: float) -> None:
        nonlocal remind_at
        if skips_if_locked and seconds > PATIENCE_SECONDS:
            raise RunSkipped(f"The run was skipped because {_describe_holder(path)} holds the lock {path}")
        if not skips_if_locked and seconds >= remind_at:
            remind_at = seconds + REMIND_SECONDS
            logger.info(
                "waiting for the lock %s, held by %s (%.0f s so far)", path, _describe_holder(path), seconds
            )

    note = f"run {run}, stage key {key[:SHORT_KEY_LENGTH]}" if key else f"run {run}"
    with contextlib.ExitStack() as stack:
        with clock_stopped():
            lock = stack.enter_context(durable.locked(path, note=note, on_wait=on_wait))
        yield lock


def find_holder(path: Path) -> str | None:
    """The run and process that hold the lock; None when it is free."""
    return _describe_holder(path) if durable.is_locked(path) else None


def check_free(path: Path, config: ChainConfig) -> None:
    """Raise RunSkipped while a training runs that is not this configuration's own."""
    if (holder := find_holder(path)) is None:
        return
    [training] = [stage for stage in plan_chain(config) if stage.label == "train_policy"]
    if training.key is None or training.key[:SHORT_KEY_LENGTH] not in holder:
        raise RunSkipped(f"The run was skipped because another training holds the lock {path}: {holder}")


def _describe_holder(path: Path) -> str:
    return f"{durable.read_note(path) or 'a run'} ({durable.read_holder(path)})"
