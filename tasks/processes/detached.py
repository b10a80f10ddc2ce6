"""Commands that may outlive the process that started them: they run while watched and are found by
their log.

Their files, through which other hosts can also watch and stop them, are described in supervisor.py.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import durable
from tasks.processes.child import (
    GRACE_SECONDS,
    STOP_MARGIN_SECONDS,
    ChildProcessFailed,
    RunningCommand,
    lock_log,
    prepare_log,
    start_supervisor,
)
from tasks.processes.supervisor import RECORD_SUFFIX, REQUEST_SUFFIXES, UNWATCHED

logger = logging.getLogger(__name__)

TOUCH_SECONDS = 1.0
STOP_WAIT_SECONDS = 20.0  # Prefect kills a cancelled flow process after 30


@dataclass(frozen=True)
class DetachOptions:
    """When a command outlives the process that started it, and how it is stopped."""

    unwatched_seconds: (
        float  # lifetime without a watcher; 0: it ends with the process that started it
    )
    stop_seconds: float  # for the command to stop by itself, before its descendants get SIGTERM
    survives: Callable[[BaseException], bool] = lambda error: (
        False
    )  # True: this error leaves it running
    lock: Callable[[], AbstractContextManager[int | None]] = (
        contextlib.nullcontext
    )  # held while it runs
    grace_seconds: float = GRACE_SECONDS


@dataclass(frozen=True)
class Record:
    """The record that the supervisor writes about a detached command."""

    pid: int  # the supervisor's
    host: str
    started_at: float
    unwatched_seconds: float
    stopping: str | None = None  # the reason, once it is being stopped
    exit_code: int | None = None  # negative: the signal that killed it; None while it runs

    def __str__(self) -> str:
        since = datetime.datetime.fromtimestamp(self.started_at, datetime.timezone.utc)
        return f"pid {self.pid} on {self.host}, started {since.isoformat(timespec='seconds')}"


class DetachedProcess(RunningCommand):
    """A detached command that was started or attached to; an error in the block may stop it."""

    def __init__(
        self,
        label: str,
        log_path: Path,
        log_offset: int,
        options: DetachOptions,
        popen: subprocess.Popen[bytes] | None = None,
    ) -> None:
        super().__init__(label, log_path, log_offset)
        self.options = options
        self._started = popen  # None when another process started it
        self._touched_at = float("-inf")

    def __enter__(self) -> DetachedProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or self.poll() is not None:
            return
        unwatched_minutes, stop_seconds = (
            self.options.unwatched_seconds / 60,
            self.options.stop_seconds,
        )
        outcome = (
            f"continues for flow.unwatched_minutes={unwatched_minutes:g}: the next run with its "
            "key attaches to it"
        )
        if not (unwatched_minutes > 0 and self.options.survives(error)):
            self.stop(STOP_WAIT_SECONDS)
            outcome = (
                f"ends within flow.stop_seconds={stop_seconds:g}: the next run with its key waits "
                "for it"
            )
        if self.poll() is None:
            logger.warning("%s (%s) %s", self.label, read_record(self.log_path), outcome)

    def poll(self) -> int | None:
        """None while the command runs (this counts as watching it); -SIGKILL if it died with its
        supervisor.
        """
        if self._started is not None:
            exit_code = self._started.poll()
        elif durable.is_locked(self.log_path):
            exit_code = None
        else:
            record = read_record(self.log_path)  # written before the lock is released
            recorded = record.exit_code if record is not None else None
            exit_code = -signal.SIGKILL if recorded is None else recorded
        if exit_code is None:
            self._touch()
        return exit_code

    def failure(self) -> ChildProcessFailed:
        """The error of the command; retried if it was stopped because this process was suspended,
        as by Ctrl-Z.
        """
        error, record = super().failure(), read_record(self.log_path)
        if record is not None and record.stopping == UNWATCHED:
            error.is_lasting = False
        return error

    def request(self, request: signal.Signals) -> None:
        """Ask the supervisor to STOP or KILL the command, through an empty file, which works on a
        full disk.
        """
        self.log_path.with_suffix(REQUEST_SUFFIXES[request]).touch()

    def _touch(self) -> None:
        if time.monotonic() - self._touched_at >= TOUCH_SECONDS:
            self._touched_at = time.monotonic()
            with contextlib.suppress(FileNotFoundError):  # the supervisor is still starting
                os.utime(self.log_path.with_suffix(RECORD_SUFFIX))


def attach_or_start(
    command: Sequence[str],
    *,
    log_path: str | Path,
    label: str,
    options: DetachOptions,
    on_line: Callable[[str], None] | None = None,
) -> None:
    """Run a command to completion, or attach to the one that already writes to this log; pass on
    each line.

    An interruption stops the command, unless `options.survives` returns True for it: then the next
    run attaches. Raises ChildProcessFailed if the exit code is not 0.
    """
    with _find_or_start(command, prepare_log(log_path, label), label, options) as process:
        process.forward_lines_to(on_line)


def read_record(log_path: Path) -> Record | None:
    """The record of the last detached command of this log, if any."""
    with contextlib.suppress(FileNotFoundError):
        return Record(**json.loads(log_path.with_suffix(RECORD_SUFFIX).read_text(encoding="utf-8")))
    return None


def find_running(log_path: Path) -> Record | None:
    """The record of the detached command that is writing to this log, unless it is being stopped."""
    if not durable.is_locked(log_path) or (record := read_record(log_path)) is None:
        return None
    is_requested = any(
        log_path.with_suffix(suffix).exists() for suffix in REQUEST_SUFFIXES.values()
    )
    return None if is_requested or record.stopping or record.exit_code is not None else record


def _find_or_start(
    command: Sequence[str], path: Path, label: str, options: DetachOptions
) -> DetachedProcess:
    patience_seconds = options.stop_seconds + options.grace_seconds + STOP_MARGIN_SECONDS
    lock = lock_log(
        path, label, patience_seconds, should_stop_waiting=lambda: find_running(path) is not None
    )
    if lock is not None:
        return _start(command, path, lock, label, options)
    logger.info(
        "%s is already running: attached to %s; its output is in %s",
        label,
        find_running(path),
        path,
    )
    return DetachedProcess(label, path, path.stat().st_size, options)


def _start(
    command: Sequence[str], path: Path, log_lock: int, label: str, options: DetachOptions
) -> DetachedProcess:
    """Start the command; the supervisor inherits the lock of the log."""
    for suffix in (RECORD_SUFFIX, *REQUEST_SUFFIXES.values()):
        path.with_suffix(suffix).unlink(missing_ok=True)
    settings = {
        "grace_seconds": options.grace_seconds,
        "stop_seconds": options.stop_seconds,
        "folder": None,
        "detached": {
            "stem": str(path.with_suffix("")),
            "unwatched_seconds": options.unwatched_seconds,
        },
    }
    log_offset = path.stat().st_size
    with os.fdopen(log_lock), options.lock() as lock:
        popen = start_supervisor(
            command, path, [log_lock] if lock is None else [log_lock, lock], settings
        )
    logger.info("%s runs under pid %d, its output is in %s", label, popen.pid, path)
    return DetachedProcess(label, path, log_offset, options, popen)
