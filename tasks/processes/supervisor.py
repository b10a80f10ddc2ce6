"""Runs one command and leaves none of its processes behind. Linux only.

    python -I -S supervisor.py SETTINGS COMMAND...     SETTINGS: the other arguments of `Supervisor`

As child subreaper the supervisor remains the ancestor of all descendants of the command, including
daemons in other sessions. It ends them on SIGTERM (SIGQUIT: without a grace period), when the
command ends, and when its parent dies. It then exits like the command, with the same exit code or
signal.
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
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # isolated mode (-I) omits it
from durable import PR_SET_PDEATHSIG
from redaction import redact

PR_SET_CHILD_SUBREAPER = 36
PARENT_MAY_BE_DEAD = signal.SIGUSR1  # also sent when only the thread that started us ends
STOP, KILL = signal.SIGTERM, signal.SIGQUIT  # requests: with and without a grace period
STOP_SIGNALS = (STOP, KILL, signal.SIGINT, signal.SIGHUP)
AWAITED_SIGNALS = (*STOP_SIGNALS, signal.SIGCHLD, PARENT_MAY_BE_DEAD)
POLL_SECONDS = 0.5
SCAN_SECONDS = 0.05
LINGER_SECONDS = 0.5  # helpers such as multiprocessing's resource tracker exit after the command
LEFTOVER_SECONDS = 10.0  # at most, for processes that the command left behind, after SIGTERM
KILL_SECONDS = 10.0  # a process in uninterruptible sleep survives SIGKILL
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
    """The fields of /proc/PID/stat after the name (state, ppid, ..., start time at 19), or []."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", errors="replace") as stat:
        return stat.read().rpartition(")")[2].split()
    return []


class Supervisor:
    """Runs one command and exits with it; `run` does not return."""

    def __init__(
        self,
        command: list[str],
        parent_pid: int | None,  # None: outlives its parent
        grace_seconds: float,  # for the command to end by itself after SIGTERM
        folder: str | None,  # removed at the end
    ) -> None:
        self.command = command
        self.parent_pid = parent_pid
        self.grace_seconds = grace_seconds
        self.folder = folder
        self.command_pid = 0
        self.output = threading.Thread()  # copies the command's output
        self.wait_status: int | None = None
        self.is_stopping = False
        self.skips_grace = False
        self.libc = ctypes.CDLL(None, use_errno=True)

    def run(self) -> NoReturn:
        """Run the command until it ends or must be stopped, then exit like it."""
        signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED_SIGNALS)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # "ignore" would hide its exit status
        self._prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._prctl(PR_SET_PDEATHSIG, PARENT_MAY_BE_DEAD)
        self._check_parent()
        if not self.is_stopping:
            reader, writer = os.pipe()
            self.command_pid = os.fork()
            if self.command_pid == 0:
                self._exec_command(writer)
            os.close(writer)
            self.output = threading.Thread(
                target=_copy_without_secrets, args=(reader,), daemon=True
            )
            self.output.start()
            while self.wait_status is None and not self.is_stopping:
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
            for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):  # would be inherited
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

    def _pause(self, seconds: float) -> None:
        """Wait for a signal or `seconds`, check for reasons to stop, and reap dead children."""
        received = signal.sigtimedwait(AWAITED_SIGNALS, seconds)
        if received is not None and received.si_signo in STOP_SIGNALS:
            if received.si_pid != self.parent_pid and not self.is_stopping:
                name = signal.Signals(received.si_signo).name
                _log(f"stop requested by {name} of {received.si_pid}")
            self.is_stopping = True
            self.skips_grace |= received.si_signo == KILL
        self._check_parent()
        with contextlib.suppress(ChildProcessError):
            while (reaped := os.waitpid(-1, os.WNOHANG))[0] != 0:
                if reaped[0] == self.command_pid:
                    self.wait_status = reaped[1]

    def _check_parent(self) -> None:
        if not self.is_stopping and self.parent_pid not in (None, os.getppid()):
            _log(f"parent process {self.parent_pid} is gone: ending the command")
            self.is_stopping = True

    def _stop_all(self) -> None:
        """Stop the command, then what it leaves behind: SIGTERM, a grace period, SIGKILL.

        Only the command gets the first SIGTERM: a training needs its helpers for its last
        checkpoint.
        """
        if not self._has_command_ended():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.command_pid, signal.SIGTERM)
            self._wait_for(self._has_command_ended, self.grace_seconds)
        if self._has_command_ended() and self._wait_for(self._is_alone, LINGER_SECONDS):
            return
        if leftovers := descendants(os.getpid()):
            _log(f"ending leftover processes: {', '.join(map(_describe, leftovers))}")
            _signal(leftovers, signal.SIGTERM)
        if self._wait_for(self._is_alone, min(self.grace_seconds, LEFTOVER_SECONDS)):
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
        if exit_code < 0:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command has dumped its core
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
