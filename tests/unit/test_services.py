"""What `dapo up` remembers of a database, and whom it lets start a service."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.client.schemas.actions import WorkPoolUpdate
from typer.testing import CliRunner

from dapo_core.errors import ConfigError
from flows.cli import app
from flows.services.daemons import SERVER, WORKER, Daemon, Services, State, api_url
from flows.services.start import Wishes, _end_work, _start_server, bring_up, take_down, without_password
from tasks.artifacts import StoreError
from tasks.serve_model.failure import ServeError

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("url", "remembered", "had_password"),
    [
        ("sqlite", "", False),
        ("postgresql+asyncpg://me@host/db", "postgresql+asyncpg://me@host/db", False),
        ("postgresql+asyncpg://me:p%40ss@host:5433/db", "postgresql+asyncpg://me@host:5433/db", True),
        (
            "postgresql+asyncpg://me@/db?password=x&host=/run/pg",
            "postgresql+asyncpg://me@/db?host=%2Frun%2Fpg",
            True,
        ),
    ],
)
def test_a_database_is_remembered_without_its_password(url: str, remembered: str, had_password: bool) -> None:
    assert without_password(url) == (remembered, had_password)


@pytest.mark.parametrize("url", ["postgresql://me:secret@host/db", "my:secret database"])
def test_a_database_that_prefect_cannot_use_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        without_password(url)
    assert "secret" not in str(refusal.value)


def test_a_service_that_is_not_remembered_still_keeps_a_second_one_out(tmp_path: Path) -> None:
    """As when another machine that shares the store started it."""
    services = Services(tmp_path)
    with services.changing() as state:
        daemon = services.start(state, WORKER, [sys.executable, "-c", "import time; time.sleep(600)"], {})
        services.write(type(state)())
        try:
            assert api_url(tmp_path) is None
            with pytest.raises(ServeError, match=r"worker\.lock"):
                services.start(services.read(), WORKER, ["true"], {})
        finally:
            assert daemon.stop(10)
            os.waitpid(daemon.pid, 0)
        again = services.start(state, WORKER, ["true"], {})
    assert os.waitpid(again.pid, 0) == (again.pid, 0)


def test_two_commands_do_not_change_services_at_once(tmp_path: Path) -> None:
    with Services(tmp_path).changing(), pytest.raises(ServeError, match="at work"), Services(tmp_path).changing():
        pass


@pytest.mark.parametrize(
    ("host", "port"), [("192.0.2.1", 4555), ("192.0.2.1", None), ("no-such-host.invalid", 4555)]
)
def test_a_host_that_is_not_this_machine_is_refused_as_such(tmp_path: Path, host: str, port: int | None) -> None:
    with (
        Services(tmp_path).changing() as state,
        pytest.raises(ConfigError, match="address of this machine") as refusal,
    ):
        _start_server(Services(tmp_path), state, Wishes(host=host, port=port))
    assert "taken" not in str(refusal.value)
    assert "serve.host" not in str(refusal.value)


@pytest.mark.parametrize("port", ["70000", "-5", "0"])
def test_a_port_that_cannot_be_is_refused_by_the_command_line(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.services.start.bring_up", lambda *_: pytest.fail("went on"))
    result = CliRunner().invoke(app, ["up", "--port", port])
    assert result.exit_code == 2
    assert "--port" in result.output


def test_a_store_that_is_a_file_is_refused(tmp_path: Path) -> None:
    store = tmp_path / "file"
    store.touch()
    with pytest.raises(StoreError, match="--store"):
        bring_up(Services(store), ROOT, Wishes())
    assert take_down(Services(store), cancel=False) == []
    assert Services(store).read() == State()


def test_down_leaves_nothing_in_a_folder_without_services(tmp_path: Path) -> None:
    assert take_down(Services(tmp_path / "typo"), cancel=False) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("store", "first"), [(".dapo", "Elsewhere than in this directory first"), ("a b", "First")]
)
def test_up_says_what_prefect_needs_to_find_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str, first: str
) -> None:
    monkeypatch.chdir(tmp_path)
    night = {
        "name": "night",
        "schedules": [{"cron": "0 2 * * *", "timezone": "UTC"}, {"cron": "1", "active": False}],
    }
    (tmp_path / "prefect.yaml").write_text(json.dumps({"deployments": [{"name": "full"}, night]}))
    daemons = dict.fromkeys((SERVER, WORKER), Daemon(1, "", [], ""))
    monkeypatch.setattr("flows.services.start.bring_up", lambda *_: State(port=4321, daemons=daemons))
    lines = CliRunner().invoke(app, ["up", "--store", store]).output.splitlines()
    export = lines.index(f"{first}: export PREFECT_API_URL=http://127.0.0.1:4321/api")
    assert lines[export + 1].endswith("prefect deployment run dapo-full")
    assert lines[export + 2] == "On a schedule:  night, cron 0 2 * * * UTC (prefect.yaml)"
    assert lines[-1].endswith("dapo down" if store == ".dapo" else "dapo down --store 'a b'")


@pytest.mark.slow
def test_a_server_that_is_named_and_does_not_answer_is_said_in_one_line(tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}/api"
        store = f"store.path={tmp_path / 'store'}"
        done = subprocess.run(
            [sys.executable, "-m", "flows.cli", "stage", "prepare-data", "configs/arith_cpu.yaml", "--set", store],
            cwd=ROOT,
            env={**os.environ, "PREFECT_HOME": str(tmp_path / "prefect"), "PREFECT_API_URL": url},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith(f"ServeError: the Prefect server at {url} does not answer (")
    assert not (tmp_path / "store" / "runs").exists()


class PoolClient:
    """Knows one work pool and the active flow runs in it; notes whether the pool was paused when it was asked."""

    def __init__(self, is_paused: bool, runs: list[SimpleNamespace]) -> None:
        self.is_paused, self.runs = is_paused, runs
        self.was_paused: list[bool] = []

    def read_work_pools(self, work_pool_filter: Any) -> list[SimpleNamespace]:
        return [SimpleNamespace(name=name, is_paused=self.is_paused) for name in work_pool_filter.name.any_]

    def update_work_pool(self, work_pool_name: str, work_pool: WorkPoolUpdate) -> None:
        self.is_paused = bool(work_pool.is_paused)

    def read_flow_runs(self, **_: Any) -> list[SimpleNamespace]:
        self.was_paused.append(self.is_paused)
        return self.runs


@pytest.mark.parametrize("is_paused", [False, True])
@pytest.mark.parametrize("is_active", [False, True])
def test_no_flow_run_is_taken_up_while_down_looks_and_ends_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_paused: bool, is_active: bool
) -> None:
    run = SimpleNamespace(id="1", name="proud-owl", state_name="Running", start_time=None)
    client = PoolClient(is_paused, [run] if is_active else [])
    monkeypatch.setattr("flows.services.registration.server_client", lambda: contextlib.nullcontext(client))
    with Services(tmp_path).changing() as state:
        if is_active:
            with pytest.raises(ServeError, match="proud-owl"):
                _end_work(Services(tmp_path), state, cancel=False)
        else:
            assert _end_work(Services(tmp_path), state, cancel=False) == []
    assert client.was_paused
    assert all(client.was_paused)
    assert client.is_paused == is_paused


def test_down_on_another_machine_does_not_forget_what_runs(tmp_path: Path) -> None:
    services = Services(tmp_path)
    there = State(machine="far-away", daemons={WORKER: Daemon(1, "their boot/1", [], "")})
    with services.changing():
        services.write(there)
    with pytest.raises(ServeError, match="far-away"):
        take_down(services, cancel=False)
    assert services.read() == there
