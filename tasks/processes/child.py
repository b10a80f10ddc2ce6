"""Child processes that never outlive us: run a command to its end, or keep a server for the length of a block.

(A command that may outlive us is in watched_command.py.)

    our process -> supervisor.py (own session, subreaper) -> command -> whatever the command starts
                        |
                        +-- log file, which we tail: no child holds a pipe or a terminal of ours

Only Linux has the parent-death signal and subreapers this rests on; elsewhere starting a command is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from dapo_core.errors import ChildProcessFailed
from dapo_core.stopping import ECHO_SECONDS
from tasks.processes import supervisor

logger = logging.getLogger(__name__)

GRACE_SECONDS = 10.0
POLL_SECONDS = 0.1
NUM_ERROR_LINES = 20
MAX_LINE_BYTES = 64 * 1024
MAX_SOCKET_PLACE = 50  # characters; the path of a socket in a folder below has less than 108
STOP_MARGIN_SECONDS = supervisor.KILL_SECONDS + 5.0


class LogTail:
    """Reads the lines that are appended to a file, each once; invalid UTF-8 is replaced, never an error."""

    def __init__(self, path: Path, offset: int) -> None:
        self.path = path
        self.offset = offset
        self.pending = b""

    def read_lines(self, is_final: bool = False) -> list[str]:
        """Returns the lines completed since the last call; with `is_final` also a last one without newline."""
        with open(self.path, "rb") as log:
            log.seek(self.offset)
            content = log.read()
        self.offset += len(content)
        *lines, self.pending = (self.pending + content).split(b"\n")
        if self.pending and (is_final or len(self.pending) > MAX_LINE_BYTES):
            lines.append(self.pending)
            self.pending = b""
        return [_decode_line(line) for line in lines]


class SupervisedProcess:
    """A running command under our supervisor; use it through `background_command` or `run_command`."""

    def __init__(
        self, label: str, popen: subprocess.Popen[bytes], log_path: Path, log_offset: int, grace_seconds: float
    ) -> None:
        self.label = label
        self.log_path = log_path
        self.log_offset = log_offset
        self.grace_seconds = grace_seconds
        self._popen = popen

    @property
    def pid(self) -> int:
        """The supervisor's pid; the command and all it starts are below it."""
        return self._popen.pid

    def poll(self) -> int | None:
        """Returns None while the command runs, then its exit code, or minus the signal that killed it."""
        return self._popen.poll()

    def tail(self, num_lines: int) -> list[str]:
        """Returns the last lines this command wrote; lines of earlier commands in the same log are not shown."""
        return read_tail(self.log_path, self.log_offset, num_lines)

    def failure(self) -> ChildProcessFailed:
        """Returns the error to raise for a command that ended: exit status, last lines, path of the log."""
        return describe_failure(self.label, self._popen.wait(), self.log_path, self.log_offset)

    def stop(self) -> None:
        """Ends the command and everything below it: SIGTERM, `grace_seconds` to clean up, SIGKILL.

        An interrupt meanwhile ends our patience; one that comes so soon that it may be the first once more does
        not, and is raised in the end.
        """
        began, echo = time.monotonic(), None
        deadline = began + self.grace_seconds + STOP_MARGIN_SECONDS
        try:
            while self._popen.poll() is None:
                try:
                    self._popen.send_signal(signal.SIGTERM)  # a second one is the first to a supervisor
                    self._popen.wait(deadline - time.monotonic())
                except subprocess.TimeoutExpired:
                    logger.warning("%s: its supervisor %d did not end, killing the tree", self.label, self.pid)
                    break
                except BaseException as error:
                    if isinstance(error, Exception) or time.monotonic() >= began + ECHO_SECONDS:
                        raise
                    echo = error
        finally:
            # Reached alive only when stuck, or when a second interrupt asks for no more patience.
            self._kill()
        if echo is not None:
            raise echo

    def _kill(self) -> None:
        deadline = time.monotonic() + supervisor.KILL_SECONDS
        while self._popen.poll() is None and time.monotonic() < deadline:
            # The supervisor goes last: without it, orphans would leave our sight.
            if not supervisor.signal_descendants(self.pid, signal.SIGKILL):
                self._popen.kill()
            time.sleep(supervisor.SCAN_SECONDS)


def run_command(
    command: Sequence[str],
    *,
    log_path: str | os.PathLike[str],
    label: str,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    on_line: Callable[[str], None] | None = None,
    grace_seconds: float = GRACE_SECONDS,
) -> None:
    """Runs a command to its end and hands each line it writes to `on_line` (default: our log).

    `env` is added to our own environment; output is appended to `log_path`. Whatever interrupts us here,
    cancellation included, ends the command and everything below it before it is raised again.
    Raises ChildProcessFailed when the command does not end with exit code 0.
    """
    tell = on_line or (lambda line: logger.info("[%s] %s", label, line))
    with background_command(
        command, log_path=log_path, label=label, env=env, cwd=cwd, grace_seconds=grace_seconds
    ) as process:
        tail = LogTail(process.log_path, process.log_offset)
        is_over = False
        while not is_over:
            is_over = process.poll() is not None  # asked before reading: what it wrote last is then in the file
            for line in tail.read_lines(is_final=is_over):
                tell(line)
            if not is_over:
                time.sleep(POLL_SECONDS)
        if process.poll() != 0:
            raise process.failure()


@contextlib.contextmanager
def background_command(
    command: Sequence[str],
    *,
    log_path: str | os.PathLike[str],
    label: str,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    grace_seconds: float = GRACE_SECONDS,
    folder_variable: str | None = None,
) -> Iterator[SupervisedProcess]:
    """Yields a running command that is ended, with everything below it, when the block is left in any way.

    Our own death, SIGKILL included, ends it as well. `env` is added to our own environment; output is
    appended to `log_path`, without a pipe. The variable of its environment that `folder_variable` names says a
    folder for its sockets, which is removed after it. Raises ChildProcessFailed when a command of an earlier
    attempt still writes to the same log.
    """
    path = open_place(log_path, label)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(_socket_folder()) if folder_variable else None
        with open(path, "ab") as log:
            lock_log(log, label, grace_seconds + STOP_MARGIN_SECONDS)
            log_offset = log.seek(0, os.SEEK_END)
            own = {**(env or {}), **({folder_variable: folder} if folder_variable and folder else {})}
            popen = start_supervisor(command, log, grace_seconds, env=own, cwd=cwd, folder=folder)
            process = SupervisedProcess(label, popen, path, log_offset, grace_seconds)
        stack.callback(process.stop)
        logger.info("%s runs under pid %d, its output is in %s", label, process.pid, path)
        yield process


def _socket_folder() -> tempfile.TemporaryDirectory[str]:
    place = tempfile.gettempdir()
    return tempfile.TemporaryDirectory(
        prefix="dapo-", dir=place if len(place) <= MAX_SOCKET_PLACE else "/tmp", ignore_cleanup_errors=True
    )


def open_place(log_path: str | os.PathLike[str], label: str) -> Path:
    """Returns the absolute path of a log, whose folder is made; raises ChildProcessFailed but on Linux."""
    if sys.platform != "linux":
        raise ChildProcessFailed(f"{label}: child processes are only supervised on Linux, not on {sys.platform}")
    path = Path(log_path).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def start_supervisor(
    command: Sequence[str],
    log: BinaryIO,
    grace_seconds: float,
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    held: Sequence[int] = (),
    watch: Mapping[str, Any] | None = None,
    folder: str | None = None,
) -> subprocess.Popen[bytes]:
    """Starts the command under its supervisor, which inherits the locked log and the descriptors `held`.

    After the command it removes `folder`, also when we are dead.
    """
    settings = {"parent_pid": os.getpid(), "grace_seconds": grace_seconds, "watch": watch, "folder": folder}
    supervise = [sys.executable, "-I", "-S", supervisor.__file__, json.dumps(settings)]
    return subprocess.Popen(
        [*supervise, *map(os.fspath, command)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        cwd=cwd,
        # Python children would otherwise keep their last lines in a buffer that nobody can tail.
        env={"PYTHONUNBUFFERED": "1", **os.environ, **(env or {})},
        start_new_session=True,
        pass_fds=held,
    )


def read_tail(log_path: Path, log_offset: int, num_lines: int) -> list[str]:
    """Returns the last lines of a log that begin after the offset."""
    with open(log_path, "rb") as log:
        start = max(log_offset, log.seek(0, os.SEEK_END) - MAX_LINE_BYTES)
        log.seek(start)
        lines = log.read().split(b"\n")
    return [_decode_line(line) for line in lines if line][-num_lines:]


def describe_failure(label: str, exit_code: int, log_path: Path, log_offset: int) -> ChildProcessFailed:
    """Returns the error to raise for a command that ended: exit status, last lines, path of the log."""
    lines = read_tail(log_path, log_offset, NUM_ERROR_LINES)
    shown = "\n".join(f"  | {line}" for line in lines) if lines else "  | (it wrote nothing)"
    status = f"{label} {describe_exit(exit_code)}"
    error = ChildProcessFailed(f"{status}. Its last lines, from {log_path}:\n{shown}")
    error.exit_code, error.summary = exit_code, f"{status}; its log is {log_path}"
    return error


def describe_exit(exit_code: int) -> str:
    """Returns "ended with exit code 3" or "was killed by SIGKILL ...", from a Popen return code."""
    if exit_code - 128 in (signal.SIGINT, signal.SIGTERM):
        return (
            f"ended with exit code {exit_code}: told to stop by {signal.Signals(exit_code - 128).name}, not by us"
        )
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    if exit_code == -signal.SIGKILL:
        return f"was killed by {name} (not by us; most often the kernel does this when memory runs out)"
    return f"was killed by {name}"


def lock_log(
    log: BinaryIO, label: str, patience_seconds: float, is_of_use: Callable[[], bool] = lambda: False
) -> bool:
    """Locks the log for the supervisor, which inherits it: the lock lasts until the whole tree is gone.

    After our SIGKILL a new attempt would otherwise start beside processes that are still being ended. Returns
    False, without the lock, as soon as its holder `is_of_use`. Raises ChildProcessFailed when patience is over.
    """
    deadline = time.monotonic() + patience_seconds
    is_told = False
    while True:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if is_of_use():
                return False
            if time.monotonic() > deadline:
                raise ChildProcessFailed(
                    f"{label}: processes of an earlier run still hold {log.name} after {patience_seconds:.0f} s; "
                    f"find them with: fuser -v {shlex.quote(str(log.name))}"
                ) from None
        if not is_told:
            logger.info("%s waits for processes of an earlier run that still hold %s", label, log.name)
            is_told = True
        time.sleep(POLL_SECONDS)


def _decode_line(line: bytes) -> str:
    """Returns the line as text; of a progress bar, which rewrites its line with \\r, the last state."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", errors="replace")
