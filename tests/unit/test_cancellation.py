"""Which signals cancel a training, and which only end the process that watches it."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from prefect.exceptions import TerminationSignal
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks.processes import cancellation
from tasks.processes.cancellation import WORKER_VARIABLE, is_worker_restart

FLOW_RUN = "00000000-0000-0000-0000-000000000001"
SIGTERM = TerminationSignal(signal.SIGTERM)


def test_only_a_signal_to_a_worker_counts_as_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WORKER_VARIABLE, raising=False)
    assert not is_worker_restart(SIGTERM)
    monkeypatch.setenv(WORKER_VARIABLE, FLOW_RUN)
    for error in (KeyboardInterrupt(), ValueError("a bug"), TimeoutError()):
        assert not is_worker_restart(error)


@pytest.mark.slow
@pytest.mark.parametrize("answers", ["nothing", "no connection"])
def test_an_unresponsive_server_counts_as_not_cancelled(
    answers: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(WORKER_VARIABLE, FLOW_RUN)
    monkeypatch.setattr(cancellation, "ANSWER_SECONDS", 1.0)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if answers == "nothing":
            silent.listen()
        began = time.monotonic()
        with temporary_settings(
            {PREFECT_API_URL: f"http://127.0.0.1:{silent.getsockname()[1]}/api"}
        ):
            assert is_worker_restart(SIGTERM)
    assert 0.5 < time.monotonic() - began < 60.0
    assert "cannot ask Prefect whether" in caplog.text


class SlowServer(BaseHTTPRequestHandler):
    """Reports that it is busy, and later the state of the flow run."""

    state = "RUNNING"
    busy_until = 0.0

    def do_GET(self) -> None:
        is_busy = time.monotonic() < self.busy_until
        run = {"id": FLOW_RUN, "flow_id": FLOW_RUN, "name": "slow", "state": {"type": self.state}}
        body = json.dumps({"detail": "database is locked"} if is_busy else run).encode()
        self.send_response(503 if is_busy else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state", "is_restart"), [("CANCELLING", False), ("CANCELLED", False), ("RUNNING", True)]
)
def test_a_busy_server_is_polled_until_it_answers(
    state: str, is_restart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WORKER_VARIABLE, FLOW_RUN)
    monkeypatch.setattr(cancellation, "ANSWER_SECONDS", 200.0)
    monkeypatch.setattr(SlowServer, "state", state)
    with HTTPServer(("127.0.0.1", 0), SlowServer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            monkeypatch.setattr(SlowServer, "busy_until", time.monotonic() + 0.3)
            with temporary_settings(
                {PREFECT_API_URL: f"http://127.0.0.1:{server.server_port}/api"}
            ):
                assert is_worker_restart(SIGTERM) is is_restart
        finally:
            server.shutdown()
            thread.join()
