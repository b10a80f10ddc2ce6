"""The services of a store: a Prefect server and a worker, which outlive the command that starts them.

    STORE/.services/services.json   who runs: pid, start time, command; the server's address and database
                    server.log, worker.log, deploy.log, and locks
                    prefect/        PREFECT_HOME of both: nothing outside the store is touched

Light to import: Prefect's startup plugin asks `api_url` whenever a `prefect` command is typed. Linux only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.artifacts import StoreError
from tasks.serve_model.failure import ServeError

DEFAULT_STORE = Path(".dapo")
FOLDER = ".services"
STATE_FILE = "services.json"
SERVER, WORKER = "server", "worker"
WILDCARD_HOSTS = ("0.0.0.0", "::")
LOOPBACK = "127.0.0.1"
KILL_SECONDS = 10.0
MAX_TAIL_BYTES = 64 * 1024


@dataclass(frozen=True)
class Daemon:
    """A process we started, told apart from any other that gets its pid later by when it started."""

    pid: int
    start: str
    command: list[str]
    log: str
    started_at: float = field(default_factory=time.time)

    @property
    def is_running(self) -> bool:
        """Whether this very process is there and no zombie."""
        return start_of(self.pid) == self.start

    def tail(self, num_lines: int = 20) -> str:
        """Where its log is, and its last lines, indented."""
        return f"{self.log} ends:\n{tail_of(Path(self.log), num_lines)}"

    def stop(self, patience_seconds: float) -> bool:
        """End it by SIGTERM, after `patience_seconds` by SIGKILL; returns whether there was something to end."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            if not self.is_running:  # asked while we hold the handle: what it says is of the process we signal
                return False
            signal.pidfd_send_signal(handle, signal.SIGTERM)
            if not _has_ended(handle, patience_seconds):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                if not _has_ended(handle, KILL_SECONDS):
                    raise ServeError(f"process {self.pid} outlasts SIGKILL: {shlex.join(self.command)}")
        finally:
            os.close(handle)
        return True


@dataclass
class State:
    """What is remembered between commands. Passwords are not: see `database_needs_password`."""

    machine: str = field(default_factory=socket.gethostname)
    host: str = LOOPBACK
    port: int = 0
    database: str = ""  # without password; "" is SQLite in PREFECT_HOME
    database_needs_password: bool = False
    deployed: str = ""  # digest of what was registered
    daemons: dict[str, Daemon] = field(default_factory=dict)

    def running(self, name: str) -> Daemon | None:
        """The service's process, None when it is not there."""
        daemon = self.daemons.get(name)
        return daemon if daemon and daemon.is_running else None

    @property
    def api_url(self) -> str:
        """Where programs on this machine reach the server."""
        return f"{self._address(LOOPBACK)}/api"

    @property
    def page_url(self) -> str:
        """Where people open Prefect's page; from other machines too when the server listens to them."""
        return self._address(socket.gethostname())

    def _address(self, instead_of_wildcard: str) -> str:
        host = instead_of_wildcard if self.host in WILDCARD_HOSTS else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"


class Services:
    """Reads, starts and ends the services of one store."""

    def __init__(self, store: Path) -> None:
        self.folder = store.absolute() / FOLDER
        self.home = self.folder / "prefect"
        self.state_path = self.folder / STATE_FILE

    def log_path(self, name: str) -> Path:
        """Where a service writes."""
        return self.folder / f"{name}.log"

    def read(self) -> State:
        """What is remembered; a fresh state where nothing is."""
        try:
            content: dict[str, Any] = json.loads(self.state_path.read_text(encoding="utf-8"))
            daemons = {name: Daemon(**daemon) for name, daemon in content.pop("daemons").items()}
            return State(**content, daemons=daemons)
        except (FileNotFoundError, NotADirectoryError):
            return State()
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ServeError(
                f"{self.state_path} cannot be read: {error}. See which services run with "
                f"`fuser -v {self.folder}/*.log`, end them, and remove the file"
            ) from None

    def write(self, state: State) -> None:
        """Remember the state, at once or not at all."""
        partial = self.state_path.with_suffix(".partial")
        partial.write_text(json.dumps(dataclasses.asdict(state), indent=1), encoding="utf-8")
        os.replace(partial, self.state_path)

    @contextlib.contextmanager
    def changing(self) -> Iterator[State]:
        """Yields the state while no other command of ours changes these services."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = open(self.folder / "lock", "wb")  # noqa: SIM115 - closed below
        except OSError as error:
            raise StoreError(
                f"{error.filename} cannot be written: {error.strerror}; give --store a folder you may write"
            ) from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ServeError(
                    f"another `dapo up` or `dapo down` is at work in {self.folder}; wait for it"
                ) from None
            yield self.read()

    def start(self, state: State, name: str, command: Sequence[str], env: Mapping[str, str]) -> Daemon:
        """Start a service in a session of its own and remember it. Its environment is `env` alone.

        The service holds a kernel lock as long as it lives, which also a machine that shares the store sees;
        raises ServeError when another holds it.
        """
        path, lock_path = self.log_path(name), self.folder / f"{name}.lock"
        with open(lock_path, "wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ServeError(
                    f"a {name} of this store runs already: it holds {lock_path} and was started on "
                    f"{state.machine}. Type `dapo down` there, or use another store"
                ) from None
            with open(path, "wb") as log:  # anew: its last lines, shown with an error, are of this start
                popen = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=dict(env),
                    pass_fds=[lock.fileno()],  # its own children do not inherit it
                    start_new_session=True,
                    preexec_fn=_listen_to_signals,
                )
        start = start_of(popen.pid)
        # Not ours to wait for: without this, Popen warns that it is left running.
        popen.returncode = 0
        state.machine = socket.gethostname()
        state.daemons[name] = Daemon(popen.pid, start or "", list(command), str(path))
        self.write(state)
        return state.daemons[name]


def api_url(store: Path = DEFAULT_STORE) -> str | None:
    """The address of the store's running server, None when there is none."""
    services = Services(store)
    if not services.state_path.is_file():
        return None
    state = services.read()
    return state.api_url if state.running(SERVER) else None


def start_of(pid: int) -> str | None:
    """When a process started: boot of the machine and clock ticks since; None when it is gone or a zombie.

    Unlike a date it does not move when the machine's clock is set.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else f"{boot}/{fields[19]}"


def tail_of(path: Path, num_lines: int) -> str:
    """The last lines of a log, indented."""
    with open(path, "rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - MAX_TAIL_BYTES))
        lines = log.read().decode("utf-8", errors="replace").splitlines()
    return "\n".join(f"  | {line}" for line in lines[-num_lines:] if line.strip()) or "  | (it wrote nothing)"


def _listen_to_signals() -> None:
    """Undo what a shell that started us in the background ignores: a worker could not be stopped otherwise."""
    for number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


def _has_ended(handle: int, patience_seconds: float) -> bool:
    return bool(select.select([handle], [], [], patience_seconds)[0])
