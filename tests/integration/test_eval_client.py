"""The evaluation client and its resumable run against a real HTTP server that misbehaves on purpose."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from eval.benchmark import Item
from eval.client import ChatClient, Endpoint, Outcome, Sampling
from eval.errors import EvaluationError
from eval.results import read_rows
from eval.run import evaluate
from tests.integration.arithmetic_server import ArithmeticServer, Behaviour, Handler

SAMPLING = Sampling(max_tokens=64, temperature=0.0, top_p=0.9, seed=7)


@pytest.fixture
def server() -> Iterator[ArithmeticServer]:
    with ArithmeticServer() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def endpoint(server: ArithmeticServer) -> Endpoint:
    return Endpoint(
        server.url, "m", api_key="secret", concurrency=8, timeout_seconds=5.0, max_attempts=4, backoff_seconds=0.01
    )


def make_items(count: int) -> list[Item]:
    return [
        Item(f"item-{i}", ({"role": "user", "content": f"{i} + 1 = ?"},), str(i + 1), "add", "1")
        for i in range(count)
    ]


def ask(endpoint: Endpoint, prompt: str = "2 + 3 = ?") -> Outcome:
    async def one() -> Outcome:
        async with ChatClient(endpoint, SAMPLING) as client:
            return await client.ask([{"role": "user", "content": prompt}])

    return asyncio.run(one())


def test_the_request_carries_key_model_and_sampling(server: ArithmeticServer, endpoint: Endpoint) -> None:
    outcome = ask(endpoint)
    assert (outcome.text, outcome.finish_reason, outcome.response_tokens, outcome.attempts) == (
        "Answer: 5",
        "stop",
        5,
        1,
    )
    path, authorization, body = server.requests[0]
    assert (path, authorization) == ("/v1/chat/completions", "Bearer secret")
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "2 + 3 = ?"}],
        "max_tokens": 64,
        "temperature": 0.0,
        "top_p": 0.9,
        "seed": 7,
    }


def test_base_url_may_end_in_v1(server: ArithmeticServer, endpoint: Endpoint) -> None:
    assert ask(replace(endpoint, base_url=server.url + "/v1/")).text == "Answer: 5"


def test_a_proxy_of_the_environment_is_not_used_for_this_machine(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert ask(endpoint).text == "Answer: 5"


FAULTS: dict[str, Behaviour] = {
    "HTTP 500: boom": lambda handler, prompt, attempt: handler.send(500, b"boom"),
    "HTTP 429: slow down": lambda handler, prompt, attempt: handler.send(429, b"slow down"),
    "invalid JSON": lambda handler, prompt, attempt: handler.send(200, b'{"choices": ['),
    "RemoteProtocolError": lambda handler, prompt, attempt: handler.drop(),
    "not a chat completion": lambda handler, prompt, attempt: handler.send(200, b'{"choices": []}'),
}


@pytest.mark.parametrize("reason", list(FAULTS))
def test_a_fault_that_passes_is_retried_and_one_that_stays_is_told(
    server: ArithmeticServer, endpoint: Endpoint, reason: str
) -> None:
    fault = FAULTS[reason]
    server.behave = lambda handler, prompt, attempt: attempt <= 2 and fault(handler, prompt, attempt)
    outcome = ask(endpoint)
    assert (outcome.text, outcome.attempts, outcome.failure) == ("Answer: 5", 3, None)

    server.behave = fault
    outcome = ask(endpoint, "4 + 4 = ?")
    assert (outcome.text, outcome.attempts) == (None, 4)
    assert outcome.failure is not None
    assert outcome.failure.startswith(reason)


def test_a_truncated_body_is_retried(server: ArithmeticServer, endpoint: Endpoint) -> None:
    def cut(handler: Handler, prompt: str, attempt: int) -> bool:
        if attempt == 1:
            handler.send(200, b'{"choices"', declared_bytes=500)
            handler.drop()
        return attempt == 1

    server.behave = cut
    assert (ask(endpoint).text, server.asked["2 + 3 = ?"]) == ("Answer: 5", 2)


def test_a_refusal_is_final(server: ArithmeticServer, endpoint: Endpoint) -> None:
    server.behave = lambda handler, prompt, attempt: handler.send(401, b"wrong key")
    outcome = ask(endpoint)
    assert (outcome.text, outcome.attempts, outcome.failure) == (None, 1, "HTTP 401: wrong key")


def test_nobody_listening_is_a_failed_outcome(endpoint: Endpoint) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    outcome = ask(replace(endpoint, base_url=url))
    assert (outcome.text, outcome.attempts) == (None, 4)
    assert "ConnectError" in str(outcome.failure)


def test_an_answer_that_never_comes_ends_with_the_time_out(server: ArithmeticServer, endpoint: Endpoint) -> None:
    release = threading.Event()
    server.behave = lambda handler, prompt, attempt: release.wait(20)
    outcome = ask(replace(endpoint, timeout_seconds=0.2, max_attempts=2))
    release.set()
    assert (outcome.text, outcome.failure, outcome.attempts) == (None, "no answer within 0.2 s", 2)
    assert outcome.seconds < 2


def test_a_body_that_drips_does_not_outlive_the_time_out(server: ArithmeticServer, endpoint: Endpoint) -> None:
    def drip(handler: Handler, prompt: str, attempt: int) -> bool:
        handler.send(200, b" ", declared_bytes=10_000)
        for _ in range(100):  # each byte would renew a time-out that counts silence only
            handler.wfile.write(b" ")
            time.sleep(0.05)
        return True

    server.behave = drip
    outcome = ask(replace(endpoint, timeout_seconds=0.3, max_attempts=1))
    assert (outcome.text, outcome.failure) == (None, "no answer within 0.3 s")
    assert outcome.seconds < 2


def test_nan_null_and_lone_surrogates_in_a_body(
    server: ArithmeticServer, endpoint: Endpoint, tmp_path: Path
) -> None:
    body = b'{"choices": [{"message": {"content": "\\ud800 Answer: 1"}, "finish_reason": "stop", "logprob": NaN}]}'
    server.behave = lambda handler, prompt, attempt: handler.send(200, body)
    assert evaluate(make_items(1), endpoint, SAMPLING, tmp_path).accuracy == 1.0
    assert read_rows(tmp_path)["item-0"].response == "\ufffd Answer: 1"

    empty = b'{"choices": [{"message": {"content": null}, "finish_reason": "length"}]}'
    server.behave = lambda handler, prompt, attempt: handler.send(200, empty)
    outcome = ask(endpoint)
    assert (outcome.text, outcome.finish_reason, outcome.response_tokens) == ("", "length", None)


def test_concurrency_is_used_and_bounded(server: ArithmeticServer, endpoint: Endpoint, tmp_path: Path) -> None:
    def slow(handler: Handler, prompt: str, attempt: int) -> bool:
        time.sleep(0.1)
        return False

    server.behave = slow
    start = time.monotonic()
    evaluate(make_items(40), endpoint, SAMPLING, tmp_path)
    assert server.most_in_flight == 8
    assert time.monotonic() - start < 2.5  # 40 / 8 * 0.1 s, against 4 s one by one


def test_one_500_in_five_leaves_no_item_unanswered(
    server: ArithmeticServer, endpoint: Endpoint, tmp_path: Path
) -> None:
    server.behave = lambda handler, prompt, attempt: len(server.requests) % 5 == 0 and handler.send(500, b"boom")
    summary = evaluate(make_items(50), replace(endpoint, max_attempts=8), SAMPLING, tmp_path)
    assert (summary.accuracy, summary.n, summary.request_failed_rate) == (1.0, 50, 0.0)
    assert len(server.requests) > 50


def test_rows_and_summary_hold_what_was_asked_and_answered(
    server: ArithmeticServer, endpoint: Endpoint, tmp_path: Path
) -> None:
    # Item 0 is cut off, items 1-3 are right; gold of item 3 is made wrong.
    items = make_items(4)
    items[3] = replace(items[3], gold="-1", level="2")
    server.behave = lambda handler, prompt, attempt: prompt.startswith("0 ") and handler.answer(prompt, "length")
    summary = evaluate(items, endpoint, SAMPLING, tmp_path, model_digest="sha256:abc")
    assert (summary.accuracy, summary.truncated_rate, summary.no_answer_rate) == (0.5, 0.25, 0.0)
    assert summary.by_level == {
        "1": {"n": 3, "right": 2, "accuracy": 2 / 3},
        "2": {"n": 1, "right": 0, "accuracy": 0.0},
    }
    assert summary.mean_response_tokens == 5.0
    assert summary.settings["model"] == "sha256:abc"
    stored = json.loads((tmp_path / "summary.json").read_text())
    assert (stored["accuracy"], stored["settings"]["sampling"]["max_tokens"]) == (0.5, 64)
    assert list(read_rows(tmp_path)) == ["item-0", "item-1", "item-2", "item-3"]
    row = read_rows(tmp_path)["item-1"]
    assert row.prompt == ({"role": "user", "content": "1 + 1 = ?"},)
    assert (row.response, row.answer, row.gold, row.verdict) == ("Answer: 2", "2", "2", "right")
    assert "secret" not in (tmp_path / "settings.json").read_text() + (tmp_path / "results.jsonl").read_text()


def test_too_many_failures_raise_and_the_next_attempt_asks_only_for_them(
    server: ArithmeticServer, endpoint: Endpoint, tmp_path: Path
) -> None:
    items = make_items(10)
    server.behave = lambda handler, prompt, attempt: prompt[:2] in ("3 ", "6 ") and handler.send(400, b"too long")
    message = (
        r"2 of 10 requests to http://127.0.0.1:\d+/v1/chat/completions failed; at most 1 may "
        r"\(evaluate.max_failed_ratio = 0.1\). First reason: HTTP 400: too long"
    )
    with pytest.raises(EvaluationError, match=message):
        evaluate(items, endpoint, SAMPLING, tmp_path, max_failed_ratio=0.1)
    assert not (tmp_path / "summary.json").exists()

    summary = evaluate(items, endpoint, SAMPLING, tmp_path, max_failed_ratio=0.2)
    assert (summary.accuracy, summary.n, summary.num_items, summary.request_failed_rate) == (1.0, 8, 10, 0.2)

    server.behave = lambda handler, prompt, attempt: False
    assert evaluate(items, endpoint, SAMPLING, tmp_path).n == 10
    assert {prompt: count for prompt, count in server.asked.items() if count > 1} == {
        "3 + 1 = ?": 3,
        "6 + 1 = ?": 3,
    }


def test_a_dead_server_is_given_up_early(endpoint: Endpoint, server: ArithmeticServer, tmp_path: Path) -> None:
    server.behave = lambda handler, prompt, attempt: handler.send(403, b"no")
    with pytest.raises(EvaluationError, match=r"were not asked any more because nothing answered"):
        evaluate(make_items(400), endpoint, SAMPLING, tmp_path)
    assert len(server.requests) < 40


def test_a_torn_last_line_costs_only_its_row(server: ArithmeticServer, endpoint: Endpoint, tmp_path: Path) -> None:
    items = make_items(6)
    evaluate(items, endpoint, SAMPLING, tmp_path)
    results = tmp_path / "results.jsonl"
    text = results.read_text()
    torn_id = json.loads(text.splitlines()[-1])["id"]
    results.write_text(text[:-25])
    assert evaluate(items, endpoint, SAMPLING, tmp_path).n == 6
    twice = [prompt for prompt, count in server.asked.items() if count == 2]
    assert twice == [f"{torn_id.removeprefix('item-')} + 1 = ?"]
    assert len(results.read_text().splitlines()) == 6


def test_changed_settings_start_anew_and_say_so(
    server: ArithmeticServer, endpoint: Endpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    items = make_items(3)
    evaluate(items, endpoint, SAMPLING, tmp_path)
    with caplog.at_level(logging.WARNING):
        evaluate(items, endpoint, replace(SAMPLING, max_tokens=32), tmp_path)
    assert "sampling.max_tokens: 64 before, 32 after" in caplog.text
    assert set(server.asked.values()) == {2}
    assert len(read_rows(tmp_path / "superseded-1")) == 3
    evaluate(items, endpoint, replace(SAMPLING, max_tokens=32), tmp_path, model_digest="another model")
    assert (tmp_path / "superseded-2" / "summary.json").exists()
    assert set(server.asked.values()) == {3}


_EVALUATE = """
import logging, sys
logging.basicConfig(level=logging.INFO)
sys.path.insert(0, {root!r})
from tests.integration.test_eval_client import SAMPLING, make_items
from eval.client import Endpoint
from eval.run import evaluate
evaluate(make_items(60), Endpoint({url!r}, "m", concurrency=4), SAMPLING, {output!r})
"""


def test_a_killed_evaluation_continues_without_asking_again(
    server: ArithmeticServer, endpoint: Endpoint, tmp_path: Path
) -> None:
    def slow(handler: Handler, prompt: str, attempt: int) -> bool:
        time.sleep(0.05)
        return False

    server.behave = slow
    output = tmp_path / "results"
    script = _EVALUATE.format(root=str(Path(__file__).parents[2]), url=server.url, output=str(output))
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while len(read_rows(output)) < 20 and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        log = process.communicate()[1]
    finished = set(read_rows(output))
    assert process.returncode == -signal.SIGKILL
    assert 20 <= len(finished) < 60
    assert "6 of 60 items done" in log  # no terminal: a log line every tenth
    summary = evaluate(make_items(60), replace(endpoint, concurrency=4), SAMPLING, output)
    assert (summary.n, summary.accuracy) == (60, 1.0)
    asked_again = {prompt for prompt, count in server.asked.items() if count > 1}
    assert len(asked_again) <= 4  # at most those in flight when the process died
    assert not asked_again & {f"{name.removeprefix('item-')} + 1 = ?" for name in finished}


def test_a_terminal_gets_a_progress_bar(server: ArithmeticServer, tmp_path: Path) -> None:
    import pty

    controller, terminal = pty.openpty()
    script = _EVALUATE.format(
        root=str(Path(__file__).parents[2]), url=server.url, output=str(tmp_path / "results")
    )
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen([sys.executable, "-c", script], stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    shown = b""
    while True:
        try:
            chunk = os.read(controller, 4096)
        except OSError:  # the terminal's other end is closed
            break
        if not chunk:
            break
        shown += chunk
    os.close(controller)
    assert process.wait(timeout=60) == 0
    assert b"60/60" in shown
    assert b"tokens/s" in shown
