"""Several servers start, fail and stop together; a small stand-in for vLLM fails on demand."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import httpx
import pytest

from eval import EvaluationError
from tasks.config.serve import ServeConfig
from tasks.evaluation.served_model import served_model_identity
from tasks.execution.retries import is_lasting
from tasks.processes import supervisor
from tasks.serve_model import servers
from tasks.serve_model.failure import ServeError, ServerDied
from tasks.serve_model.servers import Server, serve_model, serve_until_interrupted
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


def stand_in(monkeypatch: pytest.MonkeyPatch, *behaviours: str) -> list[int]:
    """Set the behaviour of each start (the last applies to all further ones); returns the ports
    used.
    """
    ports: list[int] = []

    def command(model_path: str | Path, settings: ServeConfig, port: int, name: str) -> list[str]:
        ports.append(port)
        return [
            sys.executable,
            "-c",
            STAND_IN,
            behaviours[min(len(ports), len(behaviours)) - 1],
            str(port),
        ]

    monkeypatch.setattr(servers, "serve_command", command)
    return ports


def settings(**changes: object) -> ServeConfig:
    return ServeConfig.model_validate(
        {"num_servers": 3, "max_model_len": 128, "startup_seconds": 600, **changes}
    )


def has_no_listener(server: Server) -> bool:
    try:
        httpx.get(server.base_url, trust_env=False)
    except httpx.ConnectError:
        return True
    return False


def test_all_servers_answer_and_are_gone_after_the_block(
    monkeypatch: pytest.MonkeyPatch, model_path: Path, tmp_path: Path
) -> None:
    ports = stand_in(monkeypatch, "answers")
    monkeypatch.setenv("HF_TOKEN", "hf_very-secret")
    monkeypatch.setenv("DATABASE_URL", "postgresql://reader:hunter22@warehouse/problems")
    with (
        contextlib.suppress(EvaluationError),  # not ServerDied: the servers live
        serve_model(model_path, settings(), tmp_path / "s.log") as running,
    ):
        server = running[0]
        assert [server.base_url for server in running] == [
            f"http://127.0.0.1:{port}" for port in ports
        ]
        assert len({server.api_key for server in running}) == 1
        assert str(server.api_key) not in server.command
        assert server.command.endswith(str(ports[0]))
        assert served_model_identity([server]) == served_model_identity(running)
        for wrong, message in (
            (
                replace(server, model="other"),
                "/v1/models serves policy, not 'other'; set --model-name",
            ),
            (
                replace(server, api_key="guess"),
                "refuses the key: HTTP 401; VLLM_API_KEY is not the server's",
            ),
            (replace(server, api_key=""), "refuses the key: HTTP 401; VLLM_API_KEY is not set"),
            (replace(server, base_url="127.0.0.1:1"), "does not answer: .*check --base-url"),
        ):
            with pytest.raises(ServeError, match=message):
                served_model_identity([wrong])
        raise EvaluationError("half of them failed")
    assert all(has_no_listener(server) for server in running)
    with pytest.raises(
        ServeError, match=r"/v1/models does not answer: .*; start it with dapo serve"
    ):
        served_model_identity([server])
    logs = {path.name: path.read_text() for path in tmp_path.glob("*.log")}
    assert logs.keys() == {"s.log", "s-2.log", "s-3.log"}
    assert {text.splitlines()[0] for text in logs.values()} == {
        "Bearer [redacted] None None"
    }  # it prints its secrets


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        (
            "refuses",
            r"^vllm serve 2 of 3 ended with exit code 1; its log is .*s-2\.log\n"
            r"vLLM reports: vllm: error: unrecognized arguments: --typo\nCorrect serve\.extra_args",
        ),
        (
            "breaks",
            r"^vLLM reports: ValueError: no room\nvllm serve 2 of 3 ended with exit code 1\. Its "
            r"last "
            r"lines, from .*s-2\.log:\n(  \| .*\n)+It ended before it was healthy",
        ),
    ],
)
def test_a_server_that_fails_is_quoted_and_stops_the_others(
    monkeypatch: pytest.MonkeyPatch, model_path: Path, tmp_path: Path, behaviour: str, message: str
) -> None:
    ports = stand_in(monkeypatch, "hangs", behaviour, "answers")
    started = time.monotonic()
    with (
        pytest.raises(ServeError, match=message) as caught,
        serve_model(model_path, settings(), tmp_path / "s.log"),
    ):
        pass
    assert (
        time.monotonic() - started < 300
    )  # not the 600 s that the first health request would take
    assert len(ports) == 3  # nothing was started again
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
        serve_model(model_path, settings(num_servers=1), tmp_path / "s.log"),
    ):
        pass
    assert caught.value.summary.count("\n") <= 2
    assert not is_lasting(caught.value)


def test_an_evaluation_that_failed_with_a_server_reports_it(
    monkeypatch: pytest.MonkeyPatch, model_path: Path, tmp_path: Path
) -> None:
    stand_in(monkeypatch, "answers", "ends later")
    monkeypatch.setenv("MAY_END", str(tmp_path / "end"))
    others = supervisor.descendants(
        os.getpid()
    ).keys()  # of tests before, such as multiprocessing's helpers

    def evaluate() -> None:
        with serve_model(model_path, settings(num_servers=2), tmp_path / "s.log"):
            (tmp_path / "end").touch()
            # One server and its supervisor are left.
            wait_until(
                lambda: len(supervisor.descendants(os.getpid()).keys() - others) == 2,
                "a server to end",
            )
            raise EvaluationError("nobody answers")

    message = r"^vllm serve 2 of 2 ended with exit code 3(.|\n)*: nobody answers$"
    with pytest.raises(ServerDied, match=message) as caught:
        evaluate()
    assert not is_lasting(caught.value)


def test_the_deadline_holds_while_a_health_request_hangs(
    monkeypatch: pytest.MonkeyPatch, model_path: Path, tmp_path: Path
) -> None:
    stand_in(monkeypatch, "hangs", "answers", "other")
    watch, healthy = servers._watch_health, list[threading.Event]()

    def watched(*arguments: Any) -> threading.Event:
        healthy.append(watch(*arguments))
        return healthy[-1]

    def clock() -> float:
        return 1e6 if len(healthy) == 3 and healthy[1].is_set() else 0.0

    monkeypatch.setattr(servers, "_watch_health", watched)
    monkeypatch.setattr(servers, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    started = time.monotonic()
    with (
        pytest.raises(
            ServeError, match=r"^2 of 3 servers not healthy after serve\.startup_seconds=3; .*"
        ) as caught,
        serve_model(model_path, settings(startup_seconds=3), tmp_path / "s.log"),
    ):
        pass
    assert time.monotonic() - started < 300  # a hanging health request takes 600
    assert "vllm serve 1 of 3, " in str(caught.value)
    assert "vllm serve 2 of 3, " not in str(caught.value)
    assert "vllm serve 3 of 3, " in str(caught.value)


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
        with serve_model(
            model_path, settings(num_servers=1, startup_seconds=120), tmp_path / "s.log"
        ):
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


def test_foreground_servers_stop_when_one_ends(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    model_path: Path,
    tmp_path: Path,
) -> None:
    ports = stand_in(monkeypatch, "answers", "ends later")
    monkeypatch.setenv("MAY_END", str(tmp_path / "end"))
    caplog.set_level(logging.INFO, logger="tasks.serve_model.servers")

    def let_one_end() -> None:
        wait_until(lambda: "2 servers answer" in caplog.text, "both servers")
        (tmp_path / "end").touch()

    threading.Thread(target=let_one_end).start()
    environment = {**os.environ, "VLLM_API_KEY": "mine"}
    with pytest.raises(
        ServeError,
        match=r"vllm serve 2 of 2 ended with exit code 3(.|\n)*The other servers are stopped",
    ):
        serve_until_interrupted(
            model_path, settings(num_servers=2), tmp_path / "s.log", environment
        )
    assert len(ports) == 2
