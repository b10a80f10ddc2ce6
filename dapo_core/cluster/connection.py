"""Connects to Ray: a private instance on this machine, or a running cluster."""

from __future__ import annotations

import functools
import logging
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray._private import ray_constants, services
from ray.exceptions import AuthenticationError

from dapo_core.cluster.room import ANSWER_SECONDS, ask_cluster, use_known_token
from dapo_core.cluster.started import AUTH_MODE, AUTH_TOKEN, AUTH_TOKEN_PATH
from dapo_core.errors import ConfigError, WorkerDied
from dapo_core.machine.environment import LOOPBACK, RAY, WORKERS, jemalloc, set_defaults
from durable import is_full, is_locked, locked
from heartbeat import heartbeat

if TYPE_CHECKING:
    from dapo_core.config.train import TrainConfig

logger = logging.getLogger(__name__)

# A socket path has at most 107 bytes, including what Ray appends to the folder.
MAX_FOLDER_BYTES = 107 - len("/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")
FOLDER_PREFIX, LOCK_FILE = "dapo-ray-", ".lock"  # the lock is held while Ray runs
KEEP_SECONDS = 24 * 3600  # age at which folders of dead trainings are removed
FULL_DISK_BYTES = 1024**2
_OPTIONS: dict[str, Any] = {"logging_level": "warning", "log_to_driver": True}


@contextmanager
def connected_to_ray(
    train: TrainConfig,
    num_cpus: int,
    answer_seconds: float = ANSWER_SECONDS,
    is_quiet: bool = False,
) -> Iterator[Path | None]:
    """Connect to the cluster at train.ray_address, or start a private Ray with `num_cpus` CPUs.

    Yields the private Ray's folder, which only this user can enter, or None. A cluster must answer
    within `answer_seconds`; `is_quiet` hides the output of its workers. Raises ConfigError if a
    cluster refuses this process, and WorkerDied if Ray does not start or answer.
    """
    set_defaults(RAY)
    address = train.ray_address
    with (
        _private_ray(num_cpus, _private_workers(train))
        if address is None
        else _joined_ray(address, answer_seconds, is_quiet) as folder
    ):
        yield folder


def _private_workers(train: TrainConfig) -> dict[str, str]:
    """Return the variables of a private Ray's workers.

    Ranks that take turns free memory for the engines, which needs a malloc that returns it.
    """
    is_kept = train.device == "cpu" and not train.takes_turns
    return WORKERS | LOOPBACK | (jemalloc() if is_kept else {})


@contextmanager
def _joined_ray(address: str, answer_seconds: float, is_quiet: bool) -> Iterator[Path | None]:
    try:
        # ray.init ignores signals while it waits for a cluster
        ask_cluster(address, answer_seconds)
    except WorkerDied as error:
        if "AuthenticationError" not in str(error):
            raise
    use_known_token(address)
    try:
        with _keep_signal_handling():
            options = _OPTIONS | {"log_to_driver": not is_quiet}
            ray.init(address=address, runtime_env={"env_vars": WORKERS}, **options)
    except (AuthenticationError, ConnectionError, TimeoutError) as error:
        if isinstance(error, AuthenticationError) or "AuthenticationError" in str(error.__cause__):
            raise ConfigError(
                f"the Ray cluster at train.ray_address={address} refuses this process: start the "
                f"process with {AUTH_MODE}=token and the cluster's token in {AUTH_TOKEN} or "
                f"{AUTH_TOKEN_PATH} (docs/security.md)"
            ) from error
        raise WorkerDied(
            f"the Ray cluster at train.ray_address={address} does not answer: {error}"
        ) from error
    if os.environ.get(AUTH_MODE, "").lower() != "token":
        logger.warning(
            "the Ray cluster at %s is used without a token: anyone who can reach its ports can "
            "run code as its user; see docs/security.md to start it with a token",
            address,
        )
    try:
        yield None
    finally:
        ray.shutdown()


@contextmanager
def _private_ray(num_cpus: int, variables: dict[str, str]) -> Iterator[Path | None]:
    """Run Ray on loopback with a token of this training; its folder is removed at the end."""
    folder = _private_folder()
    # Without a mode, a new Ray requires the token; a mode set after importing Ray would not reach
    # this process.
    with locked(folder / LOCK_FILE), _environment({AUTH_MODE: None, AUTH_TOKEN: private_token()}):
        with heartbeat(lambda: "starting Ray"):
            _start(folder, num_cpus, variables)
        try:
            yield folder
        finally:
            ray.shutdown(wait_for_processes=True)
            shutil.rmtree(folder, ignore_errors=True)


@functools.cache  # Ray, too, reads its token once per process
def private_token() -> str:
    """Return the random token of this process's private Ray; it is never written to a file."""
    return secrets.token_hex(32)


def _private_folder() -> Path:
    """Create a private folder for Ray's logs and sockets, with a short enough path."""
    parent = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    _remove_old_folders(parent)
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=parent))
    if len(os.fsencode(folder)) <= MAX_FOLDER_BYTES:
        return folder
    folder.rmdir()
    _remove_old_folders("/tmp")
    return Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir="/tmp"))


def _remove_old_folders(parent: str) -> None:
    """Remove day-old folders of dead trainings; until then errors may refer to their logs."""
    for lock in Path(parent).glob(f"{FOLDER_PREFIX}*/{LOCK_FILE}"):
        with suppress(OSError):  # another training may be removing it
            if lock.stat().st_mtime < time.time() - KEEP_SECONDS and not is_locked(lock):
                shutil.rmtree(lock.parent)


def _start(folder: Path, num_cpus: int, variables: dict[str, str]) -> None:
    """Start Ray; on failure raises WorkerDied and leaves no processes behind."""
    # It logs a hint on how to turn authentication off.
    setup = logging.getLogger("ray._private.authentication.authentication_token_setup")
    setup.setLevel(logging.ERROR)
    with _keep_signal_handling() as processes, _loopback():
        try:
            ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                runtime_env={"env_vars": variables},
                # Ray makes it world-accessible, but its parent is private
                _temp_dir=str(folder / "ray"),
                **_OPTIONS,
            )
        except BaseException as error:
            _kill_processes(processes)
            is_failure = isinstance(error, Exception) and (
                not isinstance(error, OSError) or isinstance(error, ConnectionError | TimeoutError)
            )
            if not is_failure:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            if is_full(folder, FULL_DISK_BYTES):
                reason = f"{folder.parent} is full; free space, or set RAY_TMPDIR to another disk"
            message = f"Ray did not start on this machine: {reason} (logs are in {folder})"
            raise WorkerDied(message) from error


def _kill_processes(processes: list[subprocess.Popen[Any]]) -> None:
    with suppress(Exception):
        ray.shutdown()
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def _loopback() -> Iterator[None]:
    """Make a Ray started inside the block bind to 127.0.0.1 only.

    Ray has no public option: it replaces a loopback `_node_ip_address` with the machine's own, and
    reads the variable behind this constant (RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER) on import, before it
    is known whether a cluster will be joined. test_ray_security.py fails if it changes.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def _environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables inside the block; None unsets one."""
    before = {name: os.environ.get(name) for name in values}
    _set_environment(values)
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def _keep_signal_handling() -> Iterator[list[subprocess.Popen[Any]]]:
    """Keep this process's SIGTERM handler while Ray starts; signals to the group spare Ray.

    Yields the list of processes that Ray starts; a stopped training needs them for its last
    checkpoint. Ray has no public option for either: it installs its own handler and shields its
    processes only from SIGINT. test_stopping.py fails if this changes.
    """
    popen = services.ConsolePopen
    processes: list[subprocess.Popen[Any]] = []

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[Any]:
        processes.append(popen(*arguments, **options, start_new_session=True))
        return processes[-1]

    services.ConsolePopen = start  # type: ignore[assignment,misc]
    handler = signal.getsignal(signal.SIGTERM)
    is_main = threading.current_thread() is threading.main_thread()
    try:
        yield processes
    except SystemExit as error:  # raised by Ray's handler
        if is_main and error.code == signal.SIGTERM and callable(handler):
            handler(signal.SIGTERM, None)
        raise
    finally:
        services.ConsolePopen = popen  # type: ignore[misc]
        if is_main:
            signal.signal(signal.SIGTERM, handler)
