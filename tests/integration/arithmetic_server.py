"""A chat-completions server on a free loopback port that adds numbers, and misbehaves when told to."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    """Answers `a + b` questions; `server.behave(attempt number of this prompt, handler)` may do otherwise."""

    protocol_version = "HTTP/1.1"
    server: ArithmeticServer

    def setup(self) -> None:
        super().setup()
        # Headers and body are two writes: without this, delayed acknowledgement costs 40 ms a request.
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][-1]["content"]
        with self.server.lock:
            self.server.asked[prompt] += 1
            attempt = self.server.asked[prompt]
            self.server.requests.append((self.path, self.headers.get("Authorization"), body))
            self.server.in_flight += 1
            self.server.most_in_flight = max(self.server.most_in_flight, self.server.in_flight)
        try:
            if not self.server.behave(self, prompt, attempt):
                self.answer(prompt)
        finally:
            with self.server.lock:
                self.server.in_flight -= 1

    def answer(self, prompt: str, finish_reason: str = "stop") -> bool:
        left, right = re.findall(r"\d+", prompt)
        text = f"Answer: {int(left) + int(right)}"
        choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
        return self.send(200, json.dumps({"choices": [choice], "usage": {"completion_tokens": 5}}).encode())

    def send(self, status: int, body: bytes, declared_bytes: int | None = None) -> bool:
        """True: the request is answered."""
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(declared_bytes or len(body)))
        self.end_headers()
        self.wfile.write(body)
        return True

    def drop(self) -> bool:
        """True: the connection is closed."""
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)
        return True

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the tests look at `server.requests`."""


Behaviour = Callable[[Handler, str, int], bool]


class ArithmeticServer(ThreadingHTTPServer):
    """A chat-completions server on a free loopback port. `behave` returns True when it has answered itself."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()
        self.asked: Counter[str] = Counter()
        self.requests: list[tuple[str, str | None, dict[str, Any]]] = []
        self.in_flight = self.most_in_flight = 0
        self.behave: Behaviour = lambda handler, prompt, attempt: False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: a client that gives up is part of these tests."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"
