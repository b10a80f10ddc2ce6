"""A chat and text completions server on a loopback port that adds numbers and misbehaves on
request.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from eval.problems.items import EvaluationSet, Item


class Handler(BaseHTTPRequestHandler):
    """Answers `a + b`, unless `server.behave(handler, prompt, attempt)` returns True."""

    protocol_version = "HTTP/1.1"
    server: ArithmeticServer
    number = 0  # of its request among all, from 1

    def setup(self) -> None:
        super().setup()
        # Headers and body are two writes: without this, delayed acknowledgements cost 40 ms per
        # request.
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def do_GET(self) -> None:
        self.send(200, json.dumps({"data": [{"id": "m", "root": self.server.root}]}).encode())

    def do_POST(self) -> None:
        body = self.body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "echo" in body:
            self.echo(body)
            return
        if "logprobs" in body:
            self.show_weights(body)
            return
        prompt = body["prompt"] if "prompt" in body else text_of(body["messages"][-1]["content"])
        with self.server.lock:
            self.server.asked[prompt] += 1
            attempt = self.server.asked[prompt]
            self.server.requests.append((self.path, self.headers.get("Authorization"), body))
            self.number = len(self.server.requests)
            self.server.in_flight += 1
            self.server.most_in_flight = max(self.server.most_in_flight, self.server.in_flight)
        try:
            if not self.server.behave(self, prompt, attempt):
                self.answer(prompt)
        finally:
            with self.server.lock:
                self.server.in_flight -= 1

    def echo(self, body: dict[str, Any]) -> None:
        """Return log-probs of the prompts' words, each a token, and of one generated token."""
        self.server.requests.append((self.path, self.headers.get("Authorization"), body))
        known = self.server.words
        choices = []
        for index, prompt in enumerate(body["prompt"]):
            values = [None, *(known.get(word, -1.0) for word in prompt.split()[1:]), -9.0]
            logprobs = {"token_logprobs": values if known else [-9.0]}
            choices.insert(0, {"index": index, "text": prompt, "logprobs": logprobs})
        self.send(200, json.dumps({"choices": choices}).encode())

    def show_weights(self, body: dict[str, Any]) -> None:
        """Answer the probe of the weights, which does not count as a request."""
        self.server.num_probes += 1
        self.server.probes_go_on.wait(60)
        if self.server.fails_on_probes:
            self.drop()
            return
        top, is_chat = self.server.logprobs, "messages" in body
        if top is None or is_chat is not self.server.is_chat_only:
            self.send(400, b"no logprobs here")
            return
        listed = [{"token": token, "logprob": value} for token, value in top.items()]
        logprobs = {"content": [{"top_logprobs": listed}]} if is_chat else {"top_logprobs": [top]}
        choice = {"text": "x", "message": {"content": "x"}, "logprobs": logprobs}
        self.send(200, json.dumps({"choices": [choice], "system_fingerprint": "adder-1"}).encode())

    def answer(self, prompt: str, finish_reason: str = "stop") -> bool:
        left, right = re.findall(r"\d+", prompt)
        text = f"Answer: \\boxed{{{int(left) + int(right)}}}"
        return self.say(text, finish_reason, {"completion_tokens": 5})

    def say(
        self,
        text: Any,
        finish_reason: str = "stop",
        usage: Mapping[str, Any] | None = None,
        **message: Any,
    ) -> bool:
        """Send a completion, with further fields of its message; returns True."""
        message = {"role": "assistant", "content": text, **message}
        choice = {"message": message, "text": text, "finish_reason": finish_reason}
        return self.send(200, json.dumps({"choices": [choice], "usage": usage}).encode())

    def send(
        self,
        status: int,
        body: bytes,
        declared_bytes: int | None = None,
        headers: dict[str, str] | None = None,
    ) -> bool:
        """Send a response; returns True."""
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(declared_bytes or len(body)))
        self.end_headers()
        self.wfile.write(body)
        return True

    def drop(self) -> bool:
        """Close the connection; returns True."""
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)
        return True

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log."""


def text_of(content: Any) -> str:
    """The text of a message, with `<image>` for pictures."""
    is_text = isinstance(content, str)
    return content if is_text else "".join(part.get("text", "<image>") for part in content)


Behaviour = Callable[[Handler, str, int], bool]


class ArithmeticServer(ThreadingHTTPServer):
    """A server on a loopback port. `behave` returns True if it has answered."""

    daemon_threads = True
    request_queue_size = 128
    root = "folder-of-the-model"
    logprobs: Mapping[str, float] | None = {" a": -1.0, " an": -2.0, " the": -3.0}
    is_chat_only = fails_on_probes = False
    num_probes = 0
    words: Mapping[str, float] = {}  # log-probs of words in echoed prompts; -1 for others

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.connections: set[socket.socket] = set()
        self.lock = threading.Lock()
        self.probes_go_on = threading.Event()
        self.probes_go_on.set()
        self.asked: Counter[str] = Counter()
        self.requests: list[tuple[str, str | None, dict[str, Any]]] = []
        self.in_flight = self.most_in_flight = 0
        self.behave: Behaviour = lambda handler, prompt, attempt: False

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)

    def die(self) -> None:
        """End like a killed process: close the port and all connections."""
        self.shutdown()
        self.server_close()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that give up, as some tests do."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextlib.contextmanager
def running(port: int = 0) -> Iterator[ArithmeticServer]:
    """Run a server until the block ends."""
    with ArithmeticServer(port) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def serving_the_chain(patch: pytest.MonkeyPatch) -> Iterator[ArithmeticServer]:
    """Run a server in place of vLLM in the stage evaluate_model that always answers 7."""
    from tasks import chain
    from tasks.serve_model.servers import Server

    with running() as server:

        @contextlib.contextmanager
        def serve(*_: object, **__: object) -> Iterator[Server]:
            yield Server(server.url, "m", "", "vllm serve MODEL")

        server.behave = lambda handler, prompt, attempt: handler.say("\\boxed{7}")
        patch.setattr(chain, "serve_model", serve)
        yield server


def make_set(count: int, style: str = "chat") -> EvaluationSet:
    """Make problems `i + 1 = ?` with ids item-i."""
    items = []
    for i in range(count):
        text = f"{i} + 1 = ?"
        prompt = ({"role": "user", "content": text},) if style == "chat" else text
        items.append(Item(f"item-{i}", prompt, str(i + 1), "add", "1"))
    return EvaluationSet(tuple(items))
