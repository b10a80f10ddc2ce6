"""The plugin keeps its hands off whatever it does not know; what it does is tested on the real command line."""

from __future__ import annotations

import logging
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.client.orchestration import PrefectClient
from prefect.plugins import HookContext

from flows.prefect_plugin import check_parameters, setup_environment
from flows.prefect_settings import project_settings
from flows.services.daemons import SERVER, Daemon, Services, State, start_of

METHODS = ("read_deployment_by_name", "create_flow_run_from_deployment")
ROOT = Path(__file__).parents[2]


async def renamed(self: PrefectClient, flow_and_deployment: str) -> Any: ...


async def with_more(self: PrefectClient, name: str, version: int = 0) -> Any: ...


def no_coroutine(self: PrefectClient, name: str) -> Any: ...


def deployment_in(folder: Path | None) -> SimpleNamespace:
    """What the plugin reads of a deployment that `prefect deploy` registered in this folder."""
    step = {"prefect.deployments.steps.set_working_directory": {"directory": str(folder)}}
    parameters = {"config": "configs/arith_cpu.yaml", "overrides": []}
    return SimpleNamespace(pull_steps=[step] if folder else None, parameters=parameters)


def set_up(monkeypatch: pytest.MonkeyPatch, *argv: str, api_url: str | None = None) -> dict[str, str] | None:
    """What the plugin adds to the environment of a command."""
    monkeypatch.setattr(sys, "argv", list(argv))
    result = setup_environment(ctx=HookContext("3", api_url, logging.getLogger))
    return dict(result.env) if result else None


@pytest.mark.parametrize(
    "argv", [("prefect", "server", "start"), ("pytest", "deployment"), ("/bin/dapo", "run"), ("prefect",)]
)
def test_other_commands_are_left_alone(monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...]) -> None:
    before = [getattr(PrefectClient, name) for name in METHODS]
    set_up(monkeypatch, *argv)
    assert [getattr(PrefectClient, name) for name in METHODS] == before


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


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("method", [renamed, with_more, no_coroutine, None])
def test_a_method_of_another_shape_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], name: str, method: Any
) -> None:
    for known in METHODS:
        monkeypatch.setattr(PrefectClient, known, getattr(PrefectClient, known))
    monkeypatch.setattr(PrefectClient, name, method)
    set_up(monkeypatch, "prefect", "deployment", "run", "x")
    assert getattr(PrefectClient, name) is method
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("program", ["/usr/bin/prefect", "-m"])
def test_the_methods_it_knows_are_wrapped(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    methods = {name: getattr(PrefectClient, name) for name in METHODS}
    for name, known in methods.items():
        monkeypatch.setattr(PrefectClient, name, known)
    set_up(monkeypatch, program, "--no-prompt", "deployment", "run", "x")
    for name, known in methods.items():
        assert getattr(getattr(PrefectClient, name), "__wrapped__", None) is known


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        (
            {"overrides": ["train.totl_steps=2"]},
            "unknown key train.totl_steps = 2 (did you mean train.total_steps?)",
        ),
        ({"overrides": ["train.total_steps='-1'"]}, "train.total_steps = '-1' is refused: input should be "),
        (
            {"overrides": ["train.num_ranks=3"]},
            "responses per optimizer step do not divide over train.num_ranks=3",
        ),
        ({"config": "configs/arith.yaml"}, "configuration configs/arith.yaml cannot be read: No such file"),
    ],
)
def test_parameters_of_a_deployment_of_this_folder_are_checked_as_its_flow_will(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], refusal: str
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit, match=re.escape(refusal)):
        check_parameters(deployment_in(ROOT), given)


@pytest.mark.parametrize(
    ("folder", "given"),
    [
        (ROOT, {"overrides": ["run.seed=2"]}),
        (ROOT, {"overrides": "run.seed=2"}),  # the server's schema says what is wrong with these
        (ROOT, {"config": {"__prefect_kind": "workspace_variable", "variable_name": "recipe"}}),
        (Path("/elsewhere"), {"config": "theirs.yaml"}),
        (None, {"config": "theirs.yaml"}),
    ],
)
def test_other_parameters_are_left_to_the_server(
    monkeypatch: pytest.MonkeyPatch, folder: Path | None, given: dict[str, Any]
) -> None:
    monkeypatch.chdir(ROOT)
    check_parameters(deployment_in(folder), given)
