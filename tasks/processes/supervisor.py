"""Runs one command and leaves none of its processes behind. Linux only.

    python -I -S supervisor.py SETTINGS COMMAND...     SETTINGS: the other arguments of `Supervisor` as JSON

As child subreaper the supervisor remains the ancestor of all descendants of the command, including
daemons in other sessions. It ends them on SIGTERM (SIGQUIT: without a grace period), when the
command ends, and when its parent dies. It then exits like the command, with the same exit code or
signal.

A detached command may outlive the parent. Its files are beside its log, on a file system that hosts
may share:

    STEM.log     output without secrets; locked while the supervisor lives
    STEM.json    record: supervisor, reason for stopping, exit code. Watchers touch it; the command is stopped if
                 none does so for `unwatched_seconds`
    STEM.stop    empty file that requests a stop; STEM.kill: without a grace period
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # isolated mode (-I) omits it
import durable
from durable import PR_SET_PDEATHSIG
from redaction import redact

PR_SET_CHILD_SUBREAPER = 36
PARENT_MAY_BE_DEAD = (
    signal.SIGUSR1
)  # also sent when only the thread that started the supervisor ends
STOP, KILL = signal.SIGTERM, signal.SIGQUIT  # requests: with and without a grace period
STOP_SIGNALS = (STOP, KILL, signal.SIGINT, signal.SIGHUP)
AWAITED_SIGNALS = (*STOP_SIGNALS, signal.SIGCHLD, PARENT_MAY_BE_DEAD)
RECORD_SUFFIX = ".json"
REQUEST_SUFFIXES = {STOP: ".stop", KILL: ".kill"}
REQUESTED, UNWATCHED, ORPHANED = "requested", "unwatched", "orphaned"  # reasons for stopping
POLL_SECONDS = 0.5
SCAN_SECONDS = 0.05
LINGER_SECONDS = (
    0.5  # helpers such as multiprocessing's resource tracker exit just after the command
)
KILL_SECONDS = (
    10.0  # a process in uninterruptible sleep survives SIGKILL; waiting longer does not help
)
CANNOT_START_EXIT_CODE = 127  # as in a shell
CHUNK_BYTES = 64 * 1024


def descendants(ancestor_pid: int) -> dict[int, str]:
    """{pid: start time} of the living descendants of a process, parents first."""
    children: dict[int, dict[int, str]] = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        if (fields := stat_fields(pid)) and fields[0] != "Z":
            children.setdefault(int(fields[1]), {})[pid] = fields[19]
    found: dict[int, str] = {}
    waiting = [ancestor_pid]
    for ancestor in waiting:
        below = children.get(ancestor, {})
        found |= below
        waiting += below
    return found


def stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name (state, ppid, ..., start time at 19); [] if it is
    gone.
    """
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", errors="replace") as stat:
        return stat.read().rpartition(")")[2].split()
    return []


class Supervisor:
    """Runs one command and exits with it; `run` does not return."""

    def __init__(
        self,
        command: list[str],
        parent_pid: int,
        grace_seconds: float,
        stop_seconds: float,
        folder: str | None,
        detached: dict[str, Any] | None,
    ) -> None:
        self.command = command
        self.parent_pid = parent_pid
        self.grace_seconds = grace_seconds
        self.stop_seconds = (
            stop_seconds  # for the command alone, before its descendants get SIGTERM
        )
        self.folder = folder  # removed at the end
        self.stem = Path(detached.pop("stem")) if detached else None
        self.record = detached or {}
        self.unwatched_seconds = self.record.get("unwatched_seconds", 0.0)
        self.touched_at, self.touched = time.monotonic(), 0
        self.command_pid = 0
        self.output = threading.Thread()  # copies the command's output
        self.wait_status: int | None = None
        self.stopping = ""
        self.skips_grace = False
        self.libc = ctypes.CDLL(None, use_errno=True)

    def run(self) -> NoReturn:
        """Run the command until it ends or must be stopped, then exit like it."""
        signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED_SIGNALS)
        signal.signal(
            signal.SIGCHLD, signal.SIG_DFL
        )  # an inherited "ignore" would hide its exit status
        self._prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._prctl(PR_SET_PDEATHSIG, PARENT_MAY_BE_DEAD)
        self._write_record(pid=os.getpid(), host=os.uname().nodename, started_at=time.time())
        self._check_parent()
        if not self.stopping:
            reader, writer = os.pipe()
            self.command_pid = os.fork()
            if self.command_pid == 0:
                self._exec_command(writer)
            os.close(writer)
            self.output = threading.Thread(
                target=_copy_without_secrets, args=(reader,), daemon=True
            )
            self.output.start()
            while self.wait_status is None and not self.stopping:
                self._pause(POLL_SECONDS)
            self._stop_all()
            self.output.join(LINGER_SECONDS)  # ends when the last process closes the pipe
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._exit_as_command()

    def _exec_command(self, output: int) -> NoReturn:
        try:
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.setsid()
            # If the supervisor is killed, at least the command dies with it.
            self._prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            for ignored_by_python in (
                signal.SIGPIPE,
                signal.SIGXFSZ,
            ):  # the command would inherit this
                signal.signal(ignored_by_python, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            for descriptor in map(int, os.listdir("/proc/self/fd")):
                if descriptor > 2:  # locks belong to the supervisor alone
                    with contextlib.suppress(OSError):
                        os.close(descriptor)
            os.execvp(self.command[0], self.command)
        except (OSError, ValueError) as error:
            _log(f"cannot start {self.command[0]!r}: {error}")
        finally:
            os._exit(CANNOT_START_EXIT_CODE)

    def _prctl(self, option: int, value: int) -> None:
        if self.libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")

    def _write_record(self, **changes: Any) -> None:
        if self.stem is not None:
            self.record |= changes
            try:
                durable.write_atomically(
                    self.stem.with_suffix(RECORD_SUFFIX), json.dumps(self.record)
                )
            except OSError as error:  # a full disk must not stop supervision
                _log(f"cannot write the record: {error}")

    def _pause(self, seconds: float) -> None:
        """Wait for a signal or `seconds`, check for reasons to stop, and reap dead children."""
        received = signal.sigtimedwait(AWAITED_SIGNALS, seconds)
        if received is not None and received.si_signo in STOP_SIGNALS:
            self._accept(
                received.si_signo,
                f"by {signal.Signals(received.si_signo).name} of {received.si_pid}",
            )
        self._check_parent()
        if self.stem is not None:
            self._check_watchers(self.stem)
        with contextlib.suppress(ChildProcessError):
            while (reaped := os.waitpid(-1, os.WNOHANG))[0] != 0:
                if reaped[0] == self.command_pid:
                    self.wait_status = reaped[1]

    def _check_parent(self) -> None:
        if not self.stopping and self.unwatched_seconds <= 0 and os.getppid() != self.parent_pid:
            _log(f"parent process {self.parent_pid} is gone: ending the command")
            self.stopping = ORPHANED

    def _check_watchers(self, stem: Path) -> None:
        for request, suffix in REQUEST_SUFFIXES.items():
            if stem.with_suffix(suffix).exists():
                self._accept(request, f"by a run that watched it, with {stem.with_suffix(suffix)}")
        # Reopened each time: a network file system shows changes of other hosts only then.
        with contextlib.suppress(OSError), stem.with_suffix(RECORD_SUFFIX).open() as file:
            if (touched := os.fstat(file.fileno()).st_mtime_ns) != self.touched:
                self.touched, self.touched_at = (
                    touched,
                    time.monotonic(),
                )  # the clocks of the hosts may differ
        if not self.stopping and 0 < self.unwatched_seconds <= time.monotonic() - self.touched_at:
            _log(f"not watched for {self.unwatched_seconds:g} s: stopping the command")
            self.stopping = UNWATCHED

    def _accept(self, request: int, origin: str) -> None:
        if not self.stopping:
            self.stopping = REQUESTED
            if self.stem is not None:
                _log(f"stop requested {origin}")
        self.skips_grace |= request == KILL

    def _stop_all(self) -> None:
        """Stop all descendants: SIGTERM, `grace_seconds`, SIGKILL."""
        if self.wait_status is None:
            self._write_record(stopping=self.stopping)
            if self.stop_seconds > 0:  # helpers stay alive: a training writes its last checkpoint
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.command_pid, signal.SIGTERM)
                self._wait_for(self._has_command_ended, self.stop_seconds)
        if self._has_command_ended() and self._wait_for(self._is_alone, LINGER_SECONDS):
            return
        deadline = time.monotonic() + self.grace_seconds
        if not self._has_command_ended():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.command_pid, signal.SIGTERM)
            # The command may want to stop its own children first.
            self._wait_for(self._has_command_ended, self.grace_seconds)
        if leftovers := descendants(os.getpid()):
            _log(f"ending leftover processes: {', '.join(map(_describe, leftovers))}")
            _signal(leftovers, signal.SIGTERM)
        if self._wait_for(self._is_alone, deadline - time.monotonic()):
            return
        give_up = time.monotonic() + KILL_SECONDS
        while stubborn := descendants(os.getpid()):
            if time.monotonic() > give_up:
                _log(f"SIGKILL did not end: {', '.join(map(_describe, stubborn))}")
                return
            _signal(stubborn, signal.SIGKILL)
            self._pause(SCAN_SECONDS)
        self._pause(0)

    def _has_command_ended(self) -> bool:
        return self.wait_status is not None

    def _is_alone(self) -> bool:
        if descendants(os.getpid()):
            return False
        self._pause(0)  # reap the last ones
        return True

    def _wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not condition():
            if self.skips_grace or time.monotonic() >= deadline:
                return False
            self._pause(SCAN_SECONDS)
        return True

    def _exit_as_command(self) -> NoReturn:
        exit_code = 128 + signal.SIGTERM
        if self.wait_status is not None:
            exit_code = os.waitstatus_to_exitcode(self.wait_status)
        self._write_record(exit_code=exit_code)  # before the locks are released at exit
        if exit_code < 0:
            resource.setrlimit(
                resource.RLIMIT_CORE, (0, 0)
            )  # the command has already dumped its core
            for number in AWAITED_SIGNALS:
                signal.signal(number, signal.SIG_IGN)  # drop pending signals
            with contextlib.suppress(OSError, ValueError):
                signal.signal(-exit_code, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            os.kill(os.getpid(), -exit_code)
        os._exit(exit_code if exit_code >= 0 else 128 - exit_code)


def _copy_without_secrets(reader: int) -> None:
    """Copy lines from the pipe to stdout, the log, until every process has closed its end."""
    pending = b""
    while chunk := os.read(reader, CHUNK_BYTES):
        pending += chunk
        end = max(pending.rfind(b"\n"), pending.rfind(b"\r")) + 1 or (
            len(pending) if len(pending) > CHUNK_BYTES else 0
        )
        _write(pending[:end])
        pending = pending[end:]
    _write(pending)


def _write(output: bytes) -> None:
    remaining = redact(output.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
    with contextlib.suppress(OSError):  # a full disk must not stop the command
        while remaining:
            remaining = remaining[os.write(1, remaining) :]


def _signal(processes: dict[int, str], number: int) -> None:
    for pid, start_time in processes.items():
        # The pid may have been reused since the scan; then the start time differs.
        if (fields := stat_fields(pid)) and fields[19] == start_time:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def _describe(pid: int) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/comm", errors="replace") as comm:
        return f"{pid} ({comm.read().strip()})"
    return str(pid)


def _log(message: str) -> None:
    with contextlib.suppress(OSError):  # a full disk must not stop supervision
        os.write(2, f"[supervisor] {message}\n".encode())


if __name__ == "__main__":
    Supervisor(sys.argv[2:], **json.loads(sys.argv[1])).run()
