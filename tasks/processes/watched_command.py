"""A command that may outlive us: it goes on as long as somebody watches, and is found again by its log.

    STEM.log     its output; locked until its whole tree is gone
    STEM.watch   touched by those who watch it, and holds their request to stop; locked while its supervisor lives
    STEM.json    what its supervisor says of it: who it is, on what it works, why it is being stopped, how it ended

All three may lie on a file system that hosts share: no pid is needed to watch or stop a command from another one.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import platform
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from dapo_core.stopping import ECHO_SECONDS
from durable import is_locked
from tasks.processes.child import (
    GRACE_SECONDS,
    POLL_SECONDS,
    STOP_MARGIN_SECONDS,
    LogTail,
    describe_failure,
    lock_log,
    open_place,
    start_supervisor,
)
from tasks.processes.supervisor import KILL, RECORD_SUFFIX, REQUEST_SIGNALS, STOP, UNWATCHED, WATCH_SUFFIX

logger = logging.getLogger(__name__)

TOUCH_SECONDS = 5.0
STOP_WAIT_SECONDS = 20.0  # Prefect kills a cancelled flow process after 30


@dataclass(frozen=True)
class Outlive:
    """What a command works on, how long it goes on without us, and how it is stopped."""

    unwatched_seconds: float  # 0: it ends with the process that started it
    stop_seconds: float  # for the command alone to end in order, before all below it is told to
    is_left: Callable[[BaseException], bool] = lambda error: False  # whether it goes on although this ends us
    held: Callable[[], Sequence[int]] = (
        tuple  # at its start: descriptors, as of a lock, to keep open while it lives
    )
    grace_seconds: float = GRACE_SECONDS
    work: str = ""  # as a folder: of the commands that share a log, only one with the same work is attached to


@dataclass(frozen=True)
class Record:
    """What a supervisor says of its command."""

    run_id: str
    pid: int  # the supervisor's
    host: str
    started_at: float
    log_offset: int  # where its lines begin in the log
    unwatched_seconds: float
    work: str
    stopping: str | None = None  # why, from the moment it is being stopped
    exit_code: int | None = None  # minus the signal that killed it; None while it runs

    def __str__(self) -> str:
        since = datetime.datetime.fromtimestamp(self.started_at, datetime.timezone.utc)
        return f"pid {self.pid} on {self.host}, started {since.isoformat(timespec='seconds')}"


class WatchedCommand:
    """A command that we started or attached to; left by an error, it is stopped or left running."""

    def __init__(
        self,
        label: str,
        log_path: Path,
        outlive: Outlive,
        record: Record,
        supervisor: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.label = label
        self.log_path = log_path
        self.outlive = outlive
        self.record = record
        self.exit_code: int | None = None
        self.should_start_again = False
        self._supervisor = supervisor  # None when another process started it
        self._watch_path = log_path.with_suffix(WATCH_SUFFIX)
        self._touched_at = float("-inf")

    def __enter__(self) -> WatchedCommand:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        if self.outlive.unwatched_seconds > 0 and self.outlive.is_left(error) and not self.has_ended():
            logger.warning(
                "%s goes on without us (%s): the next run with its key attaches to it; watched by nobody, it is "
                "stopped after flow.unwatched_minutes=%g",
                self.label,
                self.record,
                self.record.unwatched_seconds / 60,
            )
        else:
            self.stop()

    def watch(self, tell: Callable[[str], None]) -> None:
        """Tells each line until the command has ended."""
        is_ours = self._supervisor is not None
        tail = LogTail(self.log_path, self.record.log_offset if is_ours else self.log_path.stat().st_size)
        is_over = False
        while not is_over:
            is_over = self.has_ended()  # asked before reading: what it wrote last is then in the file
            self._touch()
            for line in tail.read_lines(is_final=is_over):
                tell(line)
            if not is_over:
                time.sleep(POLL_SECONDS)

    def has_ended(self) -> bool:
        """Whether it has ended; `exit_code` then says how, None when its supervisor was killed before it could."""
        if self._supervisor is not None:
            self.exit_code = self._supervisor.poll()
            return self.exit_code is not None
        if is_locked(self._watch_path) and self._read_record() is not None:
            return False
        last = self._read_record()  # written before the lock was released
        self.exit_code = last.exit_code if last is not None else None
        self.should_start_again = last is None or last.exit_code is None or last.stopping == UNWATCHED
        return True

    def stop(self) -> None:
        """Asks the supervisor to stop the command, and waits; one that takes long is left to its supervisor.

        A second interrupt while we wait has it killed, unless it comes so soon that it is the first once more.
        """
        began = time.monotonic()
        is_ending = None
        while is_ending is None:
            try:
                is_ending = self._stop_until(began + STOP_WAIT_SECONDS)
            except BaseException as error:
                if isinstance(error, Exception):
                    raise
                if time.monotonic() >= began + ECHO_SECONDS:
                    self._request(KILL)
                    raise
        if is_ending:
            logger.warning(
                "%s (%s) is still ending, for at most flow.stop_seconds=%g; its supervisor sees to that, and the "
                "next run with its key waits for it",
                self.label,
                self.record,
                self.outlive.stop_seconds,
            )

    def _stop_until(self, deadline: float) -> bool:
        """Asks for the end and waits for it; returns whether it is still ending then."""
        if self.has_ended() or not self._request(STOP):
            return False
        while (is_ending := not self.has_ended()) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return is_ending

    def _read_record(self) -> Record | None:
        """Returns the record, unless it is of a command after this one."""
        record = read_record(self.log_path)
        return record if record is not None and record.run_id == self.record.run_id else None

    def _touch(self) -> None:
        every = TOUCH_SECONDS
        if self.record.unwatched_seconds > 0:
            every = min(every, self.record.unwatched_seconds / 5)
        if time.monotonic() - self._touched_at >= every:
            self._watch_path.touch()
            self._touched_at = time.monotonic()

    def _request(self, word: str) -> bool:
        """Writes the request; where that fails, as on a full disk, a supervisor on our host gets a signal."""
        try:
            self._watch_path.write_text(f"{word} {self.record.run_id}\n", encoding="utf-8")
        except OSError as error:
            if not _signal_supervisor(self.record, REQUEST_SIGNALS[word]):
                logger.error(
                    "%s (%s) cannot be told to %s: %s; watched by nobody, it is stopped after "
                    "flow.unwatched_minutes=%g",
                    self.label,
                    self.record,
                    word,
                    error,
                    self.record.unwatched_seconds / 60,
                )
                return False
            logger.warning("%s (%s) is told to %s by a signal: %s", self.label, self.record, word, error)
        return True


def watch_command(
    command: Sequence[str],
    *,
    log_path: str | Path,
    label: str,
    outlive: Outlive,
    on_line: Callable[[str], None] | None = None,
) -> None:
    """Runs a command to its end, or attaches to the one that does its work already; hands on each line.

    One that writes to the same log but works on something else is waited for.
    What interrupts us stops the command, unless `outlive.is_left` says that it goes on; then another attaches.
    Raises ChildProcessFailed when the command does not end with exit code 0.
    """
    path = open_place(log_path, label)
    while True:
        with _start_or_attach(command, path, label, outlive) as watched:
            watched.watch(on_line or (lambda line: logger.info("[%s] %s", label, line)))
        if watched.exit_code == 0:
            return
        if watched.exit_code is not None and not watched.should_start_again:
            raise describe_failure(label, watched.exit_code, path, watched.record.log_offset)
        logger.warning("%s (%s) was ended while nobody watched; it is started again", label, watched.record)


def find_running(log_path: Path) -> Record | None:
    """Returns the record of the watched command that writes to this log, unless it is to stop."""
    watch_path = log_path.with_suffix(WATCH_SUFFIX)
    if not is_locked(watch_path) or (record := read_record(log_path)) is None:
        return None
    is_asked_to_stop = record.run_id in watch_path.read_text(encoding="utf-8")
    return None if is_asked_to_stop or record.stopping or record.exit_code is not None else record


def read_record(log_path: Path) -> Record | None:
    """Returns what the supervisor of the log's last watched command left, if anything."""
    with contextlib.suppress(FileNotFoundError):
        return Record(**json.loads(log_path.with_suffix(RECORD_SUFFIX).read_text(encoding="utf-8")))
    return None


def _signal_supervisor(record: Record, number: signal.Signals) -> bool:
    """Returns False when the supervisor is on another host, gone, or not ours to signal."""
    if record.host != platform.node():
        return False
    try:
        # The pid may have been given to a stranger: a supervisor has the run's id among its arguments.
        if record.run_id not in Path(f"/proc/{record.pid}/cmdline").read_text(errors="replace"):
            return False
        os.kill(record.pid, number)
    except OSError:
        return False
    return True


def _start_or_attach(command: Sequence[str], path: Path, label: str, outlive: Outlive) -> WatchedCommand:
    patience_seconds = outlive.stop_seconds + outlive.grace_seconds + STOP_MARGIN_SECONDS
    while True:
        with open(path, "ab") as log:
            if lock_log(log, label, patience_seconds, is_of_use=lambda: find_running(path) is not None):
                return _start(command, path, log, label, outlive)
        if (record := find_running(path)) is None:
            continue
        if record.work == outlive.work:
            logger.info("%s runs already: attached to %s; its output is in %s", label, record, path)
            return WatchedCommand(label, path, outlive, record)
        logger.info(
            "%s waits for %s, which works on %s, not on %s; watched by nobody, it is stopped after "
            "flow.unwatched_minutes=%g",
            label,
            record,
            record.work,
            outlive.work,
            record.unwatched_seconds / 60,
        )
        while find_running(path) == record:
            time.sleep(POLL_SECONDS)


def _start(command: Sequence[str], path: Path, log: BinaryIO, label: str, outlive: Outlive) -> WatchedCommand:
    """Starts the command, whose log is locked."""
    path.with_suffix(RECORD_SUFFIX).unlink(missing_ok=True)
    path.with_suffix(WATCH_SUFFIX).touch()
    run_id, log_offset = uuid.uuid4().hex, log.seek(0, os.SEEK_END)
    watch = {
        "stem": str(path.with_suffix("")),
        "run_id": run_id,
        "unwatched_seconds": outlive.unwatched_seconds,
        "stop_seconds": outlive.stop_seconds,
        "work": outlive.work,
    }
    supervisor = start_supervisor(command, log, outlive.grace_seconds, held=outlive.held(), watch=watch)
    logger.info("%s runs under pid %d, its output is in %s", label, supervisor.pid, path)
    record = Record(
        run_id=run_id,
        pid=supervisor.pid,
        host=platform.node(),
        started_at=time.time(),
        log_offset=log_offset,
        unwatched_seconds=outlive.unwatched_seconds,
        work=outlive.work,
    )
    return WatchedCommand(label, path, outlive, record, supervisor)
