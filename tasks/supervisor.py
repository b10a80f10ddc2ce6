"""A small process between ours and a command, so that nothing the command started outlives us. Linux only.

Run by path, never imported by the command's side:  python -I -S supervisor.py PARENT_PID GRACE_SECONDS COMMAND...

As child subreaper it stays the ancestor of everything below the command, daemons in other sessions included.
It ends all of that when its parent dies (parent-death signal), when it gets SIGTERM, and when the command ends;
then it ends as the command did (same exit code or signal). Imports the standard library only: it starts in 50 ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from typing import NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PARENT_MAY_BE_DEAD = signal.SIGUSR1  # also sent when only the thread that started us ends
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
WATCHED_SIGNALS = (*STOP_SIGNALS, signal.SIGCHLD, PARENT_MAY_BE_DEAD)
PARENT_POLL_SECONDS = 1.0
SCAN_SECONDS = 0.05
LINGER_SECONDS = 0.5  # helpers such as multiprocessing's resource tracker end by themselves just after the command
KILL_SECONDS = 10.0  # a process in uninterruptible sleep outlasts SIGKILL; waiting longer does not help
CANNOT_START_EXIT_CODE = 127  # as a shell has it


def descendants(ancestor_pid: int) -> dict[int, str]:
    """Returns {pid: start time} of every living process below `ancestor_pid`, parents before children."""
    children: dict[int, list[tuple[int, str]]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := _stat_fields(int(entry))) and fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append((int(entry), fields[19]))
    found: dict[int, str] = {}
    waiting = [ancestor_pid]
    while waiting:
        for pid, start_time in children.get(waiting.pop(0), []):
            found[pid] = start_time
            waiting.append(pid)
    return found


def signal_descendants(ancestor_pid: int, signal_number: int) -> dict[int, str]:
    """Sends the signal to every process below `ancestor_pid` and returns them as {pid: start time}."""
    found = descendants(ancestor_pid)
    for pid, start_time in found.items():
        # The pid may have been given to a stranger since the scan: the start time tells.
        if (fields := _stat_fields(pid)) and fields[19] == start_time:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal_number)
    return found


def _stat_fields(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat after the name (state, ppid, ... start time at 19), [] when gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()
    except OSError:
        return []


def _describe(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as comm:
            return f"{pid} ({comm.read().strip()})"
    except OSError:
        return str(pid)


def _say(message: str) -> None:
    with contextlib.suppress(OSError):  # a full disk must not stop the supervision
        os.write(2, f"[supervisor] {message}\n".encode())


class Supervisor:
    """Runs one command and ends with it; `run` does not return."""

    def __init__(self, parent_pid: int, grace_seconds: float, command: list[str]) -> None:
        self.parent_pid = parent_pid
        self.grace_seconds = grace_seconds
        self.command = command
        self.command_pid = 0
        self.wait_status: int | None = None
        self.is_stopping = False
        self.libc = ctypes.CDLL(None, use_errno=True)

    def run(self) -> NoReturn:
        """Runs the command to its end, or to ours, and exits the way the command did."""
        signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED_SIGNALS)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an inherited "ignore" would hide how the command ended
        self._prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._prctl(PR_SET_PDEATHSIG, PARENT_MAY_BE_DEAD)
        if not self._is_parent_dead():
            self.command_pid = os.fork()
            if self.command_pid == 0:
                self._exec_command()
            self._watch()
        self._end_everything()
        self._exit_as_command()

    def _exec_command(self) -> NoReturn:
        try:
            os.setsid()
            # Should the supervisor itself be killed, the command at least goes with it.
            self._prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):  # the command would inherit that
                signal.signal(ignored_by_python, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            os.execvp(self.command[0], self.command)
        except (OSError, ValueError) as error:
            _say(f"cannot start {self.command[0]!r}: {error}")
        finally:
            os._exit(CANNOT_START_EXIT_CODE)

    def _prctl(self, option: int, value: int) -> None:
        if self.libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")

    def _is_parent_dead(self) -> bool:
        return os.getppid() != self.parent_pid

    def _watch(self) -> None:
        """Returns once the command ended, we were told to stop, or our parent died."""
        while self.wait_status is None and not self.is_stopping:
            self._pause(PARENT_POLL_SECONDS)
            if self._is_parent_dead():
                _say(f"parent process {self.parent_pid} is gone: ending the command")
                return

    def _pause(self, seconds: float) -> None:
        """Sleeps until a watched signal comes or `seconds` are over; notes stop signals, reaps dead children."""
        received = signal.sigtimedwait(WATCHED_SIGNALS, seconds)
        if received is not None and received.si_signo in STOP_SIGNALS:
            self.is_stopping = True
        with contextlib.suppress(ChildProcessError):
            while (reaped := os.waitpid(-1, os.WNOHANG))[0] != 0:
                if reaped[0] == self.command_pid:
                    self.wait_status = reaped[1]

    def _end_everything(self) -> None:
        """Ends all descendants: SIGTERM, `grace_seconds` to clean up, SIGKILL."""
        if self.wait_status is not None and self._are_all_gone(time.monotonic() + LINGER_SECONDS):
            return
        deadline = time.monotonic() + self.grace_seconds
        if self.wait_status is None and self.command_pid:
            self._terminate_command_group()
            # What the command started is first left to the command: it may want to end it in order.
            while self.wait_status is None and time.monotonic() < deadline:
                self._pause(SCAN_SECONDS)
        if left_over := descendants(os.getpid()):
            _say(f"ending processes that were left over: {', '.join(map(_describe, left_over))}")
            signal_descendants(os.getpid(), signal.SIGTERM)
        if self._are_all_gone(deadline):
            return
        give_up = time.monotonic() + KILL_SECONDS
        while killed := signal_descendants(os.getpid(), signal.SIGKILL):
            if time.monotonic() > give_up:
                _say(f"not even SIGKILL ended: {', '.join(map(_describe, killed))}")
                return
            self._pause(SCAN_SECONDS)
        self._pause(0)

    def _terminate_command_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.command_pid, signal.SIGTERM)

    def _are_all_gone(self, deadline: float) -> bool:
        """Returns whether no descendant is left, waiting for that until `deadline`."""
        while descendants(os.getpid()):
            if time.monotonic() >= deadline:
                return False
            self._pause(SCAN_SECONDS)
        self._pause(0)
        return True

    def _exit_as_command(self) -> NoReturn:
        if self.wait_status is None:
            os._exit(128 + signal.SIGTERM)
        exit_code = os.waitstatus_to_exitcode(self.wait_status)
        if exit_code < 0:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command has dumped its core already
            with contextlib.suppress(OSError, ValueError):
                signal.signal(-exit_code, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            os.kill(os.getpid(), -exit_code)
        os._exit(exit_code if exit_code >= 0 else 128 - exit_code)


if __name__ == "__main__":
    Supervisor(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]).run()
