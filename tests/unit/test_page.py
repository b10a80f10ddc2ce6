"""What is sent to Prefect's page, and that no server is waited for."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks import page, poster
from tasks.page import StageProgress, artifact_key, newest_steps, unwrapped
from tasks.poster import Poster
from tasks.runs.run import Run
from tests.configs import make_config


def test_keys_hold_what_prefect_takes_and_keep_recipes_apart() -> None:
    assert artifact_key("arith_cpu", "train_policy") == "arith-cpu-train-policy"
    names = ["arith_cpu", "数学", "物理", "a b", "a.b", "a/b", "A.B", ".", "é"]
    keys = [artifact_key(name, "report") for name in names]
    assert len(set(keys)) == len(keys)
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", key) for key in keys)


def test_newest_steps_of_a_file_that_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert newest_steps(path) == []
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 13)) + '{"step": 13, "a')
    assert [line["step"] for line in newest_steps(path)] == [12, 11, 10, 9, 8, 7, 6, 5, 4, 3]


def test_newest_steps_do_not_begin_in_the_middle_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "x": "y" * 50_000}) + "\n" for step in range(1, 13)))
    assert [line["step"] for line in newest_steps(path)] == [12, 11, 10, 9, 8]  # 256 KiB hold five whole lines


def test_paragraphs_of_the_report_are_one_line_each() -> None:
    text = "# A\nOne\ntwo.\n\n- first\n  goes on\n- second\n\n| a |\n|---|\n| 1 |\nAfter\nit"
    assert unwrapped(text) == "# A\nOne two.\n\n- first goes on\n- second\n\n| a |\n|---|\n| 1 |\nAfter it"


class Recorder(Poster):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def post(self, name: str, message: poster.Message) -> None:
        self.names.append(name.partition(" of ")[0])


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(page, "poster", recorder)
    return recorder


def test_progress_is_posted_every_ten_seconds_and_at_the_end(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now = 100.0
    monkeypatch.setattr(page.time, "monotonic", lambda: now)
    config = make_config(store={"path": str(tmp_path)}, run={"name": "mine"})
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    run = Run(config, None, tmp_path, "dapo-full")  # type: ignore[arg-type]
    progress = StageProgress(run, "train_policy", tmp_path)
    progress.on_line("vllm is starting")
    progress.on_line("training step 1/4: right 20.0 %, 1.2 s")
    now = 109.0
    progress.on_line("training step 2/4: right 20.0 %, 1.2 s")
    now = 110.0
    progress.on_line("training step 3/4: right 20.0 %, 1.2 s")
    progress.on_line("training step 4/4: right 20.0 %, 1.2 s")
    assert recorder.names == ["mine-train-policy-progress", "mine-train-policy-steps"] * 3


class Api(ThreadingHTTPServer):
    """Answers with a status and counts the requests."""

    daemon_threads = True
    status = 200

    def __init__(self, port: int = 0) -> None:
        self.paths: list[str] = []
        super().__init__(("127.0.0.1", port), ApiHandler)


class ApiHandler(BaseHTTPRequestHandler):
    server: Api

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        self.send_response(self.server.status)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def api() -> Iterator[Api]:
    """Bound, so that nobody else takes the port, and answering once `serve` has been called on it."""
    with ExitStack() as stack:
        server = stack.enter_context(Api())
        url = f"http://127.0.0.1:{server.server_address[1]}/api"
        stack.enter_context(temporary_settings({PREFECT_API_URL: url}))
        yield server
        server.shutdown()


def serve(api: Api) -> None:
    threading.Thread(target=api.serve_forever, args=(0.01,), daemon=True).start()


def ask(path: str) -> poster.Message:
    def message(client: SyncPrefectClient) -> None:
        client.request("GET", path)  # type: ignore[arg-type]

    return message


def test_messages_come_in_order_and_a_newer_one_replaces_an_older(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(poster, "REQUEST_SECONDS", 0.2)
    monkeypatch.setattr(poster, "REST_SECONDS", 0.1)
    sender = Poster()
    started = time.monotonic()
    sender.post("first", ask("/one"))
    sender.post("table", ask("/old"))
    sender.post("last", ask("/three"))
    sender.post("table", ask("/two"))
    assert time.monotonic() - started < 0.2
    wait_until(lambda: "does not answer" in caplog.text)
    assert not sender.flush()  # does not wait for a server that is away
    assert time.monotonic() - started < 3.0
    serve(api)
    wait_until(lambda: "/api/three" in api.paths)
    assert sender.flush()
    assert api.paths[-3:] == ["/api/one", "/api/two", "/api/three"]
    assert "/api/old" not in api.paths
    assert caplog.text.count("does not answer") == 1


def test_what_the_server_refuses_is_said_and_dropped(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    serve(api)
    api.status = 422
    sender = Poster()
    sender.post("the report", ask("/refused"))
    assert sender.flush()
    assert "Prefect's page lacks the report: PrefectHTTPStatusError" in caplog.text
    api.status = 200
    sender.post("the next", ask("/taken"))
    assert sender.flush()
    assert api.paths == ["/api/refused", "/api/taken"]


def wait_until(check: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.02)
