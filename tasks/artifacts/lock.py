"""One builder per key: a kernel lock, which ends with its holder however that dies."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import logging
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path

from tasks.time_limit import clock_stopped

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
REMIND_SECONDS = 60.0


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Holds the lock on `path` for the block; while another process has it, waits and says for whom."""
    with _named(_wait_for_lock(path, fcntl.LOCK_EX)):
        yield


@contextlib.contextmanager
def shared(path: Path) -> Iterator[None]:
    """Holds the lock on `path` for the block, as others may at once; while one has it for itself, waits."""
    descriptor = _wait_for_lock(path, fcntl.LOCK_SH)
    try:
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def held_if_free(path: Path) -> Iterator[bool]:
    """Yields True with the lock held for the block, or False at once when another process has it."""
    descriptor = _try_lock(path, fcntl.LOCK_EX)
    if descriptor is None:
        yield False
        return
    with _named(descriptor):
        yield True


def is_held(path: Path) -> bool:
    """Returns whether a process has the lock for itself; a file that is not there nobody has locked."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def read_holder(path: Path) -> str:
    """Returns who holds the lock, as "pid 12 on node3 since 2026-01-31T10:00:00+00:00"."""
    with contextlib.suppress(OSError):
        if text := path.read_text(errors="replace").strip():
            return text
    return "another process"


@contextlib.contextmanager
def _named(descriptor: int) -> Iterator[None]:
    """Keeps our pid and host in the locked file for the block, for those who wait; then ends the lock."""
    since = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"pid {os.getpid()} on {platform.node()} since {since}\n".encode())
        yield
    finally:
        os.ftruncate(descriptor, 0)
        os.close(descriptor)


def _wait_for_lock(path: Path, kind: int) -> int:
    told_at = -REMIND_SECONDS
    waiting_since = time.monotonic()
    with clock_stopped():
        while (descriptor := _try_lock(path, kind)) is None:
            waited = time.monotonic() - waiting_since
            if waited - told_at >= REMIND_SECONDS:
                told_at = waited
                holder = read_holder(path)
                logger.info(
                    "waiting for %s, which builds or exports %s (%.0f s so far)", holder, path.stem, waited
                )
            time.sleep(POLL_SECONDS)
    return descriptor


def _try_lock(path: Path, kind: int) -> int | None:
    """Returns a descriptor of the file with its lock, or None while another process has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        is_ours = os.fstat(descriptor).st_nlink > 0  # else its holder removed it: the next locks a new one
    except BlockingIOError:
        is_ours = False
    if is_ours:
        return descriptor
    os.close(descriptor)
    return None
