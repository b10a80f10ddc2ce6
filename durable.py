"""Crash-safe file writes, kernel locks and parent-death signals. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import errno
import fcntl
import json
import logging
import os
import platform
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

POLL_SECONDS = 0.2
GRACE_SECONDS = 1.0  # `is_locked` in another process briefly holds the lock
REMIND_SECONDS = 60.0  # first repeat of the log line while waiting; then the interval doubles
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
TAIL_BYTES = 64 * 1024
PR_SET_PDEATHSIG = 1
FULL_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
UNSET = object()  # value of a key that only the other side of a comparison has

logger = logging.getLogger(__name__)


class LockHeld(BlockingIOError):
    """Another process holds the lock; the message names it."""


@contextlib.contextmanager
def locked(
    path: Path, *, shared: bool = False, note: str = "", waiting: str | None = None
) -> Iterator[int]:
    """Hold a kernel lock on the file during the block; yields its descriptor.

    The kernel drops the lock when the last copy of the descriptor closes, however the holder dies.
    Forks have a copy, other children do not. An exclusive holder writes `note`, its pid and host
    into the file. The block may remove or rename the file; waiters then lock whatever file has its
    name.

    Raises LockHeld after a second if the lock is held. With `waiting`, a description of what the
    holder does, the call waits instead and logs the holder at increasing intervals.
    """
    began, say_at = time.monotonic(), 0.0
    while (descriptor := try_lock(path, shared=shared)) is None:
        waited = time.monotonic() - began
        if waiting is None and waited > GRACE_SECONDS:
            raise LockHeld(f"{read_holder(path)} holds the lock {path}")
        if waiting is not None and waited >= say_at:
            logger.info("waiting for %s, %s (%.0f s so far)", read_holder(path), waiting, waited)
            say_at = max(2 * waited, REMIND_SECONDS)
        time.sleep(POLL_SECONDS)
    try:
        if not shared:
            since = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
            holder = f"pid {os.getpid()} on {platform.node()} since {since}"
            os.ftruncate(descriptor, 0)
            try:
                os.write(descriptor, (f"{note} ({holder})" if note else holder).encode())
            except OSError as error:
                # `dapo runs gc` must be able to lock on a full disk
                if error.errno not in FULL_DISK_ERRORS:
                    raise
        yield descriptor
    finally:
        os.close(descriptor)


def is_full(folder: Path, num_bytes: int) -> bool:
    """True if the folder's file system has less free space than `num_bytes`; False if unknown."""
    with contextlib.suppress(OSError):
        return shutil.disk_usage(folder).free < num_bytes
    return False


def try_lock(path: Path, *, shared: bool = False) -> int | None:
    """A descriptor that holds the lock until closed, or None if another process holds it."""
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            if _is_at(descriptor, path):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError as error:
            os.close(descriptor)
            error.filename = str(path)
            raise
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """True if a process holds the lock exclusively. A missing file is unlocked."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def read_holder(path: Path) -> str:
    """The last exclusive holder, e.g. "NOTE (pid 12 on node3 since 2026-01-31T10:00:00+00:00)"."""
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace").strip() or "another process"
    return "another process"


def find_holder(path: Path) -> str | None:
    """The current holder, or None if the lock is free."""
    return read_holder(path) if is_locked(path) else None


def sync(path: Path) -> None:
    """fsync a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """fsync the folder and every file and folder below it."""
    for path in folder.rglob("*"):
        # opening a pipe would block
        if not path.is_symlink() and (path.is_file() or path.is_dir()):
            sync(path)
    sync(folder)


def publish(partial: Path, target: Path) -> None:
    """fsync a file or folder, then rename it to its final name; a file may replace another."""
    if partial.is_dir():
        sync_tree(partial)
    else:
        sync(partial)
    partial.rename(target)
    sync(target.parent)


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link a file, or copy it if the file system does not support links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def write_atomically(path: Path, content: str | bytes | bytearray) -> None:
    """Write a file atomically: readers and crashes see either the old or the new content."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        publish(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def append_json_line(path: Path, row: Mapping[str, Any]) -> None:
    """Append and fsync one line. Starts on a new line if a crash tore the last one."""
    is_new = not path.exists()
    with path.open("a+b") as file:
        file.seek(max(file.tell() - 1, 0))
        line_end = b"" if file.read(1) in (b"", b"\n") else b"\n"
        file.write(line_end + json.dumps(row).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    if is_new:
        sync(path.parent)


def read_json_lines(path: Path) -> list[Any]:
    """The lines of a log, skipping torn ones; [] if the file is missing."""
    return list(iterate_json_lines(path))


def iterate_json_lines(path: Path) -> Iterator[Any]:
    """Like `read_json_lines`, one line at a time."""
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                with contextlib.suppress(ValueError):
                    yield parse_json(line)


class JsonLinesFollower:
    """Reads the lines that are appended to a log, which may be missing, truncated or replaced."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = None

    def read(self) -> list[Any]:
        """The complete lines since the last call; all of a file that was replaced or truncated."""
        rows: list[Any] = []
        if self._file is None or self._is_replaced(self._file):
            self.close()
            with contextlib.suppress(FileNotFoundError):
                self._file = self.path.open("rb")
        while self._file is not None:
            place = self._file.tell()
            if not (line := self._file.readline()).endswith(b"\n"):
                self._file.seek(place)  # the rest of the line follows
                break
            with contextlib.suppress(ValueError):
                rows.append(parse_json(line))
        return rows

    def close(self) -> None:
        """Close the file; the next `read` begins at its start."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _is_replaced(self, file: IO[bytes]) -> bool:
        """True if the path names another file; a file that was removed is read to its end."""
        with contextlib.suppress(FileNotFoundError):
            there, ours = self.path.stat(), os.fstat(file.fileno())
            return not os.path.samestat(there, ours) or there.st_size < file.tell()
        return False


def parse_json(text: bytes) -> Any:
    """json.loads, about three times as fast."""
    import orjson  # lazy: the supervisor imports this module without third-party packages

    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return json.loads(text)  # accepts NaN and lone surrogates; raises a clearer error


def is_lfs_pointer(path: Path) -> bool:
    """True for a file that Git LFS left in place of its content."""
    with path.open("rb") as file:
        return file.read(len(LFS_POINTER)) == LFS_POINTER


def tail(path: Path, num_lines: int, offset: int = 0) -> list[str]:
    """The last non-empty lines of a log from byte `offset` on; reads at most 64 KiB."""
    with path.open("rb") as log:
        end = log.seek(0, os.SEEK_END)
        log.seek(max(offset, end - TAIL_BYTES, 0))
        lines = log.read().decode("utf-8", errors="replace").splitlines()
    return [line for line in lines if line.strip()][-num_lines:]


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(dotted key, old, new) of every differing leaf in the order of `after`; UNSET if missing."""
    old, new = leaves(before), leaves(after)
    pairs = [
        (key, old.get(key, UNSET), new.get(key, UNSET))
        for key in [*new, *(key for key in old if key not in new)]
    ]
    return [pair for pair in pairs if pair[1] is UNSET or pair[2] is UNSET or pair[1] != pair[2]]


def leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to {dotted key: value}. An empty mapping is a value."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        is_branch = isinstance(value, Mapping) and value
        flat |= leaves(value, f"{prefix}{key}.") if is_branch else {f"{prefix}{key}": value}
    return flat


def _is_at(descriptor: int, path: Path) -> bool:
    """True if `path` still names the open file, which the previous holder may have removed."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def end_with(parent_pid: int) -> None:
    """Kill this process when the parent thread that started it ends; exit if it already has."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        sys.exit()
