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
from typing import BinaryIO

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
REMIND_SECONDS = 60.0


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Holds the lock on `path` for the block; while another process has it, waits and says for whom."""
    with open(path, "a+b") as lock:
        told_at = -REMIND_SECONDS
        waiting_since = time.monotonic()
        while not _try_lock(lock):
            waited = time.monotonic() - waiting_since
            if waited - told_at >= REMIND_SECONDS:
                told_at = waited
                logger.info(
                    "waiting for %s, which builds %s (%.0f s so far)", read_holder(path), path.stem, waited
                )
            time.sleep(POLL_SECONDS)
        with _named(lock):
            yield


@contextlib.contextmanager
def held_if_free(path: Path) -> Iterator[bool]:
    """Yields True with the lock held for the block, or False at once when another process has it."""
    with open(path, "a+b") as lock:
        if not _try_lock(lock):
            yield False
            return
        with _named(lock):
            yield True


def read_holder(path: Path) -> str:
    """Returns who holds the lock, as "pid 12 on node3 since 2026-01-31T10:00:00+00:00"."""
    with contextlib.suppress(OSError):
        if text := path.read_text(errors="replace").strip():
            return text
    return "another process"


@contextlib.contextmanager
def _named(lock: BinaryIO) -> Iterator[None]:
    """Keeps our pid and host in the lock file for the block, for those who wait."""
    since = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    lock.truncate(0)
    lock.write(f"pid {os.getpid()} on {platform.node()} since {since}\n".encode())
    lock.flush()
    try:
        yield
    finally:
        lock.truncate(0)


def _try_lock(lock: BinaryIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
