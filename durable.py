"""Files that survive a crash; locks and processes that end with their holder. Standard library only."""

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
from typing import Any

POLL_SECONDS = 0.2
GRACE_SECONDS = 1.0  # in which `is_locked` of another process lets go of a lock
REMIND_SECONDS = 60.0  # of who waits for a lock; then each time twice as long
TAIL_BYTES = 64 * 1024
PR_SET_PDEATHSIG = 1
FULL_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
UNSET = object()  # the value of a key that only the other side of a comparison has

logger = logging.getLogger(__name__)


class LockHeld(BlockingIOError):
    """Another process holds the lock; the message says which."""


@contextlib.contextmanager
def locked(path: Path, *, shared: bool = False, note: str = "", waiting: str | None = None) -> Iterator[int]:
    """Hold a kernel lock on the file for the block; yields its descriptor.

    The kernel drops the lock when the last copy of the descriptor closes, however the holder dies; forks have a
    copy, other children do not. An exclusive holder writes `note`, its pid and host into the file for those who
    wait. Inside the block the file may be removed or renamed; those who wait then lock the file that has its name.

    A held lock raises LockHeld after a second. With `waiting`, which says what the holder does, the call waits and
    the log names the holder, at once and ever more seldom.
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
                if error.errno not in FULL_DISK_ERRORS:  # a full disk must not keep `dapo gc` from locking
                    raise
        yield descriptor
    finally:
        os.close(descriptor)


def is_full(folder: Path, num_bytes: int) -> bool:
    """Whether the folder's file system has less free space than this; False if that cannot be read."""
    with contextlib.suppress(OSError):
        return shutil.disk_usage(folder).free < num_bytes
    return False


def try_lock(path: Path, *, shared: bool = False) -> int | None:
    """A descriptor that holds the file's lock until it is closed, None while another process does."""
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
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock exclusively. A missing file is unlocked."""
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
    """Who last locked the file exclusively: its note, and "pid 12 on node3 since 2026-01-31T10:00:00+00:00"."""
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace").strip() or "another process"
    return "another process"


def find_holder(path: Path) -> str | None:
    """Who holds the lock, None if it is free."""
    return read_holder(path) if is_locked(path) else None


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flush every file and folder below, and the folder itself, to the disk."""
    for path in folder.rglob("*"):
        if not path.is_symlink() and (path.is_file() or path.is_dir()):  # opening a pipe would wait
            sync(path)
    sync(folder)


def publish(partial: Path, target: Path) -> None:
    """Rename a file or folder to its final name once its content is on the disk; replaces a file, not a folder."""
    if partial.is_dir():
        sync_tree(partial)
    else:
        sync(partial)
    partial.rename(target)
    sync(target.parent)


def link_or_copy(source: Path, target: Path) -> None:
    """A hard link to a file, or a copy where the file system allows none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader, or a crash, sees the old content or the new one."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        publish(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def append_json_line(path: Path, row: Mapping[str, Any]) -> None:
    """Append one line to a log and flush it to the disk; begins on a new line where a crash tore the last one."""
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
    """The lines of a log without those that a crash tore, [] when it is missing."""
    return list(iterate_json_lines(path))


def iterate_json_lines(path: Path) -> Iterator[Any]:
    """As `read_json_lines`, one after the other: memory holds one line."""
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                with contextlib.suppress(ValueError):
                    yield parse_json(line)


def parse_json(text: bytes) -> Any:
    """As json.loads, in a third of the time."""
    import orjson  # here: the supervisor imports this file with the standard library alone

    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return json.loads(text)  # NaN, half of a surrogate pair, or an error that says what is wrong


def tail(path: Path, num_lines: int, offset: int = 0) -> list[str]:
    """The last lines of a log from byte `offset` on, without empty ones; reads at most 64 KiB."""
    with path.open("rb") as log:
        end = log.seek(0, os.SEEK_END)
        log.seek(max(offset, end - TAIL_BYTES, 0))
        lines = log.read().decode("utf-8", errors="replace").splitlines()
    return [line for line in lines if line.strip()][-num_lines:]


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(dotted key, value before, value after) of every leaf that differs, in the order of `after`.

    A key that one side lacks has the value UNSET there.
    """
    old, new = leaves(before), leaves(after)
    pairs = [
        (key, old.get(key, UNSET), new.get(key, UNSET)) for key in [*new, *(key for key in old if key not in new)]
    ]
    return [pair for pair in pairs if pair[1] is UNSET or pair[2] is UNSET or pair[1] != pair[2]]


def leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested mappings by dotted key; an empty mapping is a value."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        is_branch = isinstance(value, Mapping) and value
        flat |= leaves(value, f"{prefix}{key}.") if is_branch else {f"{prefix}{key}": value}
    return flat


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the file still has the name; its last holder may have removed it after we opened it."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def end_with(parent_pid: int) -> None:
    """Have this process killed when the thread of its parent that started it ends; exit if it has ended."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        sys.exit()
