"""One training at a time: a kernel lock, which lasts as long as any process that holds its descriptor.

The training's supervisor inherits the descriptor, so that the lock outlives a flow that was killed. What the file
says is for people, and only true while the lock is held: a process that is gone cannot wipe it.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import logging
import os
import platform
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from dapo_core.errors import RunSkipped
from tasks.artifacts import SHORT_KEY_LENGTH, StageKey
from tasks.config import ChainConfig
from tasks.processes.time_limit import clock_stopped
from tasks.runs.plan import plan_chain
from tasks.runs.run import Run

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
PATIENCE_SECONDS = 1.0  # of one that does not wait: somebody's look at the lock holds it for an instant
REMIND_SECONDS = 600.0
TRAINING_LOCK = "training.lock"


@dataclass(frozen=True)
class Holder:
    """Who holds a lock."""

    run: str
    host: str
    pid: int
    since: str
    key: str = ""  # of the stage that trains

    def __str__(self) -> str:
        stage = f", stage key {self.key[:SHORT_KEY_LENGTH]}" if self.key else ""
        return f"run {self.run} on {self.host} (pid {self.pid}) since {self.since}{stage}"


def training_lock_path(config: ChainConfig) -> Path:
    """flow.lock_path, or a file beside the locks of the store."""
    default = Path(config.store.path) / ".locks" / TRAINING_LOCK
    return Path(config.flow.lock_path or default).absolute()


def night_lock_path(config: ChainConfig) -> Path:
    """What one nightly run holds for its whole length: a file beside the training's, whose name is in its own."""
    path = training_lock_path(config)
    return path.with_name(f"nightly-{path.name}")


@contextlib.contextmanager
def hold(path: Path, run: str, key: str = "", gives_way: bool = False) -> Iterator[int]:
    """Hold the lock for the block and yield its descriptor, for a child that is to hold it too.

    While another has it: waits, naming the holder at once and every ten minutes; or raises RunSkipped.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as lock:
        with clock_stopped():
            _acquire(lock, path, gives_way)
        since = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        holder = Holder(run, platform.node(), os.getpid(), since, key)
        lock.truncate(0)
        lock.write(json.dumps(asdict(holder)).encode())
        lock.flush()
        yield lock.fileno()  # closed afterwards, never unlocked: a child's copy keeps the lock


def hold_for_training(run: Run, key: StageKey, gives_way: bool) -> AbstractContextManager[int]:
    """Hold the cluster's lock for a training that is started; one that is attached to holds it itself."""
    return hold(training_lock_path(run.config), run.folder.name, key.key, gives_way)


def read_holder(path: Path) -> Holder | None:
    """Who holds the lock; None when it is free."""
    try:
        with open(path, "rb") as lock:
            if _try_lock(lock, fcntl.LOCK_SH):
                return None
            return _parse(lock.read())
    except FileNotFoundError:
        return None


def check_free(path: Path, config: ChainConfig) -> None:
    """Raise RunSkipped when another training than that of this configuration runs; its own goes on."""
    holder = read_holder(path)
    if holder is None:
        return
    keys = [stage.key for stage in plan_chain(config) if stage.label == "train_policy"]
    if holder.key not in keys:
        raise RunSkipped(f"another training is under way: {holder}; its lock is {path}")


def _acquire(lock: BinaryIO, path: Path, gives_way: bool) -> None:
    waiting_since = time.monotonic()
    told_at: float | None = None
    while not _try_lock(lock, fcntl.LOCK_EX):
        now = time.monotonic()
        holder = _parse(path.read_bytes())
        if gives_way and now - waiting_since > PATIENCE_SECONDS:
            raise RunSkipped(f"{path.stem} is under way already: {holder}; its lock is {path}")
        if not gives_way and (told_at is None or now - told_at >= REMIND_SECONDS):
            told_at = now
            logger.info("waiting for the lock %s, held by %s (%.0f s so far)", path, holder, now - waiting_since)
        time.sleep(POLL_SECONDS)


def _parse(content: bytes) -> Holder:
    """The holder that the file names; between locking and writing it names none, or the last one."""
    try:
        return Holder(**json.loads(content))
    except (ValueError, TypeError):
        return Holder("unknown", "unknown", 0, "just now")


def _try_lock(lock: BinaryIO, kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
