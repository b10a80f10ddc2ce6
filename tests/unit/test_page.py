"""What is sent to the Prefect UI, without waiting for the server."""

import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from dapo_core.metrics.step_files import GENERATIONS, ROLLOUTS, StepFiles
from tasks.execution import page
from tasks.execution.page import PageArtifact, TrainingProgress, artifact_key, unwrapped
from tasks.runs.run import Run
from tests.configs import make_config
from tests.sources import Clock

ARTIFACT_ID = "7bfb7b22-e1bc-4db8-8b33-87d230d2fce0"


def test_artifact_keys_are_valid_and_unique() -> None:
    assert artifact_key("arith_cpu", "train_policy") == "arith-cpu-train-policy"
    names = ["arith_cpu", "数学", "物理", "a b", "a.b", "a/b", "A.B", ".", "é"]
    keys = [artifact_key(name, "report") for name in names]
    assert len(set(keys)) == len(keys)
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", key) for key in keys)


def test_paragraphs_of_the_report_are_one_line_each() -> None:
    text = "# A\nOne\ntwo.\n\n- first\n  goes on\n- second\n\n| a |\n|---|\n| 1 |\nAfter\nit"
    assert (
        unwrapped(text)
        == "# A\nOne two.\n\n- first goes on\n- second\n\n| a |\n|---|\n| 1 |\nAfter it"
    )


def mine(tmp_path: Path) -> Run:
    config = make_config(store={"path": str(tmp_path)}, run={"name": "mine"})
    return Run(config, None, tmp_path, "dapo-full")  # type: ignore[arg-type]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    sent: list[Any] = []
    monkeypatch.setattr(PageArtifact, "show", lambda _, data: sent.append(data))
    return sent


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(page.time, "monotonic", clock)
    return clock


def training(tmp_path: Path) -> TrainingProgress:
    progress = TrainingProgress(mine(tmp_path), "train_policy", tmp_path)
    progress._steps.total_steps = 4
    return progress


def row(step: int, **metrics: Any) -> dict[str, Any]:
    return {"step": step, "wall_time": time.time(), **metrics}


def test_steps_are_shown_every_ten_seconds_and_at_the_end(
    shown: list[Any], clock: Clock, tmp_path: Path
) -> None:
    earlier = row(1)
    progress = training(tmp_path)
    assert progress.on_rows([earlier]) == [], "a step of an earlier attempt"
    for seconds, steps in ((9.0, (2, 3)), (1.0, (2,)), (0.0, (3, 4))):  # a worker died after step 3
        clock.now += seconds
        logged = progress.on_rows([row(step, **{"sampler/accuracy": step / 8}) for step in steps])
        assert [one.done for one in logged] == [*steps]
    assert shown[::2] == [25.0, 50.0, 100.0]
    tables = [json.loads(table) for table in shown[1::2]]
    assert [[line["step"] for line in table] for table in tables] == [[1], [2, 1], [4, 3, 2, 1]]
    assert tables[-1][0]["accuracy"] == 0.5


def test_responses_of_validations_and_of_training_are_shown_once(
    shown: list[Any], clock: Clock, tmp_path: Path
) -> None:
    progress = training(tmp_path)
    response = f"one|\n## two {'x' * 5000} three"
    answer = {"set": "gsm8k", "prompt": "1 + 1?", "response": response, "answer": None, "gold": "2"}
    wrong = {**answer, "score": -1.0, "verdict": "wrong", "truncated": False}
    right = {**wrong, "score": 1.0, "verdict": "right"}
    rollouts = [wrong, wrong, right, *({**right, "prompt_number": number} for number in (1, 2))]
    for step in (0, 1, 2):
        if step != 1:
            StepFiles(tmp_path, GENERATIONS).write(step, [wrong])
        else:
            StepFiles(tmp_path, ROLLOUTS).write(step, rollouts)
        progress.on_rows([row(step)])
        clock.now += 10.0
    texts = [text for text in shown if isinstance(text, str) and " training step " in text]
    assert [text.splitlines()[0] for text in texts] == [
        "# Validation responses, training step 0",
        "# Responses trained on, training step 1",
        "# Validation responses, training step 2",
    ]
    assert texts[1].count("## gsm8k: ") == 3, "a wrong and a right one, and one of another prompt"
    assert "## gsm8k: wrong, score -1, answer None, gold '2'" in texts[0]
    assert "    one|\n    ## two xxx" in texts[0], "a response is text, not Markdown"
    assert "[...]" in texts[0]
    assert len(texts[0]) < 4500


class Api(ThreadingHTTPServer):
    """Answers each request with the next status and an artifact id."""

    daemon_threads = True

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.requests: list[tuple[str, str, Any]] = []
        super().__init__(("127.0.0.1", 0), ApiHandler)


class ApiHandler(BaseHTTPRequestHandler):
    server: Api

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.command, self.path, body["data"]))
        self.send_response(self.server.statuses.pop(0))
        answer = json.dumps({"id": ARTIFACT_ID}).encode()
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def do_GET(self) -> None:
        self.send_error(404)  # no CSRF tokens here

    def do_PATCH(self) -> None:
        self.do_POST()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.slow
def test_an_artifact_is_created_once_and_updated_and_a_refusal_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", ARTIFACT_ID)
    monkeypatch.setattr(page, "RETRY_SECONDS", 0.1)
    artifact = PageArtifact(mine(tmp_path), "report", "markdown", "verdict")
    api = Api(201, 204, 422)  # bound: requests wait until it serves
    with (
        api,
        temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{api.server_address[1]}/api"}),
    ):
        began = time.monotonic()
        monkeypatch.setenv("HF_TOKEN", "hf_very-secret")
        artifact.show("one")
        while artifact._unsent:  # until it is being sent
            time.sleep(0.01)
        for data in ("replaced", "hf_very-secret"):
            artifact.show(data)
        assert time.monotonic() - began < 50.0  # no stage waits for the server
        threading.Thread(target=api.serve_forever, args=(0.01,), daemon=True).start()
        page.wait_until_sent()
        artifact.show("refused")
        page.wait_until_sent()
        api.shutdown()
    update = f"/api/artifacts/{ARTIFACT_ID}"
    assert api.requests == [
        ("POST", "/api/artifacts/", "one"),
        ("PATCH", update, "[redacted]"),
        ("PATCH", update, "refused"),
    ]
    assert "cannot show mine-report in the Prefect UI: PrefectHTTPStatusError" in caplog.text


def test_an_unreachable_server_is_retried_for_a_limited_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", ARTIFACT_ID)
    monkeypatch.setattr(page, "RETRY_SECONDS", 0.1)
    monkeypatch.setattr(page, "PATIENCE_SECONDS", 0.5)
    refused = mock.Mock(side_effect=httpx.ConnectError("refused"))
    monkeypatch.setattr(PageArtifact, "_send_once", refused)
    began = time.monotonic()
    for name in ("report", *map(str, range(20))):
        PageArtifact(mine(tmp_path), name, "markdown", "verdict").show("text")
    page.wait_until_sent()
    assert 0.5 < time.monotonic() - began < 5.0, "in all, not for each artifact"
    assert caplog.text.count("cannot show mine-report in the Prefect UI: ConnectError") == 1


def test_no_server_is_contacted_outside_a_flow_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PREFECT__FLOW_RUN_ID", raising=False)
    sent: list[object] = []
    monkeypatch.setattr(PageArtifact, "_send", lambda _, data: sent.append(data))
    PageArtifact(mine(tmp_path), "report", "markdown", "verdict").show("text")
    page.wait_until_sent()
    assert sent == []
