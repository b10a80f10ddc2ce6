"""An evaluation measures one model: a server that returns with another one is refused."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from dataclasses import replace
from pathlib import Path

import pytest

from eval import RequestsRefused
from eval.endpoint import Endpoint, Sampling
from eval.report.compare import compare
from eval.report.report import UNKNOWN, describe_measurement
from eval.requests.dispatch import Limits
from eval.requests.identity import ModelChangedError
from eval.results.rows import load_evaluation, read_rows, read_settings
from eval.results.summary import Summary
from tasks.evaluation.served_model import served_folder, served_model_identity
from tasks.serve_model.failure import ServeError
from tests.evaluations import evaluate
from tests.integration.arithmetic_server import ArithmeticServer, Handler, make_set

SAMPLING = Sampling(max_tokens=64)
LIMITS = Limits(
    concurrency=4, timeout_seconds=200.0, max_attempts=8, backoff_seconds=0.01, outage_seconds=200.0
)
OTHER = {" a": -3.0, " an": -0.2, " the": -5.0}
CHANGED = r"serves another model than .* under the same name \(m\): its log-probs .* differ"


@pytest.mark.parametrize("how", ["restarted", "behind a proxy"])
def test_a_server_that_returns_with_another_model_is_refused(
    server: ArithmeticServer, tmp_path: Path, how: str
) -> None:
    """80 answers of one model and 120 of another must not become one score."""

    def change(handler: Handler, prompt: str, attempt: int) -> bool:
        # all requests in flight notice the outage
        if not 80 <= handler.number < 80 + 2 * LIMITS.concurrency:
            return False
        server.logprobs = OTHER
        return handler.drop() if how == "restarted" else handler.send(502, b"bad gateway")

    server.behave = change
    endpoint = Endpoint(server.url, "m")
    with pytest.raises(ModelChangedError, match=CHANGED):
        evaluate(make_set(200), endpoint, SAMPLING, tmp_path, limits=LIMITS)
    kept = read_rows(tmp_path)
    assert 70 <= len(kept) < 80
    assert not (tmp_path / "summary.json").exists()
    # The same command is refused while the other model is served, and continues with the first.
    with pytest.raises(ModelChangedError, match=CHANGED):
        evaluate(make_set(200), endpoint, SAMPLING, tmp_path, limits=LIMITS)
    assert read_rows(tmp_path) == kept
    server.logprobs = ArithmeticServer.logprobs
    assert evaluate(make_set(200), endpoint, SAMPLING, tmp_path, limits=LIMITS).n == 200


def test_a_silently_exchanged_model_is_noticed_at_the_end(
    server: ArithmeticServer, tmp_path: Path
) -> None:
    def change(handler: Handler, prompt: str, attempt: int) -> bool:
        if handler.number == 30:
            server.logprobs = OTHER
        return False

    server.behave = change
    with pytest.raises(ModelChangedError, match=CHANGED):
        evaluate(make_set(60), Endpoint(server.url, "m"), SAMPLING, tmp_path, limits=LIMITS)
    assert read_rows(tmp_path) == {}  # any answer may come from either model
    assert len(read_rows(tmp_path / "superseded-1")) == 60


def test_one_reply_without_log_probs_or_folder_is_not_another_model(
    server: ArithmeticServer, tmp_path: Path
) -> None:
    def flicker(handler: Handler, prompt: str, attempt: int) -> bool:
        server.logprobs = None if handler.number in (5, 6) else ArithmeticServer.logprobs
        server.root = "" if handler.number >= 5 else ArithmeticServer.root
        return handler.number == 5 and handler.send(502, b"bad gateway")

    server.behave = flicker
    one = replace(LIMITS, concurrency=1)
    assert evaluate(make_set(9), Endpoint(server.url, "m"), SAMPLING, tmp_path, limits=one).n == 9
    assert len(server.requests) == 11  # the bad gateway, and the answer that could not be checked


def test_a_failure_invalidates_a_check_that_began_before_it(
    server: ArithmeticServer, tmp_path: Path
) -> None:
    server.probes_go_on.clear()

    def fail(handler: Handler, prompt: str, attempt: int) -> bool:
        if handler.number == 3:  # the retry after the 502
            server.probes_go_on.set()
        # wait until the first answer is being checked
        while handler.number == 2 and not server.num_probes:
            time.sleep(0.01)
        return handler.number == 2 and handler.send(502, b"bad gateway")

    server.behave = fail
    two = replace(LIMITS, concurrency=2)
    evaluate(make_set(2), Endpoint(server.url, "m"), SAMPLING, tmp_path, limits=two)
    assert server.num_probes == 3  # for the first answer, after the failure, at the end


def test_the_identity_of_the_weights_is_stored_and_a_missing_one_reported(
    server: ArithmeticServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def served(name: str) -> object:
        evaluate(make_set(6), Endpoint(server.url, "m"), SAMPLING, tmp_path / name, limits=LIMITS)
        return (read_settings(tmp_path / name) or {})["served"]

    root, by = ArithmeticServer.root, {"has_local_files": False, "name": "m", "url": server.url}
    known = {"root": root, "logprobs": [ArithmeticServer.logprobs], "engine": "adder-1", **by}
    assert served("completions") == known
    assert server.num_probes == 2  # before the first answer counts and at the end
    server.is_chat_only = True
    assert served("chat") == known
    server.logprobs = None
    with caplog.at_level(logging.WARNING):
        assert served("neither") == {"root": root, "logprobs": None, "engine": None, **by}
        server.fails_on_probes = True
        assert served("fails") == {"root": None, "logprobs": None, "engine": None, **by}
    assert f"returns no log-probs: only its model folder {root} identifies it" in caplog.text
    summary = json.loads((tmp_path / "neither" / "summary.json").read_text())
    assert summary["settings"]["served"]["root"] == root
    assert "served" not in load_evaluation(tmp_path / "neither").shared_settings


def test_the_server_is_recorded_without_credentials_and_may_move(
    server: ArithmeticServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def ask(url: str, name: str) -> Summary:
        endpoint = Endpoint(url, "m")
        return evaluate(
            make_set(6), endpoint, SAMPLING, tmp_path / name, limits=LIMITS, model_digest="0" * 64
        )

    for name, url in (
        ("before", server.url),
        ("after", server.url.replace("//", "//user:secret@")),
    ):
        server.behave = lambda handler, prompt, _: (
            prompt[:2] == "3 " and handler.send(400, b"too long")
        )
        with pytest.raises(RequestsRefused):
            ask(url, name)
        server.behave = lambda *_: False
        assert ask(f"{url}/v1", name).n == 6
        assert (read_settings(tmp_path / name) or {})["served"]["url"] == f"{server.url}/v1"
        assert "secret" not in (tmp_path / name / "summary.json").read_text()
    assert "superseded" not in caplog.text
    compared = compare(tmp_path / "before", tmp_path / "after")
    assert describe_measurement(compared, UNKNOWN)["model before"] == "m (sha256 000000000000)"


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (404, b"404 page not found", None),
        (405, b"", None),
        (200, b'{"models": [{"name": "m"}]}', None),
        (200, b'{"data": [null, {}, {"object": "model"}]}', None),
        (200, b'{"data": [{"id": "n"}]}', r"does not serve 'm'; it has n; set --model-name"),
        (200, b"<html>Open WebUI</html>", r"HTTP 200.*correct the base URL"),
        (301, b"", r"redirects to https://h/v1/models: use that base URL"),
        (401, b"", r"refuses the key: HTTP 401; VLLM_API_KEY is not set"),
        (503, b"starting", r"HTTP 503, 'starting'\. The server failed"),
    ],
)
def test_a_server_without_a_list_of_models_is_trusted_to_serve_the_name(
    server: ArithmeticServer,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    body: bytes,
    message: str | None,
) -> None:
    headers = {"Location": "https://h/v1/models"}
    monkeypatch.setattr(Handler, "do_GET", lambda self: self.send(status, body, headers=headers))
    endpoint = Endpoint(server.url, "m")
    expected = pytest.raises(ServeError, match=message) if message else contextlib.nullcontext()
    with expected:
        assert len(served_model_identity(endpoint)) == 64
        assert served_folder(endpoint) is None
