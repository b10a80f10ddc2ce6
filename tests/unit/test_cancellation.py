"""Which signals end a training, and which only end the process that watches it."""

from __future__ import annotations

import signal
import socket
import time

import pytest
from prefect.exceptions import TerminationSignal
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks.processes.cancellation import ANSWER_SECONDS, WORKER_VARIABLE, is_worker_restart

SIGTERM = TerminationSignal(signal.SIGTERM)


def test_without_a_worker_a_signal_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WORKER_VARIABLE, raising=False)
    assert not is_worker_restart(SIGTERM)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("a bug"), TimeoutError()])
def test_what_is_no_signal_is_no_restart(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKER_VARIABLE, "00000000-0000-0000-0000-000000000000")
    assert not is_worker_restart(error)


@pytest.mark.parametrize("answers", ["nothing", "no connection"])
def test_a_server_that_does_not_answer_leaves_it_running(
    answers: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(WORKER_VARIABLE, "00000000-0000-0000-0000-000000000000")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if answers == "nothing":
            silent.listen()
        api = f"http://127.0.0.1:{silent.getsockname()[1]}/api"
        began = time.monotonic()
        with temporary_settings({PREFECT_API_URL: api}):
            assert is_worker_restart(SIGTERM)
    assert time.monotonic() - began < ANSWER_SECONDS + 1
    assert "Prefect does not say whether flow run" in caplog.text
