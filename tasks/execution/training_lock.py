"""One training at a time: a file lock that the training's supervisor inherits.

It is held until the training has ended, also after its flow is killed.

The text in the file is for people and only valid while the file is locked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from durable import LockHeld, find_holder, locked
from tasks.artifacts.stage_key import SHORT_KEY_LENGTH
from tasks.config import ChainConfig
from tasks.runs.plan import plan_chain
from tasks.runs.run import RunSkipped

TRAINING_LOCK = "training.lock"


def training_lock_path(config: ChainConfig) -> Path:
    """flow.lock_path, or a file among the locks of the store."""
    default = Path(config.store.path) / ".locks" / TRAINING_LOCK
    return Path(config.flow.lock_path or default).absolute()


def nightly_lock_path(config: ChainConfig) -> Path:
    """The lock that a nightly run holds from start to end, beside the training lock."""
    path = training_lock_path(config)
    return path.with_name(f"nightly-{path.name}")


@contextlib.contextmanager
def hold(path: Path, run: str, key: str = "", skips_if_locked: bool = False) -> Iterator[int]:
    """Hold the lock and yield its descriptor, which a child process may inherit.

    Waits if another process holds it. With `skips_if_locked` raises RunSkipped instead, but waits
    for a stopping training with the same stage key.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    note = f"run {run}, stage key {key[:SHORT_KEY_LENGTH]}" if key else f"run {run}"
    skips = skips_if_locked and not (key and _names(find_holder(path), key))
    waiting = None if skips else f"which holds the lock {path}"
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context(locked(path, note=note, waiting=waiting))
        except LockHeld as error:
            raise RunSkipped(f"The run was skipped because {error}") from None
        yield lock


def check_free(path: Path, config: ChainConfig) -> None:
    """Raise RunSkipped if a training of another configuration is running."""
    if (holder := find_holder(path)) is None:
        return
    [training] = [stage for stage in plan_chain(config) if stage.label == "train_policy"]
    if training.key is None or not _names(holder, training.key):
        raise RunSkipped(
            f"The run was skipped because another training holds the lock {path}: {holder}"
        )


def _names(holder: str | None, key: str) -> bool:
    return key[:SHORT_KEY_LENGTH] in (holder or "")
