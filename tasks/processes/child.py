"""Child processes that never outlive this one: commands run to completion, and servers for the
length of a block.

    this process -> supervisor.py (own session, subreaper) -> command -> whatever the command starts
                        |   ^------ a pipe with the output ------+
                        +-- log file without secrets, followed from here: no child holds a pipe or
                            terminal of ours

Linux only, because it needs the parent-death signal and subreapers.
"""

from __future__ import annotations

import contextlib
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
from typing import Any

import durable
from dapo_core.errors import DapoError
from dapo_core.machine.stopping import ECHO_SECONDS
from heartbeat import heartbeat
from redaction import is_secret, redact
from tasks.processes import supervisor
from tasks.processes.supervisor import KILL, STOP

logger = logging.getLogger(__name__)

OUTPUT_AT_ONCE = {"PYTHONUNBUFFERED": "1"}  # otherwise Python buffers the last lines
GRACE_SECONDS = 10.0
POLL_SECONDS = 0.1
NUM_ERROR_LINES = 20
FULL_DISK_BYTES = 64 * 1024
MAX_LINE_BYTES = 64 * 1024
MAX_TEMPORARY_CHARS = 50  # paths of sockets below must stay under 108
STOP_MARGIN_SECONDS = supervisor.LEFTOVER_SECONDS + supervisor.KILL_SECONDS + 5.0
# The user must act (2, as for usage errors), or stopped the command, which a retry must not undo.
LASTING_EXIT_CODES = (2, 128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM)


class ChildProcessFailed(DapoError, RuntimeError):
    """A child process failed; the message has its exit status, last lines and log path."""

    is_lasting = False
    exit_code: int | None = None  # negative: the signal that killed it; None if it never ran
    summary: str = ""  # the message without the last lines, for places that already show them


class SupervisedProcess:
    """A command that logs to a file and ends with this process; see `background_command`."""

    def __init__(
        self, label: str, log_path: Path, log_offset: int, popen: subprocess.Popen[bytes]
    ) -> None:
        self.label = label
        self.log_path = log_path
        self.log_offset = log_offset  # where its output begins
        self._popen = popen

    @property
    def pid(self) -> int:
        """The pid of the supervisor, the ancestor of the command."""
        return self._popen.pid

    def poll(self) -> int | None:
        """None while the command runs, then its exit code; negative if a signal killed it."""
        return self._popen.poll()

    def request(self, request: signal.Signals) -> None:
        """Ask the supervisor to STOP or KILL the command and all its descendants."""
        self._popen.send_signal(request)

    def tail(self, num_lines: int) -> list[str]:
        """The last lines of this command, without those of earlier commands in the same log."""
        return durable.tail(self.log_path, num_lines, self.log_offset)

    def failure(self) -> ChildProcessFailed:
        """The error for a command that ended: exit status, last lines, path of the log."""
        exit_code = self.poll()
        assert exit_code is not None
        lines = self.tail(NUM_ERROR_LINES) or ["(it wrote nothing)"]
        status, folder = f"{self.label} {describe_exit(exit_code)}", self.log_path.parent
        if durable.is_full(folder, FULL_DISK_BYTES):
            status += (
                f", and the disk of {folder} is full: its last output may be missing; free some "
                "space first"
            )
        shown = redact("\n".join(f"  | {line}" for line in lines))
        error = ChildProcessFailed(f"{status}. Its last lines, from {self.log_path}:\n{shown}")
        error.exit_code, error.is_lasting = exit_code, exit_code in LASTING_EXIT_CODES
        error.summary = f"{status}; its log is {self.log_path}"
        return error

    def forward_lines_to(self, on_line: Callable[[str], None] | None) -> None:
        """Call `on_line` (default: log) with each line until the command ends.

        Raises ChildProcessFailed if the exit code is not 0.
        """
        for line in self._follow():
            if on_line is not None:
                on_line(line)
            else:
                logger.info("[%s] %s", self.label, line)
        if self.poll() != 0:
            raise self.failure()

    def stop(self) -> None:
        """Stop the command and its descendants: SIGTERM, a grace period, SIGKILL.

        Meanwhile the heartbeat shows the command's last line.
        A second interrupt skips the grace period. One within a second of the first only counts as
        its echo, because some wrappers repeat the terminal's signal; it is raised at the end.
        """
        started, echo = time.monotonic(), None
        with heartbeat(lambda: f"{self.label} is stopping: {''.join(self.tail(1))}"):
            while True:
                try:
                    if self.poll() is not None:
                        break
                    self.request(STOP)
                    time.sleep(POLL_SECONDS)
                except BaseException as error:
                    if isinstance(error, Exception) or time.monotonic() >= started + ECHO_SECONDS:
                        self.request(KILL)
                        raise
                    echo = error
        if echo is not None:
            raise echo

    def _follow(self) -> Iterator[str]:
        """Yield the lines of the command until it ends; invalid UTF-8 is replaced."""
        pending, is_over = b"", False
        with self.log_path.open("rb") as log:
            log.seek(self.log_offset)
            while not is_over:
                is_over = self.poll() is not None  # before reading, to not miss the last output
                if os.fstat(log.fileno()).st_size < log.tell():  # truncated by log rotation
                    self.log_offset = log.seek(0)
                *lines, pending = (pending + log.read()).split(b"\n")
                if pending and (is_over or len(pending) > MAX_LINE_BYTES):
                    lines, pending = [*lines, pending], b""
                for line in lines:  # a progress bar rewrites its line with \r: keep the last state
                    yield line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", errors="replace")
                if not is_over:
                    time.sleep(POLL_SECONDS)


def dapo_command(*arguments: str | Path) -> list[str]:
    """`dapo ARGUMENTS` with this interpreter, wherever the console script is installed."""
    return [sys.executable, "-m", "flows.cli", *map(str, arguments)]


def run_command(
    command: Sequence[str],
    *,
    log_path: str | os.PathLike[str],
    label: str,
    on_line: Callable[[str], None] | None = None,
    grace_seconds: float = GRACE_SECONDS,
    locks: Sequence[int] = (),
) -> None:
    """Run a command to completion and pass each line of output to `on_line` (default: log).

    Otherwise like `background_command`. Any interruption, including cancellation, stops the command
    before it propagates. Raises ChildProcessFailed if the exit code is not 0.
    """
    with background_command(
        command, log_path=log_path, label=label, grace_seconds=grace_seconds, locks=locks
    ) as process:
        process.forward_lines_to(on_line)


@contextlib.contextmanager
def background_command(
    command: Sequence[str],
    *,
    log_path: str | os.PathLike[str],
    label: str,
    env: Mapping[str, str | None] | None = None,
    grace_seconds: float = GRACE_SECONDS,
    locks: Sequence[int] = (),
    folder_variable: str | None = None,
) -> Iterator[SupervisedProcess]:
    """Yield a running command that is stopped, with its descendants, when the block exits.

    It also ends if this process dies, even by SIGKILL; `locks` are held until all of it has ended.
    `env` updates the environment; None removes a variable. Output is appended to `log_path`. The
    variable `folder_variable` is set to a new folder for sockets, which is removed afterwards.
    Raises ChildProcessFailed if a command of an earlier attempt still writes to the log.
    """
    path = prepare_log(log_path, label)
    with contextlib.ExitStack() as stack:
        environment, folder = dict(env or {}), None
        if folder_variable is not None:
            environment[folder_variable] = folder = stack.enter_context(new_socket_folder())
        log_lock = _lock_log(path, label, grace_seconds + STOP_MARGIN_SECONDS)
        settings = {"parent_pid": os.getpid(), "grace_seconds": grace_seconds, "folder": folder}
        log_offset = path.stat().st_size
        with os.fdopen(log_lock):
            popen = start_supervisor(command, path, [log_lock, *locks], settings, environment)
        process = SupervisedProcess(label, path, log_offset, popen)
        logger.info("%s runs under pid %d, its output is in %s", label, process.pid, path)
        stack.callback(process.stop)
        yield process


def prepare_log(log_path: str | os.PathLike[str], label: str) -> Path:
    """Create a log file and return its absolute path.

    Raises ChildProcessFailed if it cannot be opened, and on systems other than Linux.
    """
    if sys.platform != "linux":
        raise ChildProcessFailed(
            f"{label}: child processes are only supervised on Linux, not on {sys.platform}"
        )
    path = Path(log_path).absolute()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        failure = ChildProcessFailed(
            f"{label}: its log {path} cannot be opened: {error}; move the existing file or folder "
            "away"
        )
        failure.is_lasting = True
        raise failure from None
    return path


def _lock_log(path: Path, label: str, patience_seconds: float) -> int:
    """Lock a log for a supervisor, which holds the lock until all its descendants have ended.

    Without it, an attempt after a SIGKILL of this process could start beside processes that are
    still ending. Raises ChildProcessFailed after `patience_seconds`.
    """
    deadline, is_logged = time.monotonic() + patience_seconds, False
    while (lock := durable.try_lock(path)) is None:
        if time.monotonic() > deadline:
            raise ChildProcessFailed(
                f"{label}: processes of an earlier run still hold {path} after "
                f"{patience_seconds:.0f} s; "
                f"find them with: fuser -v {shlex.quote(str(path))}"
            )
        if not is_logged:
            logger.info("%s waits for processes of an earlier run that still hold %s", label, path)
            is_logged = True
        time.sleep(POLL_SECONDS)
    return lock


def start_supervisor(
    command: Sequence[str],
    log_path: Path,
    locks: Sequence[int],
    settings: Mapping[str, Any],
    env: Mapping[str, str | None] | None = None,
) -> subprocess.Popen[bytes]:
    """Start the command under a supervisor with the locks; `env` as in `background_command`.

    Prefect credentials are not passed on, because no stage talks to its server.
    """
    inherited = {
        name: value for name, value in os.environ.items() if not _is_prefect_secret(name, value)
    }
    environment = {**OUTPUT_AT_ONCE, **inherited, **(env or {})}
    words = [sys.executable, "-I", "-S", supervisor.__file__, json.dumps(settings)]
    with log_path.open("ab") as log:
        return subprocess.Popen(
            [*words, *map(os.fspath, command)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={name: value for name, value in environment.items() if value is not None},
            start_new_session=True,
            pass_fds=locks,
        )


def _is_prefect_secret(name: str, value: str) -> bool:
    return name.startswith("PREFECT_") and (
        is_secret(name, value) or name.endswith("_CONNECTION_URL")
    )


def describe_exit(exit_code: int) -> str:
    """Describe a Popen return code, such as "ended with exit code 3"."""
    if exit_code - 128 in (signal.SIGINT, signal.SIGTERM):
        return (
            f"ended with exit code {exit_code}: stopped by {signal.Signals(exit_code - 128).name}, "
            "not by us"
        )
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    if exit_code == -signal.SIGKILL:
        return (
            "was killed by SIGKILL (not by us; most often the kernel does this when memory runs "
            "out)"
        )
    is_known = -exit_code in set(signal.Signals)
    return (
        f"was killed by {signal.Signals(-exit_code).name if is_known else f'signal {-exit_code}'}"
    )


def new_socket_folder() -> tempfile.TemporaryDirectory[str]:
    """Create a folder for sockets, whose paths are limited, in the folder for temporary files."""
    place = tempfile.gettempdir()
    return tempfile.TemporaryDirectory(
        prefix="dapo-",
        dir=place if len(place) <= MAX_TEMPORARY_CHARS else "/tmp",
        ignore_cleanup_errors=True,
    )
