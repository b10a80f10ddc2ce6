"""The plugin keeps its hands off whatever it does not know; what it does is tested on the real command line."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from prefect.client.orchestration import PrefectClient

from flows.prefect_plugin import setup_environment

METHOD = "read_deployment_by_name"


async def renamed(self: PrefectClient, flow_and_deployment: str) -> Any: ...


async def with_more(self: PrefectClient, name: str, version: int = 0) -> Any: ...


def no_coroutine(self: PrefectClient, name: str) -> Any: ...


def set_up(monkeypatch: pytest.MonkeyPatch, *argv: str) -> None:
    monkeypatch.setattr(sys, "argv", list(argv))
    assert setup_environment(ctx=None) is None


@pytest.mark.parametrize(
    "argv", [("prefect", "server", "start"), ("pytest", "deployment"), ("/bin/dapo", "run"), ("prefect",)]
)
def test_other_commands_are_left_alone(monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...]) -> None:
    before = PrefectClient.read_deployment_by_name
    set_up(monkeypatch, *argv)
    assert PrefectClient.read_deployment_by_name is before


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
