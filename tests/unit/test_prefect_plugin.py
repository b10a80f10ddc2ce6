"""The plugin keeps its hands off whatever it does not know; what it does is tested on the real command line."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import PrefectClient
from prefect.plugins import HookContext

from flows.prefect_plugin import setup_environment
from flows.prefect_settings import project_settings
from flows.services.daemons import SERVER, Daemon, Services, State, start_of

METHOD = "read_deployment_by_name"


async def renamed(self: PrefectClient, flow_and_deployment: str) -> Any: ...


async def with_more(self: PrefectClient, name: str, version: int = 0) -> Any: ...


def no_coroutine(self: PrefectClient, name: str) -> Any: ...


def set_up(monkeypatch: pytest.MonkeyPatch, *argv: str, api_url: str | None = None) -> dict[str, str] | None:
    """What the plugin adds to the environment of a command."""
    monkeypatch.setattr(sys, "argv", list(argv))
    result = setup_environment(ctx=HookContext("3", api_url, logging.getLogger))
    return dict(result.env) if result else None


@pytest.mark.parametrize(
    "argv", [("prefect", "server", "start"), ("pytest", "deployment"), ("/bin/dapo", "run"), ("prefect",)]
)
def test_other_commands_are_left_alone(monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...]) -> None:
    before = PrefectClient.read_deployment_by_name
    set_up(monkeypatch, *argv)
    assert PrefectClient.read_deployment_by_name is before


def test_prefect_gets_the_settings_that_the_user_has_not_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in project_settings():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DO_NOT_TRACK", "0")
    others = {name: value for name, value in project_settings().items() if name != "DO_NOT_TRACK"}
    assert set_up(monkeypatch, "/bin/prefect", "version") == others
    assert set_up(monkeypatch, "/bin/dapo", "run") is None


@pytest.mark.parametrize(("theirs", "expected"), [(None, "http://127.0.0.1:4321/api"), ("http://far/api", None)])
def test_prefect_reaches_the_services_unless_the_user_names_a_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, theirs: str | None, expected: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    services = Services(Path(".dapo"))
    services.folder.mkdir(parents=True)
    alive = Daemon(os.getpid(), str(start_of(os.getpid())), [], "")
    services.write(State(port=4321, daemons={SERVER: alive}))
    assert (set_up(monkeypatch, "prefect", "version", api_url=theirs) or {}).get("PREFECT_API_URL") == expected


def test_a_broken_state_file_takes_no_setting_away(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PREFECT_SERVER_ANALYTICS_ENABLED", raising=False)
    services = Services(Path(".dapo"))
    services.folder.mkdir(parents=True)
    services.state_path.write_text("{")
    added = set_up(monkeypatch, "prefect", "version") or {}
    assert added["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"
    assert "PREFECT_API_URL" not in added
    assert str(services.state_path) in caplog.text


@pytest.mark.parametrize("method", [renamed, with_more, no_coroutine, None])
def test_a_method_of_another_shape_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], method: Any
) -> None:
    monkeypatch.setattr(PrefectClient, METHOD, method)
    set_up(monkeypatch, "prefect", "deployment", "run", "x")
    assert getattr(PrefectClient, METHOD) is method
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("program", ["/usr/bin/prefect", "-m"])
def test_the_method_it_knows_is_wrapped(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    known = PrefectClient.read_deployment_by_name
    monkeypatch.setattr(PrefectClient, METHOD, known)
    set_up(monkeypatch, program, "--no-prompt", "deployment", "run", "x")
    assert getattr(PrefectClient.read_deployment_by_name, "__wrapped__", None) is known
