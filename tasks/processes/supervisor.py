"""A small process between ours and a command, so that nothing the command started outlives us. Linux only.

Run by path, never imported by the command's side:  python -I -S supervisor.py SETTINGS COMMAND...
where SETTINGS is JSON: parent_pid, grace_seconds, `watch`, null or the arguments of `Watch`, and `folder`, null or
what is removed when the command and all below it are gone.

As child subreaper it stays the ancestor of everything below the command, daemons in other sessions included.
It ends all of that when its parent dies (parent-death signal), when it gets SIGTERM, and when the command ends;
then it ends as the command did (same exit code or signal). A watched command may outlive the parent: it goes on
as long as somebody watches. Imports the standard library only: it starts in 50 ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import signal
import sys
import time
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PARENT_MAY_BE_DEAD = signal.SIGUSR1  # also sent when only the thread that started us ends
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
WATCHED_SIGNALS = (*STOP_SIGNALS, signal.SIGCHLD, PARENT_MAY_BE_DEAD)
PARENT_POLL_SECONDS = 1.0
WATCH_POLL_SECONDS = 0.5
SCAN_SECONDS = 0.05
LINGER_SECONDS = 0.5  # helpers such as multiprocessing's resource tracker end by themselves just after the command
KILL_SECONDS = 10.0  # a process in uninterruptible sleep outlasts SIGKILL; waiting longer does not help
CANNOT_START_EXIT_CODE = 127  # as a shell has it
WATCH_SUFFIX = ".watch"
RECORD_SUFFIX = ".json"
STOP, KILL = "stop", "kill"  # requests; the second is for those who cannot wait for the first
REQUEST_SIGNALS = {STOP: signal.SIGTERM, KILL: signal.SIGQUIT}  # the same where no request can be written
UNWATCHED, ASKED, ORPHANED = "unwatched", "asked", "orphaned"  # why a command is stopped


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


class Watch:
    """The files beside a log by which its command is found, watched and stopped from anywhere that shares them.

    STEM.watch: touched by those who watch; holds a request, "stop ID" or "kill ID"; locked while we live.
    STEM.json: who we are, what the command works on, why the command is being stopped, and how it ended.
    """

    def __init__(self, stem: str, run_id: str, unwatched_seconds: float, stop_seconds: float, work: str) -> None:
        self.path = stem + WATCH_SUFFIX
        self.record_path = stem + RECORD_SUFFIX
        self.run_id = run_id
        self.unwatched_seconds = unwatched_seconds
        self.stop_seconds = stop_seconds
        self.work = work
        self.lock = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)  # the command does not inherit it
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        self.record: dict[str, Any] = {}
        self.touched: tuple[int, str] = (0, "")
        self.touched_at = time.monotonic()

    def write(self, **changes: Any) -> None:
        """Adds to the record, in one step for those who read it."""
        self.record |= changes
        partial = f"{self.record_path}.partial"
        try:
            with open(partial, "w", encoding="utf-8") as file:
                json.dump(self.record, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, self.record_path)
        except OSError as error:  # a full disk must not stop the supervision
            _say(f"cannot write {self.record_path}: {error}")

    def look(self) -> str:
        """Returns what is asked of us, STOP, KILL or nothing, and notes whether somebody watches."""
        try:
            # Opened anew: a network file system shows another host's changes only then.
            with open(self.path, encoding="utf-8", errors="replace") as file:
                touched = (os.fstat(file.fileno()).st_mtime_ns, file.read(200))
        except OSError:  # the shared file system is away, and so are those who would watch through it
            return ""
        if touched != self.touched:  # by our own clock: those of other hosts may differ
            self.touched, self.touched_at = touched, time.monotonic()
        request, _, run_id = touched[1].strip().partition(" ")
        return request if run_id == self.run_id else ""

    def is_unwatched(self) -> bool:
        """Whether nobody has touched the file for too long."""
        return 0 < self.unwatched_seconds <= time.monotonic() - self.touched_at


class Supervisor:
    """Runs one command and ends with it; `run` does not return."""

    def __init__(
        self, parent_pid: int, grace_seconds: float, watch: Watch | None, folder: str | None, command: list[str]
    ) -> None:
        self.parent_pid = parent_pid
        self.grace_seconds = grace_seconds
        self.watch = watch
        self.folder = folder
        self.command = command
        self.command_pid = 0
        self.wait_status: int | None = None
        self.stop_reason = ""
        self.is_hurried = False
        self.libc = ctypes.CDLL(None, use_errno=True)

    def run(self) -> NoReturn:
        """Runs the command to its end, or to ours, and exits the way the command did."""
        signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED_SIGNALS)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an inherited "ignore" would hide how the command ended
        self._prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._prctl(PR_SET_PDEATHSIG, PARENT_MAY_BE_DEAD)
        self._introduce()
        if not self._is_orphaned():
            self.command_pid = os.fork()
            if self.command_pid == 0:
                self._exec_command()
            self._watch()
        self._end_everything()
        if self.folder is not None:
            import shutil  # as long to import as all else here

            shutil.rmtree(self.folder, ignore_errors=True)
        self._exit_as_command()

    def _introduce(self) -> None:
        if self.watch is not None:
            self.watch.write(
                run_id=self.watch.run_id,
                pid=os.getpid(),
                host=os.uname().nodename,
                started_at=time.time(),
                log_offset=os.fstat(2).st_size,
                unwatched_seconds=self.watch.unwatched_seconds,
                work=self.watch.work,
            )

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

    def _is_orphaned(self) -> bool:
        """Whether the parent is dead whom the command must not outlive."""
        may_outlive = self.watch is not None and self.watch.unwatched_seconds > 0
        return not may_outlive and os.getppid() != self.parent_pid

    def _watch(self) -> None:
        """Returns once the command ended, or there is a reason to stop it."""
        while self.wait_status is None and not self.stop_reason:
            self._pause(WATCH_POLL_SECONDS if self.watch else PARENT_POLL_SECONDS)
            if self._is_orphaned():
                _say(f"parent process {self.parent_pid} is gone: ending the command")
                self.stop_reason = ORPHANED
            elif self.watch is not None and self.watch.is_unwatched():
                _say(f"nobody has watched for {self.watch.unwatched_seconds:g} s: stopping the command")
                self.stop_reason = UNWATCHED

    def _pause(self, seconds: float) -> None:
        """Sleeps until a watched signal comes or `seconds` are over; notes requests, reaps dead children."""
        received = signal.sigtimedwait(WATCHED_SIGNALS, seconds)
        if received is not None and received.si_signo in STOP_SIGNALS:
            self._note_request(f"{signal.Signals(received.si_signo).name} of process {received.si_pid}")
            self.is_hurried |= received.si_signo == REQUEST_SIGNALS[KILL]
        if self.watch is not None and (request := self.watch.look()):
            self._note_request(f"a run that watched it and was stopped itself, in {self.watch.path}")
            self.is_hurried |= request == KILL
        with contextlib.suppress(ChildProcessError):
            while (reaped := os.waitpid(-1, os.WNOHANG))[0] != 0:
                if reaped[0] == self.command_pid:
                    self.wait_status = reaped[1]

    def _note_request(self, by: str) -> None:
        if not self.stop_reason:
            self.stop_reason = ASKED
            if self.watch is not None:  # whose other watchers must learn why it ends
                _say(f"asked to stop by {by}")

    def _end_everything(self) -> None:
        """Ends all descendants: SIGTERM, `grace_seconds` to clean up, SIGKILL."""
        if self.wait_status is None and self.command_pid and self.watch is not None:
            self.watch.write(stopping=self.stop_reason)
            self._stop_command_alone(self.watch.stop_seconds)
        if self.wait_status is not None and self._are_all_gone(time.monotonic() + LINGER_SECONDS):
            return
        deadline = time.monotonic() + self.grace_seconds
        if self.wait_status is None and self.command_pid:
            self._terminate_command_group()
            # What the command started is first left to the command: it may want to end it in order.
            while self.wait_status is None and not self._is_over(deadline):
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

    def _stop_command_alone(self, stop_seconds: float) -> None:
        """Lets the command end in order with all its helpers alive: a training writes its last checkpoint."""
        deadline = time.monotonic() + stop_seconds
        if stop_seconds > 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.command_pid, signal.SIGTERM)
        while self.wait_status is None and not self._is_over(deadline):
            self._pause(SCAN_SECONDS)

    def _is_over(self, deadline: float) -> bool:
        return self.is_hurried or time.monotonic() >= deadline

    def _terminate_command_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.command_pid, signal.SIGTERM)

    def _are_all_gone(self, deadline: float) -> bool:
        """Returns whether no descendant is left, waiting for that until `deadline`."""
        while descendants(os.getpid()):
            if self._is_over(deadline):
                return False
            self._pause(SCAN_SECONDS)
        self._pause(0)
        return True

    def _exit_as_command(self) -> NoReturn:
        exit_code = 128 + signal.SIGTERM
        if self.wait_status is not None:
            exit_code = os.waitstatus_to_exitcode(self.wait_status)
        if self.watch is not None:
            self.watch.write(exit_code=exit_code)  # our locks are released after it, by our end
        if exit_code < 0:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command has dumped its core already
            with contextlib.suppress(OSError, ValueError):
                signal.signal(-exit_code, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            os.kill(os.getpid(), -exit_code)
        os._exit(exit_code if exit_code >= 0 else 128 - exit_code)


def main(settings: str, command: list[str]) -> NoReturn:
    """Supervises the command as SETTINGS say."""
    chosen = json.loads(settings)
    watch = Watch(**chosen["watch"]) if chosen["watch"] else None
    Supervisor(chosen["parent_pid"], chosen["grace_seconds"], watch, chosen["folder"], command).run()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
