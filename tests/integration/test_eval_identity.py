"""An evaluation measures one model: a server that returns with another one is refused."""

import contextlib
import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval import EvaluationError, RequestsRefused
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
from tests.processes import wait_until

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
    server.logprobs, server.behave = ArithmeticServer.logprobs, lambda *_: False
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
    server: ArithmeticServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    show_weights = Handler.show_weights

    def flicker(handler: Handler, body: dict[str, Any]) -> None:
        # the second check asks for completions, then for a chat
        server.logprobs = None if server.num_probes in (1, 2) else ArithmeticServer.logprobs
        show_weights(handler, body)

    def fail(handler: Handler, prompt: str, attempt: int) -> bool:
        server.root = "" if handler.number >= 5 else ArithmeticServer.root
        return handler.number == 5 and handler.send(502, b"bad gateway")

    monkeypatch.setattr(Handler, "show_weights", flicker)
    server.behave = fail
    one = replace(LIMITS, concurrency=1)
    assert evaluate(make_set(9), Endpoint(server.url, "m"), SAMPLING, tmp_path, limits=one).n == 9
    assert len(server.requests) == 10  # the bad gateway is repeated, once the check has passed


def test_a_failure_invalidates_a_check_that_began_before_it(
    server: ArithmeticServer, tmp_path: Path
) -> None:
    """Request 3 fails while the check after the failure of request 1 waits."""

    def fail(handler: Handler, prompt: str, attempt: int) -> bool:
        if handler.number == 1:
            server.probes_go_on.clear()
            wait_until(lambda: len(server.requests) == 3, "all requests to be in flight")
        elif handler.number == 3:
            wait_until(lambda: server.num_probes == 2, "the check after the first failure")
            threading.Timer(0.2, server.probes_go_on.set).start()  # after the answer below
        return handler.number in (1, 3) and handler.send(502, b"bad gateway")

    server.behave = fail
    three = replace(LIMITS, concurrency=3)
    evaluate(make_set(3), Endpoint(server.url, "m"), SAMPLING, tmp_path, limits=three)
    assert server.num_probes == 4  # before the first request, after each failure, at the end


@pytest.mark.parametrize("end", ["same model", "other model"])
def test_answers_are_stored_while_a_check_hangs_and_count_only_if_it_passes(
    server: ArithmeticServer, tmp_path: Path, end: str
) -> None:
    """The server drops a request; its siblings are answered while the check after it hangs."""
    answering = threading.Event()

    def behave(handler: Handler, prompt: str, attempt: int) -> bool:
        if handler.number == 9:
            wait_until(lambda: len(read_rows(tmp_path)) == 8, "the first answers to be stored")
            server.probes_go_on.clear()
            return handler.drop()
        if 10 <= handler.number <= 12:
            answering.wait(60)
        return False

    server.behave = behave
    endpoint = Endpoint(server.url, "m")
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(evaluate, make_set(20), endpoint, SAMPLING, tmp_path, limits=LIMITS)
        wait_until(lambda: server.num_probes == 2 and len(server.requests) == 12, "the check")
        answering.set()
        wait_until(lambda: len(read_rows(tmp_path)) == 11, "the answers to be stored")
        server.logprobs = OTHER if end == "other model" else ArithmeticServer.logprobs
        server.probes_go_on.set()
        if end == "other model":
            with pytest.raises(ModelChangedError, match=CHANGED):
                running.result()
        else:
            assert running.result().n == 20
    if end == "same model":
        assert len(server.requests) == 21  # only the dropped request is repeated
    assert len(read_rows(tmp_path)) == (8 if end == "other model" else 20)


def test_answers_after_a_failure_do_not_count_if_the_server_is_never_identified_again(
    server: ArithmeticServer, tmp_path: Path
) -> None:
    def behave(handler: Handler, prompt: str, attempt: int) -> bool:
        if handler.number == 3:
            wait_until(lambda: len(read_rows(tmp_path)) == 2, "the answers before the failure")
            server.fails_on_probes = True
            return handler.send(400, b"too long")
        if handler.number == 4:
            wait_until(lambda: len(read_rows(tmp_path)) == 3, "the failure")
        return False

    server.behave = behave
    endpoint, four = Endpoint(server.url, "m"), replace(LIMITS, concurrency=4)
    with pytest.raises(EvaluationError, match=r"1 of 4 requests .* failed, 1 were not answered"):
        evaluate(make_set(4), endpoint, SAMPLING, tmp_path, limits=four)
    server.behave, server.fails_on_probes = (lambda *_: False), False
    assert evaluate(make_set(4), endpoint, SAMPLING, tmp_path, limits=four).n == 4


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
