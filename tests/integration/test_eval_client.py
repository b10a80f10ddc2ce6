"""Requests to HTTP servers that misbehave: each gets one outcome, never an exception."""

import asyncio
import email.utils
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval import EvaluationError, RequestsRefused
from eval.endpoint import Endpoint, Sampling
from eval.problems.items import Item
from eval.requests.client import _retry_after
from eval.requests.dispatch import Dispatcher, Limits, Outcome, Request
from eval.requests.replies import Answer
from eval.results.rows import read_rows
from tests.evaluations import evaluate
from tests.integration.arithmetic_server import (
    ArithmeticServer,
    Behaviour,
    Handler,
    make_set,
    running,
)
from tests.processes import wait_until

SAMPLING = Sampling(max_tokens=64, temperature=0.0, top_p=0.9, seed=7)
FIVE = "Answer: \\boxed{5}"
FAR = 100.0  # longer than any machine stalls
LIMITS = Limits(
    concurrency=8,
    timeout_seconds=2 * FAR,
    max_attempts=4,
    backoff_seconds=0.01,
    outage_seconds=4 * FAR,
)


@pytest.fixture
def endpoint(server: ArithmeticServer) -> Endpoint:
    return Endpoint(server.url, "m", api_key="secret")


@pytest.fixture
def closed_port() -> Iterator[Endpoint]:
    """A local port that refuses connections: it is bound, but nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield Endpoint(f"http://127.0.0.1:{taken.getsockname()[1]}", "m")


def ask(
    endpoint: Endpoint,
    prompt: Any = ({"role": "user", "content": "2 + 3 = ?"},),
    sample: int = 0,
    sampling: Sampling = SAMPLING,
    **limits: Any,
) -> Outcome:
    outcomes: list[Outcome] = []

    async def finish(request: Request, outcome: Outcome) -> None:
        outcomes.append(outcome)

    async def one() -> None:
        dispatcher = Dispatcher(endpoint, replace(LIMITS, **limits))
        await dispatcher.run([Request(Item("x", prompt, "5"), sample, sampling)], finish)

    asyncio.run(one())
    return outcomes[0]


def text_of(outcome: Outcome) -> str | None:
    return outcome.answer.text if outcome.answer else None


def test_a_chat_request_sends_key_model_sampling_and_its_seed(
    server: ArithmeticServer, endpoint: Endpoint
) -> None:
    outcome = ask(endpoint, sample=2)
    assert outcome.answer == Answer(FIVE, "stop", 5)
    assert (outcome.attempts, outcome.failure) == (1, None)
    path, authorization, body = server.requests[0]
    assert (path, authorization) == ("/v1/chat/completions", "Bearer secret")
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "2 + 3 = ?"}],
        "max_tokens": 64,
        "temperature": 0.0,
        "top_p": 0.9,
        "seed": 9,  # 7 + sample 2
    }


def test_text_goes_to_completions_under_v1_bypassing_proxies_and_omitting_unset_fields(
    server: ArithmeticServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    url = server.url.replace("//", "//user:password@")  # of a gateway, so the key is not sent
    assert text_of(ask(Endpoint(url + "/v1/", "m", "key"), "2 + 3 = ?")) == FIVE
    path, authorization, body = server.requests[0]
    assert (path, body["prompt"]) == ("/v1/completions", "2 + 3 = ?")
    assert authorization == "Basic dXNlcjpwYXNzd29yZA=="
    assert not {"messages", "top_k", "stop", "stream"} & body.keys()
    fields = Sampling(max_tokens=1, top_k=20, stop=("\nProblem:",)).body(0)
    assert (fields["top_k"], fields["stop"]) == (20, ["\nProblem:"])


def cut_off(handler: Handler, prompt: str, attempt: int) -> bool:
    return handler.send(200, b'{"choices"', declared_bytes=500) and handler.drop()


FAULTS: dict[str, Behaviour] = {
    "HTTP 500 from {}: boom": lambda handler, prompt, attempt: handler.send(500, b"boom"),
    "ClientPayloadError": cut_off,
    "HTTP 429 from {}: slow down": lambda handler, prompt, attempt: handler.send(429, b"slow down"),
    "{}: invalid JSON": lambda handler, prompt, attempt: handler.send(200, b'{"choices": ['),
    "ServerDisconnectedError": lambda handler, prompt, attempt: handler.drop(),
    "{}: not a completion": lambda handler, prompt, attempt: handler.send(200, b'{"choices": []}'),
    "{}: the response's text is of type float": lambda handler, prompt, attempt: handler.send(
        200, b'{"choices": [{"message": {"content": NaN}}]}'
    ),
}


@pytest.mark.parametrize("reason", list(FAULTS))
def test_transient_faults_are_retried_and_permanent_ones_reported(
    server: ArithmeticServer, endpoint: Endpoint, reason: str
) -> None:
    fault = FAULTS[reason]
    server.behave = lambda handler, prompt, attempt: (
        attempt <= 2 and fault(handler, prompt, attempt)
    )
    outcome = ask(endpoint)
    assert (text_of(outcome), outcome.attempts, outcome.failure) == (FIVE, 3, None)

    server.behave = fault
    outcome = ask(endpoint, ({"role": "user", "content": "4 + 4 = ?"},))
    assert (text_of(outcome), outcome.attempts) == (None, 4)
    assert outcome.failure is not None
    assert outcome.failure.startswith(reason.format(endpoint.url("chat/completions")))


def test_an_api_key_echoed_by_the_server_is_redacted(
    server: ArithmeticServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "sk-0123456789abcdef"
    endpoint = Endpoint(server.url, "m", api_key=key)
    padding = "x" * 280  # the reason is cut off inside the key

    def echo(handler: Handler, prompt: str, attempt: int) -> bool:
        return handler.send(
            400, f"{padding}invalid key: {handler.headers['Authorization']}".encode()
        )

    server.behave = echo
    with pytest.raises(EvaluationError) as caught:
        evaluate(make_set(1), endpoint, SAMPLING, tmp_path)
    assert "sk-0" not in str(caught.value) + (tmp_path / "results.jsonl").read_text()
    monkeypatch.setenv("DB_PASSWORD", "123456")  # an answer is not mistaken for it
    server.behave = lambda handler, prompt, attempt: handler.answer("123451 + 5 = ?")
    assert text_of(ask(endpoint)) == "Answer: \\boxed{123456}"
    server.behave = echo
    outcome = ask(endpoint)  # refusals are final
    assert (outcome.answer, outcome.attempts) == (None, 1)
    assert re.match(r"HTTP 400 from http://\S+/v1/chat/completions: xxx", str(outcome.failure))


def test_retry_after_is_honoured_as_seconds_or_a_date_up_to_five_minutes(
    server: ArithmeticServer, endpoint: Endpoint
) -> None:
    server.behave = lambda handler, prompt, attempt: (
        attempt == 1 and handler.send(429, b"slow down", headers={"Retry-After": "0.3"})
    )
    outcome = ask(endpoint)
    assert (text_of(outcome), outcome.attempts) == (FIVE, 2)
    assert outcome.seconds >= 0.3  # the backoff alone is at most 0.01 s
    assert [_retry_after(value) for value in ("7", "86400", "soon", "")] == [7, 300, 0, 0]
    later, earlier = (
        email.utils.formatdate(time.time() + seconds, usegmt=True) for seconds in (200, -200)
    )
    assert 100 <= _retry_after(later) <= 201
    assert _retry_after(earlier) == 0


@pytest.mark.parametrize("is_dripping", [False, True])
def test_hanging_and_dripping_responses_time_out(
    server: ArithmeticServer, endpoint: Endpoint, is_dripping: bool
) -> None:
    release = threading.Event()

    def delay(handler: Handler, prompt: str, attempt: int) -> bool:
        if is_dripping:
            handler.send(200, b" ", declared_bytes=10_000)
        while not release.wait(0.05):
            if is_dripping:  # each byte would reset an idle timeout
                handler.wfile.write(b" ")
        return True

    server.behave = delay
    outcome = ask(endpoint, timeout_seconds=0.3)
    release.set()
    assert (outcome.answer, outcome.attempts) == (None, 1)
    assert outcome.failure == "no answer within 0.3 s"
    assert outcome.seconds < FAR  # it would hang forever


def test_nan_null_and_lone_surrogates_in_a_body_are_handled(
    server: ArithmeticServer, endpoint: Endpoint, tmp_path: Path
) -> None:
    body = (
        b'{"choices": [{"message": {"content": "\\ud800 \\\\boxed{1}"}, "finish_reason": NaN, '
        b'"logprob": NaN}],'
        b' "usage": {"completion_tokens": NaN}}'
    )
    server.behave = lambda handler, prompt, attempt: handler.send(200, body)
    assert evaluate(make_set(1), endpoint, SAMPLING, tmp_path).accuracy == 1.0
    row = read_rows(tmp_path)["item-0", 0]
    assert row.response == "\ufffd \\boxed{1}"
    assert (row.finish_reason, row.response_tokens) == (None, None)
    assert b"NaN" not in (tmp_path / "results.jsonl").read_bytes()
    (tmp_path / "results.jsonl").read_bytes().decode("utf-8")

    server.behave = lambda handler, prompt, attempt: handler.say(None, "length")
    assert ask(endpoint).answer == Answer("", "length", None)


def test_token_ids_as_keys_are_sent_as_text(server: ArithmeticServer, endpoint: Endpoint) -> None:
    # as YAML reads such keys
    ask(endpoint, sampling=replace(SAMPLING, extra_body={"logit_bias": {1234: -100}}))
    assert server.requests[0][2]["logit_bias"] == {"1234": -100}


def test_requests_per_second_are_limited(
    server: ArithmeticServer, endpoint: Endpoint, tmp_path: Path
) -> None:
    start = time.monotonic()
    evaluate(
        make_set(21), endpoint, SAMPLING, tmp_path, limits=replace(LIMITS, requests_per_second=50.0)
    )
    assert time.monotonic() - start >= 20 / 50


def test_a_server_known_to_have_ended_is_given_up_at_once(
    closed_port: Endpoint, tmp_path: Path
) -> None:
    class Ended(Endpoint):
        def has_ended(self) -> bool:
            return True

    start = time.monotonic()
    with pytest.raises(EvaluationError, match="30 were not answered"):
        evaluate(make_set(30), Ended(closed_port.base_url, "m"), SAMPLING, tmp_path, limits=LIMITS)
    assert time.monotonic() - start < LIMITS.outage_seconds / 2


def test_a_server_restart_loses_no_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    half, dead, finished = threading.Event(), threading.Event(), threading.Event()
    answered: list[int] = []

    def serve(first: ArithmeticServer) -> None:
        half.wait(FAR)
        first.die()
        dead.set()
        answered.append(len(first.requests))
        wait_until(lambda: "cannot be reached" in caplog.text, "the client to notice")
        with running(first.server_address[1]) as second:
            finished.wait(FAR)
            answered.append(len(second.requests))

    def hold(handler: Handler, prompt: str, attempt: int) -> bool:
        if handler.number <= 20:
            return False
        half.set()
        return dead.wait(FAR)

    with running() as first, ThreadPoolExecutor(1) as threads:
        first.behave = hold
        serving = threads.submit(serve, first)
        summary = evaluate(
            make_set(80), Endpoint(first.url, "m"), SAMPLING, tmp_path, limits=LIMITS
        )
        finished.set()
        serving.result()
    assert (summary.accuracy, summary.n) == (1.0, 80)
    assert 20 <= answered[0] < 80
    assert answered[1] >= 80 - answered[0]


def raw(content: bytes) -> Behaviour:
    """Send these bytes as the whole response."""
    return lambda handler, prompt, attempt: bool(handler.wfile.write(content)) and handler.drop()


def encoded(name: str) -> Behaviour:
    """Send a body that is not in the encoding that its header names."""
    headers = {"Content-Encoding": name}
    return lambda handler, prompt, attempt: handler.send(200, b"{}", headers=headers)


ODD: tuple[Behaviour, ...] = (
    lambda handler, prompt, attempt: handler.send(204, b""),
    lambda handler, prompt, attempt: handler.send(200, b"data: {}\n\n"),
    lambda handler, prompt, attempt: handler.send(200, b'{"error": {"code": 400}}'),
    lambda handler, prompt, attempt: handler.send(307, b"", headers={"Location": "http://["}),
    encoded("gzip"),
    encoded("br"),
    encoded("unheard"),
    raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"),
    raw(b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n{}"),
    raw(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n{}"),
    raw(b"HTTP/1.1 200 OK\r\nSet-Cookie: \xff=\xfe; =\r\nX\r\n\r\n{}"),
    raw(b"garbage\r\n\r\n"),
    raw(b"\x16\x03\x01\x00"),
)


def test_odd_replies_cost_only_their_own_item(server: ArithmeticServer, tmp_path: Path) -> None:
    def behave(handler: Handler, prompt: str, attempt: int) -> bool:
        number = int(prompt.split()[0])
        return number < len(ODD) and ODD[number](handler, prompt, attempt)

    server.behave = behave
    summary = evaluate(
        make_set(2 * len(ODD)),
        Endpoint(server.url, "m"),
        SAMPLING,
        tmp_path,
        max_failed_ratio=0.5,
        limits=replace(LIMITS, max_attempts=2),
    )
    assert (summary.n, summary.accuracy, summary.request_failed_rate) == (len(ODD), 1.0, 0.5)
    failed = [row for row in read_rows(tmp_path).values() if not row.is_answered]
    assert sorted(int(row.id.removeprefix("item-")) for row in failed) == [*range(len(ODD))]
    assert all(row.failure for row in failed)


def test_advice_on_refused_requests_stands_in_the_error_with_their_url(
    server: ArithmeticServer, tmp_path: Path
) -> None:
    server.behave = lambda handler, prompt, attempt: handler.send(422, b'{"loc": ["body", "seed"]}')
    endpoint = Endpoint(f"{server.url}/api/v3?key=0123456789abcdef", "m")
    with pytest.raises(RequestsRefused) as caught:
        evaluate(make_set(3), endpoint, SAMPLING, tmp_path)
    message = str(caught.value)
    assert f"First reason: HTTP 422 from {server.url}/api/v3/chat/completions: " in message
    assert "leave the field out with evaluate.seed=null" in message
    assert "0123456789abcdef" not in message
    assert server.requests[0][0] == "/api/v3/chat/completions?key=0123456789abcdef"
