"""`dapo up` and `dapo down`, the private server of a run, and the start-up plugin for `prefect`."""

import json
import logging
import logging.config
import os
import platform
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import httpx
import pytest
import yaml
from prefect.logging.configuration import DEFAULT_LOGGING_SETTINGS_PATH
from prefect.plugins import HookContext
from prefect.settings import PREFECT_API_KEY, PREFECT_API_URL, temporary_settings

from dapo_core.errors import ConfigError
from durable import LockHeld, locked
from flows import services
from flows.cli import operating
from flows.prefect_access import is_healthy
from flows.prefect_plugin import complete_names, setup_environment
from flows.prefect_server import (
    provide_prefect_api,
    require_server,
    wait_for_private_server,
)
from flows.prefect_settings import PROJECT_SETTINGS, apply_prefect_settings, no_proxy
from flows.services import DATABASE_VARIABLES, Service, Services, ServicesError, bring_up, take_down
from tasks.processes.child import background_command
from tests.operated import ROOT

SLEEP = ("sleep", "600")
PASSWORD = "correct-horse-battery"
POSTGRES = f"postgresql+asyncpg://me:{PASSWORD}@host:5433/db"


def test_one_work_pool_is_named_in_prefect_yaml() -> None:
    assert services.work_pool([{"work_pool": {"name": "gpu"}}] * 2) == "gpu"
    assert services.work_pool([{"name": "a"}]) == "dapo"
    with pytest.raises(ConfigError, match=r"names the work pools a, dapo: name one"):
        services.work_pool([{"work_pool": {"name": "a"}}, {}])


class Started(Service):
    """A service that only records how it would be started."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "server")
        self.commands: list[tuple[tuple[str, ...], Mapping[str, str]]] = []

    def start(
        self, command: tuple[str, ...], environment: Mapping[str, str], **record: Any
    ) -> None:
        self.commands.append((command, environment))
        self.record_path.write_text(json.dumps(record))


class Place(Services):
    """Services with a recording server."""

    server: Started


@pytest.fixture
def place(tmp_path: Path) -> Place:
    place = Place(tmp_path)
    place.folder.mkdir()
    place.server = Started(place.folder)
    return place


def test_a_server_keeps_its_database_until_another_is_given(place: Place) -> None:
    server = place.server
    services._start_server(place, None, None, POSTGRES)
    [(command, environment)] = server.commands
    assert environment[DATABASE_VARIABLES[0]] == POSTGRES
    assert PASSWORD not in "".join(command) + server.record_path.read_text()
    with pytest.raises(ConfigError, match=r"uses a postgresql\+asyncpg database: give"):
        services._start_server(place, None, None, None)
    port = server.read()["port"]
    services._start_server(place, None, None, "sqlite")
    assert DATABASE_VARIABLES[0] not in server.commands[-1][1]
    assert server.read()["port"] == port


def test_a_server_reachable_from_other_machines_needs_a_password_that_is_not_stored(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = place.server
    for host in ("0.0.0.0", "192.0.2.7", "::"):
        with pytest.raises(
            ConfigError, match=f"--host {host} is reachable from other machines.*AUTH_STRING=USER"
        ):
            services._start_server(place, host, None, None)
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", f"dapo:{PASSWORD}")
    services._start_server(place, "0.0.0.0", None, None)
    [(command, environment)] = server.commands
    assert environment["PREFECT_SERVER_API_AUTH_STRING"] == f"dapo:{PASSWORD}"
    for host, reached_at in {"::1": "[::1]", "::": "[::1]", "0.0.0.0": "127.0.0.1"}.items():
        services._start_server(place, host, 4200, None)
        assert server.read()["api_url"] == f"http://{reached_at}:4200/api"
    assert PASSWORD not in "".join(command) + server.record_path.read_text()
    monkeypatch.delenv("PREFECT_API_AUTH_STRING")
    with pytest.raises(
        ConfigError, match=r"^the host 0\.0\.0\.0, used by the last .*; or use .*up --host 127"
    ):
        services._start_server(place, None, None, None)  # the last host needs the password again
    services._start_server(place, "127.0.0.1", None, None)


def test_up_names_an_address_for_other_machines(
    place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", f"dapo:{PASSWORD}")
    monkeypatch.setattr(platform, "node", lambda: "vm")
    monkeypatch.setattr(operating, "bring_up", lambda *_, **__: place.api_url)
    for host, num_named in {"0.0.0.0": 2, "192.0.2.7": 0}.items():
        services._start_server(place, host, 4200, None)
        operating.up(None, None, host, tmp_path)
        assert capsys.readouterr().out.count("http://vm:4200/api") == num_named


def test_without_a_password_only_the_servers_own_pages_can_use_the_api(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = place.server
    origins = "PREFECT_SERVER_CORS_ALLOWED_ORIGINS"
    services._start_server(place, None, 4321, None)
    monkeypatch.setenv(origins, "http://mine.example")
    services._start_server(place, None, 4321, None)
    monkeypatch.delenv(origins)
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", f"dapo:{PASSWORD}")
    services._start_server(place, None, 4321, None)
    assert [environment.get(origins) for _, environment in server.commands] == [
        "http://127.0.0.1:4321,http://localhost:4321",
        "http://mine.example",
        None,  # the password protects it
    ]
    csrf = "PREFECT_SERVER_CSRF_PROTECTION_ENABLED"
    assert [environment.get(csrf) for _, environment in server.commands] == ["true", "true", None]


def test_a_server_gets_another_port_if_its_own_is_taken() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        assert services._choose_port("127.0.0.1", taken) != taken


def test_a_service_starts_once_and_down_stops_only_our_process(tmp_path: Path) -> None:
    service = Service(tmp_path, "worker")
    service.start(SLEEP, os.environ)
    record = service.read()
    with pytest.raises(LockHeld):
        Service(tmp_path, "worker").start(SLEEP, os.environ)
    service.record_path.write_text(json.dumps({**record, "machine": "far-away"}))
    with pytest.raises(ServicesError, match="was started on far-away: run the command there"):
        service.stop()
    service.record_path.write_text(json.dumps(record))
    assert service.stop() == [f"worker, pid {record['pid']}"]
    os.waitpid(record["pid"], 0)
    with subprocess.Popen(SLEEP) as other:  # reuses the pid
        service.record_path.write_text(json.dumps({**record, "pid": other.pid}))
        assert service.stop() == []
        assert other.poll() is None
        other.kill()


def test_a_service_that_exits_at_once_is_reported_with_its_log(tmp_path: Path) -> None:
    service = Service(tmp_path, "server")
    service.start((sys.executable, "-c", "print('no such database')"), os.environ)
    with pytest.raises(
        ServicesError, match=r"does not respond: its process exited.*\n  \| no such database"
    ):
        service.wait_until(lambda: False, "does not respond")


def test_another_stores_server_on_our_port_is_not_taken_for_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "is_healthy", lambda _: True)
    place = Services(tmp_path)
    place.folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as listener, subprocess.Popen(SLEEP) as other:
        record = {
            "port": listener.getsockname()[1],
            "machine": platform.node(),
            "api_url": "http://127.0.0.1/api",
        }
        answers = []
        for pid in (os.getpid(), other.pid):
            place.server.record_path.write_text(json.dumps(record | {"pid": pid}))
            answers.append(place.answers())
        other.kill()
    assert answers == [True, False]


def test_up_refuses_a_missing_project_and_an_unusable_or_busy_store(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"no prefect\.yaml in .*: run this in the project directory"
    ):
        bring_up(tmp_path, tmp_path)
    place = Services(tmp_path / "other")
    with place.changing(), pytest.raises(ServicesError, match="is running"), place.changing():
        pass
    (tmp_path / "file").touch()
    with pytest.raises(ServicesError, match="--store"):
        bring_up(tmp_path / "file", ROOT)
    assert (
        take_down(tmp_path / "file", cancel=False)
        == take_down(tmp_path / "typo", cancel=False)
        == []
    )
    assert {path.name for path in tmp_path.iterdir()} == {"file", "other"}


def test_damaged_files_are_reported_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Services(tmp_path / "store")
    place.folder.mkdir(parents=True)
    place.server.record_path.write_text("{")
    with pytest.raises(ServicesError, match=r"server\.json is damaged \(Expecting .*: remove it"):
        bring_up(tmp_path / "store", ROOT)
    for text in ("deployments: [", "- a", "name: b", ""):
        (tmp_path / "prefect.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"prefect\.yaml has no readable deployments: "):
            bring_up(tmp_path / "other", tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("flows.prefect_server.named_api", lambda _: None)
    with pytest.raises(
        ServicesError, match=r"cannot use PREFECT_HOME=\S+/file: .*; set another one"
    ):
        provide_prefect_api(tmp_path)


class Keeper(BaseHTTPRequestHandler):
    """A server that requires a key; as a proxy it gets whole URLs."""

    asked: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        key = self.headers["Authorization"]
        self.asked.append((self.path, key))
        self.send_response(200 if key == f"Bearer {PASSWORD}" else 401)
        self.end_headers()
        self.wfile.write(b'"3.7.7"')

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the address of a server that requires the key."""
    monkeypatch.setattr(Keeper, "asked", [])
    with ThreadingHTTPServer(("127.0.0.1", 0), Keeper) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_up_says_which_server_the_users_settings_name(
    keeper: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    place, named = Services(tmp_path), f"{keeper}/api"
    place.folder.mkdir()
    own, free = "http://127.0.0.1:4321/api", "http://127.0.0.1:9/api"  # nothing listens there
    place.server.record_path.write_text(json.dumps({"api_url": own, "machine": platform.node()}))
    for url in (own, free):
        monkeypatch.setenv("PREFECT_API_URL", url)
        assert services._other_server(place) is None
    assert f"none answers at {free}, named by PREFECT_API_URL; using this store's" in caplog.text
    monkeypatch.setenv("PREFECT_API_URL", "http://nosuch.invalid:4200/api")
    with pytest.raises(ServicesError, match=r"http://nosuch\.invalid:4200/api does not respond;"):
        services._other_server(place)
    monkeypatch.delenv("PREFECT_API_URL")
    with temporary_settings({PREFECT_API_URL: named, PREFECT_API_KEY: PASSWORD}):
        assert services._other_server(place) == named
        assert f"using {named}, named by your Prefect profile; starting none" in caplog.text
        with locked(place.server.lock), pytest.raises(ServicesError, match=r"run `dapo down"):
            services._other_server(place)


def test_the_api_key_is_only_sent_to_the_server_in_prefects_settings(keeper: str) -> None:
    named = {PREFECT_API_URL: f"{keeper}/named", PREFECT_API_KEY: PASSWORD}
    with temporary_settings(named):
        require_server(f"{keeper}/named")
        with pytest.raises(ServicesError, match="other needs a password"):
            require_server(f"{keeper}/other")
    with (
        temporary_settings(named | {PREFECT_API_KEY: "old"}),
        pytest.raises(ServicesError, match="rejects PREFECT"),
    ):
        require_server(f"{keeper}/named")
    assert {key for path, key in Keeper.asked if path.startswith("/other")} == {None}


def test_proxies_are_only_used_for_remote_servers(
    keeper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("http_proxy", keeper)
    assert is_healthy("http://prefect.invalid/api")
    assert is_healthy(f"{keeper}/api")
    assert [path for path, _ in Keeper.asked] == [
        "http://prefect.invalid/api/health",
        "/api/health",
    ]
    environment = {"NO_PROXY": "intranet"}
    for _ in range(2):  # a child of a run applies them again
        apply_prefect_settings(environment)
    assert environment["no_proxy"] == "intranet,127.0.0.1,localhost,::1"
    assert no_proxy({"no_proxy": "*"}) == "*", "curl takes * only alone"
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setenv("no_proxy", environment["no_proxy"])
    assert httpx.get(f"{keeper}/api/health").status_code == 401  # as Prefect's client asks


def test_a_private_server_is_not_confused_with_another_one_on_its_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.prefect_server.is_healthy", lambda _: True)
    command = [sys.executable, "-c", "print('port in use')"]
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        background_command(command, log_path=tmp_path / "log", label="Prefect") as server,
        pytest.raises(
            ServicesError, match=r"does not respond at http://here/api; .*\n  \| port in use"
        ),
    ):
        wait_for_private_server(server, "http://here/api", listener.getsockname()[1])


def set_up(
    monkeypatch: pytest.MonkeyPatch, *argv: str, api_url: str | None = None
) -> dict[str, str] | None:
    """Return what the plugin adds to the environment of a command."""
    monkeypatch.setattr(sys, "argv", list(argv))
    result = setup_environment(ctx=HookContext("3", api_url, logging.getLogger))
    return dict(result.env) if result else None


def test_prefect_gets_settings_that_the_user_has_not_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in PROJECT_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DO_NOT_TRACK", "0")
    others = {name: value for name, value in PROJECT_SETTINGS.items() if name != "DO_NOT_TRACK"}
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("no_proxy", "intranet")
    others["no_proxy"] = "intranet,127.0.0.1,localhost,::1"
    assert set_up(monkeypatch, "/bin/prefect", "version") == others
    assert set_up(monkeypatch, "/bin/dapo", "run") is None
    place = Services(Path(".dapo"))
    place.folder.mkdir(parents=True)
    place.server.record_path.write_text(json.dumps({"api_url": "http://here/api"}))
    monkeypatch.setattr(Service, "is_running", True)
    assert set_up(monkeypatch, "prefect", "version") == {
        **others,
        "PREFECT_API_URL": "http://here/api",
    }
    assert set_up(monkeypatch, "prefect", "version", api_url="http://theirs/api") == others


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("deployment run dapo-full --watch", "deployment run dapo-full/dapo-full --watch"),
        ("deployment schedule ls dapo-nightly", "deployment schedule ls dapo-nightly/dapo-nightly"),
    ],
)
def test_a_deployment_is_found_by_its_short_name(words: str, completed: str) -> None:
    assert complete_names(words.split(), ROOT) == completed.split()


def test_an_unknown_deployment_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no deployment 'dapo-fool'; it has: compare, dapo-full, "):
        complete_names(["deployment", "run", "dapo-fool"], ROOT)
    assert complete_names(["deployment", "run", "dapo-fool"], tmp_path) == [
        "deployment",
        "run",
        "dapo-fool",
    ]


def test_our_logging_configuration_matches_prefects() -> None:
    """Fails first when a new Prefect version changes its logging configuration."""
    ours, prefects = (
        yaml.safe_load(Path(path).read_text())
        for path in (PROJECT_SETTINGS["PREFECT_LOGGING_CONFIG_PATH"], DEFAULT_LOGGING_SETTINGS_PATH)
    )
    same_as_parent = {"prefect.client", "prefect.infrastructure"}
    assert set(prefects["loggers"]) - set(ours["loggers"]) == same_as_parent
    for name in set(prefects["loggers"]) - same_as_parent - {"prefect._internal"}:
        assert ours["loggers"][name] == prefects["loggers"][name]
    assert ours["formatters"]["standard"] == prefects["formatters"]["standard"]
    assert ours["root"] == prefects["root"]


class Runs:
    """A client of a server with these active flow runs, {name: work pool}."""

    def __init__(self, **pools: str | None) -> None:
        shared = {"state_name": "Running", "start_time": None}
        self.runs = [
            SimpleNamespace(id=id, name=id, work_pool_name=pool, **shared)
            for id, pool in pools.items()
        ]
        self.states: list[tuple[str, str]] = []

    def read_flow_runs(self, work_pool_filter: Any = None, **_: Any) -> list[SimpleNamespace]:
        return [
            run for run in self.runs if work_pool_filter is None or run.work_pool_name is not None
        ]

    def set_flow_run_state(self, flow_run: str, state: Any, force: bool) -> None:
        self.states.append((flow_run, state.type.value))


def test_down_refuses_while_runs_are_active_and_cancels_them_on_request(tmp_path: Path) -> None:
    client: Any = Runs(owl="dapo")
    with pytest.raises(ServicesError, match="killed with the worker:\n  owl "):
        services._end_flow_runs(Services(tmp_path), client, cancel=False)
    assert client.states == []
    services._end_flow_runs(Services(tmp_path), client, cancel=True)  # no worker to wait for
    assert client.states == [("owl", "CANCELLING"), ("owl", "CANCELLED")]
    client = Runs(owl="dapo", hare=None)  # dapo run
    for cancel in (False, True):
        with pytest.raises(
            ServicesError, match=r"uses this server:\n  hare .*\nwait, or press Ctrl-C"
        ):
            services._end_flow_runs(Services(tmp_path), client, cancel)
    assert client.states == []
