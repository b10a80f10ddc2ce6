"""A server starts, fails and stops; a small stand-in for vLLM fails on demand."""

import contextlib
import os
import random
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType

import httpx
import pytest

from eval import EvaluationError
from tasks.config.serve import ServeConfig
from tasks.evaluation.served_model import served_model_identity
from tasks.execution.retries import is_lasting
from tasks.processes import supervisor
from tasks.serve_model import servers
from tasks.serve_model.failure import ServeError, ServerDied
from tasks.serve_model.servers import Server, serve_model
from tests.processes import wait_until

# Arguments: behaviour, port. It writes what vLLM writes.
STAND_IN = r"""
import http.server, json, os, sys, threading, time

behaviour, port = sys.argv[1], int(sys.argv[2])
key = "Bearer " + os.environ["VLLM_API_KEY"]
print(key, os.environ.get("HF_TOKEN"), os.environ.get("DATABASE_URL"), flush=True)


class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, content):
        if self.headers["Authorization"] != key:
            self.send_error(401)
            return
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if behaviour == "hangs":
            time.sleep(600)
        self.answer({"data": [{"id": "other" if behaviour == "other" else "policy"}]})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer({"choices": [{"text": "1"}]})

    def log_message(self, *words):
        pass


if behaviour == "refuses":
    sys.exit("usage: vllm [-h]\nvllm: error: unrecognized arguments: --typo")
if behaviour == "is killed":
    os.kill(os.getpid(), 9)
if behaviour == "finds its port taken":
    raise OSError(98, "Address already in use")
if behaviour == "breaks":
    raise ValueError("no room")


def end_later():
    while not os.path.exists(os.environ["MAY_END"]):
        time.sleep(0.02)
    os._exit(3)


if behaviour == "ends later":
    threading.Thread(target=end_later, daemon=True).start()
http.server.ThreadingHTTPServer.allow_reuse_address = False
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture(autouse=True)
def everything_is_gone() -> object:
    before = set(supervisor.descendants(os.getpid()))
    yield
    assert set(supervisor.descendants(os.getpid())) <= before


def stand_in(monkeypatch: pytest.MonkeyPatch, behaviour: str) -> list[int]:
    """Serve with a stand-in of that behaviour; returns the ports used."""
    ports: list[int] = []

    def command(model_path: str | Path, settings: ServeConfig, port: int, name: str) -> list[str]:
        ports.append(port)
        return [sys.executable, "-c", STAND_IN, behaviour, str(port)]

    monkeypatch.setattr(servers, "serve_command", command)
    return ports


def settings(**changes: object) -> ServeConfig:
    return ServeConfig.model_validate({"max_model_len": 128, "startup_seconds": 600, **changes})


def has_no_listener(server: Server) -> bool:
    try:
        httpx.get(server.base_url, trust_env=False)
    except httpx.ConnectError:
        return True
    return False


def test_a_server_answers_without_our_secrets_and_is_gone_after_the_block(
    monkeypatch: pytest.MonkeyPatch, model_path: Path, tmp_path: Path
) -> None:
    ports = stand_in(monkeypatch, "answers")
    monkeypatch.setenv("HF_TOKEN", "hf_very-secret")
    monkeypatch.setenv("DATABASE_URL", "postgresql://reader:hunter22@warehouse/problems")
    with (
        contextlib.suppress(EvaluationError),  # not ServerDied: the server lives
        serve_model(model_path, settings(), tmp_path / "s.log") as server,
    ):
        assert [server.base_url] == [f"http://127.0.0.1:{port}" for port in ports]
        assert str(server.api_key) not in server.command
        assert server.command.endswith(str(ports[0]))
        assert len(served_model_identity(server)) == 64
        for wrong, message in (
            (
                replace(server, model="other"),
                "/v1/models does not serve 'other'; it has policy; set --model-name",
            ),
            (
                replace(server, api_key="guess"),
                "refuses the key: HTTP 401; VLLM_API_KEY is not the server's",
            ),
            (replace(server, api_key=""), "refuses the key: HTTP 401; VLLM_API_KEY is not set"),
            (replace(server, base_url="http://127.0.0.1:1"), "not answer: .*check --base-url"),
        ):
            with pytest.raises(ServeError, match=message):
                served_model_identity(wrong)
        raise EvaluationError("half of them failed")
    assert has_no_listener(server)
    with pytest.raises(ServeError, match=r"/v1/models does not answer: .*; start it with dapo"):
        served_model_identity(server)
    first = (tmp_path / "s.log").read_text().splitlines()[0]
    assert first == "Bearer [redacted] None None"  # it prints its secrets


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("refuses", r"^vllm serve ended with exit code 1; its log is .*s\.log\nvLLM reports: vllm"),
        (
            "breaks",
            r"^vLLM reports: ValueError: no room\nvllm serve ended with exit code 1\. Its last "
            r"lines, from .*s\.log:\n(  \| .*\n)+It ended before it was healthy",
        ),
    ],
)
def test_a_server_that_fails_is_quoted(
    monkeypatch: pytest.MonkeyPatch, model_path: Path, tmp_path: Path, behaviour: str, message: str
) -> None:
    ports = stand_in(monkeypatch, behaviour)
    with (
        pytest.raises(ServeError, match=message) as caught,
        serve_model(model_path, settings(), tmp_path / "s.log"),
    ):
        pass
    assert len(ports) == 1  # nothing was started again
    assert ("  |" in str(caught.value)) == (behaviour == "breaks")


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("is killed", r"^vllm serve was killed by SIGKILL"),
        ("finds its port taken", r"^vLLM reports: OSError: \[Errno 98\] Address already in use"),
    ],
)
def test_a_killed_server_or_a_lost_port_is_retried(
    monkeypatch: pytest.MonkeyPatch, model_path: Path, tmp_path: Path, behaviour: str, message: str
) -> None:
    stand_in(monkeypatch, behaviour)
    with (
        pytest.raises(ServerDied, match=message) as caught,
        serve_model(model_path, settings(), tmp_path / "s.log"),
    ):
        pass
    assert caught.value.summary.count("\n") <= 2
    assert not is_lasting(caught.value)


def test_an_evaluation_that_failed_with_a_server_reports_it(
    monkeypatch: pytest.MonkeyPatch, model_path: Path, tmp_path: Path
) -> None:
    stand_in(monkeypatch, "ends later")
    monkeypatch.setenv("MAY_END", str(tmp_path / "end"))
    # of tests before, such as multiprocessing's helpers
    others = supervisor.descendants(os.getpid()).keys()

    def evaluate() -> None:
        with serve_model(model_path, settings(), tmp_path / "s.log"):
            (tmp_path / "end").touch()
            wait_until(
                lambda: not supervisor.descendants(os.getpid()).keys() - others, "the server to end"
            )
            raise EvaluationError("nobody answers")

    message = r"^vllm serve ended with exit code 3(.|\n)*: nobody answers$"
    with pytest.raises(ServerDied, match=message) as caught:
        evaluate()
    assert not is_lasting(caught.value)


def test_the_deadline_holds_while_a_health_request_hangs(
    monkeypatch: pytest.MonkeyPatch, model_path: Path, tmp_path: Path
) -> None:
    stand_in(monkeypatch, "hangs")
    started = time.monotonic()
    with (
        pytest.raises(ServeError, match=r"not healthy after serve\.startup_seconds=3; .*s\.log:"),
        serve_model(model_path, settings(startup_seconds=3), tmp_path / "s.log"),
    ):
        pass
    assert time.monotonic() - started < 300  # a hanging health request takes 600


class Terminated(BaseException):
    """Raised by a signal handler, like Prefect's."""


def test_a_signal_ends_the_wait_for_servers_whenever_it_comes(
    monkeypatch: pytest.MonkeyPatch, model_path: Path, tmp_path: Path
) -> None:
    stand_in(monkeypatch, "other")
    monkeypatch.setattr(servers, "POLL_SECONDS", 0.0)

    def handle(number: int, frame: FrameType | None) -> None:
        raise Terminated

    def start_and_kill(seconds: float) -> None:
        killer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM))
        killer.start()
        with serve_model(model_path, settings(startup_seconds=120), tmp_path / "s.log"):
            pytest.fail("it was healthy")

    others = supervisor.descendants(os.getpid()).keys()
    draw, before = random.Random(7), signal.signal(signal.SIGTERM, handle)
    try:
        for _ in range(4):
            with pytest.raises(Terminated):
                start_and_kill(draw.uniform(0.5, 1.0))
            assert supervisor.descendants(os.getpid()).keys() <= others
    finally:
        signal.signal(signal.SIGTERM, before)
