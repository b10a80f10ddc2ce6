"""Connecting to Ray: failed starts leave nothing behind; private instances are protected."""

import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray._private import services
from ray.exceptions import AuthenticationError, RaySystemError

from dapo_core.cluster import connection
from dapo_core.cluster.connection import (
    AUTH_MODE,
    AUTH_TOKEN,
    LOCK_FILE,
    MAX_FOLDER_BYTES,
    connected_to_ray,
    private_token,
)
from dapo_core.cluster.restarts import Restarts
from dapo_core.config.train import TrainConfig
from dapo_core.errors import ConfigError, WorkerDied
from dapo_core.machine.stopping import StopRequest
from durable import locked


class Init:
    """Replaces ray.init: starts a process like Ray, then raises the next error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.processes: list[subprocess.Popen[Any]] = []
        self.options: dict[str, Any] = {}
        self.environment: dict[str, str] = {}
        monkeypatch.setattr(connection.ray, "init", self)
        monkeypatch.setattr(connection.ray, "shutdown", lambda **_: None)

    def __call__(self, **options: Any) -> None:
        self.options, self.environment = options, dict(os.environ)
        self.processes.append(services.ConsolePopen(["sleep", "60"]))
        if self.errors:
            raise self.errors.pop(0)
        self.processes.pop().kill()


@pytest.fixture(autouse=True)
def _isolated_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Unset the user's token, and use a folder with a short path."""
    # it connects in another process
    monkeypatch.setattr(connection, "ask_cluster", lambda *_: None)
    monkeypatch.delenv(AUTH_MODE, raising=False)
    monkeypatch.delenv(AUTH_TOKEN, raising=False)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield


def connect(**train: Any) -> Path | None:
    with connected_to_ray(TrainConfig(**train), num_cpus=1) as folder:
        return folder


# What ray.init raises if the raylet, the GCS or an agent dies during startup, or a node is slow.
START_ERRORS = [
    Exception(
        "The current node timed out during startup. This could happen because some of the raylet "
        "failed to"
    ),
    RuntimeError(
        "Failed to start GCS.  Last 0 lines of error files:\n.Please check /tmp/ray/gcs_server.out"
    ),
    RaySystemError("The core worker has already been shutdown."),
    ConnectionError("Could not read '127.0.0.1:6379' session name"),
    TimeoutError("Timed out after 30 seconds while waiting for node to startup"),
]


@pytest.mark.parametrize("error", START_ERRORS, ids=lambda error: type(error).__name__)
def test_a_failed_start_is_retried_like_any_dead_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception
) -> None:
    init = Init(monkeypatch, error)
    pauses: list[float] = []
    attempts: list[Path | None] = []

    def attempt(start: Path | None) -> Path | None:
        attempts.append(start)
        return connect()

    with StopRequest() as stop:
        folder = Restarts(1, 2.0, pauses.append).until_done(attempt, None, lambda: None, stop)
    assert (pauses, len(attempts)) == ([2.0], 2)
    assert folder is not None
    assert not folder.exists()
    assert [process.poll() for process in init.processes] == [-9]


def test_the_folder_of_a_killed_training_is_removed_after_a_day(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parent = Path(os.environ["RAY_TMPDIR"])
    for name in ("dead", "live", "young"):
        (parent / f"dapo-ray-{name}").mkdir()
        (parent / f"dapo-ray-{name}" / LOCK_FILE).touch()
    (parent / "dapo-ray-other").mkdir()  # from another version
    Init(monkeypatch)
    with locked(parent / "dapo-ray-live" / LOCK_FILE):
        for name in ("dead", "live"):
            os.utime(parent / f"dapo-ray-{name}" / LOCK_FILE, (0, 0))
        connect()
    assert {path.name for path in parent.iterdir()} == {
        "dapo-ray-live",
        "dapo-ray-young",
        "dapo-ray-other",
    }


def test_a_failed_start_reports_the_reason_and_the_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    Init(monkeypatch, RuntimeError("Failed to start GCS.\nmore"))
    with pytest.raises(
        WorkerDied, match=r"^Ray did not start on this machine: Failed to start GCS\. \("
    ) as caught:
        connect()
    folder = Path(str(caught.value).rpartition(" in ")[2].rstrip(")"))
    assert oct(folder.stat().st_mode)[-3:] == "700"
    usage = shutil.disk_usage(folder)._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    Init(monkeypatch, TimeoutError("Timed out waiting for file gcs_server_port"))
    with pytest.raises(
        WorkerDied, match=rf"{folder.parent} is full; free space, or set RAY_TMPDIR to"
    ):
        connect()


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()]
)
def test_other_errors_propagate_unchanged(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    init = Init(monkeypatch, error)
    with pytest.raises(type(error)):
        connect()
    assert [process.poll() for process in init.processes] == [-9]
    assert not Path(init.options["_temp_dir"]).parent.exists()


def test_a_private_ray_has_a_token_and_a_short_private_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    init = Init(monkeypatch)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / ("x" * MAX_FOLDER_BYTES)))
    Path(os.environ["RAY_TMPDIR"]).mkdir()
    folder = connect()
    assert folder is not None
    assert folder.parent == Path("/tmp")
    assert init.options["_temp_dir"] == str(folder / "ray")
    assert init.options["runtime_env"]["env_vars"]["GLOO_SOCKET_IFNAME"] == "lo"
    assert init.environment[AUTH_TOKEN] == private_token()
    assert AUTH_MODE not in init.environment
    assert len(private_token()) == 64
    assert AUTH_TOKEN not in os.environ
    assert not list(Path(os.environ["RAY_TMPDIR"]).iterdir())


def test_joining_a_cluster_uses_the_token_and_warns_without_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    init = Init(monkeypatch)
    connect(ray_address="10.0.0.1:6379")
    assert "used without a token" in caplog.text
    caplog.clear()
    monkeypatch.setenv(AUTH_TOKEN, "the cluster's")
    monkeypatch.setenv(AUTH_MODE, "token")
    connect(ray_address="10.0.0.1:6379")
    assert (init.environment[AUTH_MODE], init.environment[AUTH_TOKEN]) == ("token", "the cluster's")
    assert caplog.text == ""


def test_a_cluster_that_refuses_or_does_not_answer_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Init(monkeypatch, AuthenticationError("Unauthenticated"), ConnectionError("Failed to connect"))
    with pytest.raises(
        ConfigError, match=r"train\.ray_address=auto refuses this process: .*RAY_AUTH_TOKEN"
    ):
        connect(ray_address="auto")
    with pytest.raises(WorkerDied, match=r"train\.ray_address=auto does not answer"):
        connect(ray_address="auto")
