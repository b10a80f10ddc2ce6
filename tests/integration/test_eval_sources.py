"""Evaluation files from URLs and hubs, against a server of this machine: pinned, atomic, resumed, refused."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from eval.problems import ProblemsError, sources
from eval.problems.registry import load_set
from eval.problems.sources import fetch

ROOT = Path(__file__).resolve().parents[2]
BODY = b'{"problem": "1 + 1 = ?", "answer": "2"}\n' * 50
DIGEST = hashlib.sha256(BODY).hexdigest()


class FileServer(ThreadingHTTPServer):
    """Serves BODY as every file, as URLs and both hubs' libraries ask for it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[str] = []
        self.behave: Callable[[_Handler], bool] = lambda handler: False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing: a download that breaks off is part of these tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FileServer

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        if self.server.behave(self):
            return
        if "/api/" in self.path and "FilePath" not in self.path:
            self.send_error(404)
            return
        self.reply(200, BODY, len(BODY))

    def reply(self, status: int, body: bytes, declared_bytes: int) -> bool:
        self.send_response(status)
        for name, value in {
            "Content-Length": str(declared_bytes),
            "ETag": '"etag"',
            "X-Repo-Commit": "0" * 40,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
        return True

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the tests look at `server.requests`."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setattr(sources, "_BACKOFF_SECONDS", 0.01)
    with FileServer() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def files(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.rglob("*") if path.is_file() and path.name != ".lock")


def test_a_file_is_downloaded_once_and_verified_again(server: FileServer, tmp_path: Path) -> None:
    source = f"{server.url}/data/math%20500.jsonl?raw=1#sha256={DIGEST}"
    path = fetch(source, tmp_path)
    assert (path.name, path.read_bytes()) == ("math 500.jsonl", BODY)
    assert fetch(source, tmp_path) == path
    assert len(server.requests) == 1
    path.write_bytes(b"tampered with")
    assert fetch(source, tmp_path).read_bytes() == BODY
    assert files(tmp_path) == ["math 500.jsonl"]


@pytest.mark.parametrize("end", ["", "#sha256=", "#sha256=" + "g" * 64, "#md5=" + "0" * 32])
def test_a_source_without_a_digest_is_refused_before_anything_is_asked(
    server: FileServer, tmp_path: Path, end: str
) -> None:
    for source in (f"{server.url}/math.jsonl", "hf:org/name/math.jsonl", "modelscope:org/name/math.jsonl"):
        with pytest.raises(ProblemsError, match="is not pinned: end it in #sha256="):
            fetch(source + end, tmp_path)
    assert server.requests == []


def test_another_content_is_refused_with_both_digests_and_not_kept(server: FileServer, tmp_path: Path) -> None:
    named = hashlib.sha256(b"what was meant").hexdigest()
    with pytest.raises(ProblemsError, match=rf"its sha256 is {DIGEST} \({len(BODY)} bytes\), not {named}"):
        fetch(f"{server.url}/math.jsonl#sha256={named}", tmp_path)
    assert files(tmp_path) == []


def test_server_errors_and_broken_downloads_are_retried_and_a_404_is_not(
    server: FileServer, tmp_path: Path
) -> None:
    def fail(handler: _Handler) -> bool:
        if "gone" in handler.path:
            handler.send_error(404)
        elif len(server.requests) == 1:
            handler.send_error(520)
        elif len(server.requests) == 2:
            handler.reply(200, BODY[:700], len(BODY))
            handler.wfile.flush()
            handler.close_connection = True
        else:
            return False
        return True

    server.behave = fail
    assert fetch(f"{server.url}/math.jsonl#sha256={DIGEST}", tmp_path).read_bytes() == BODY
    assert len(server.requests) == 3
    with pytest.raises(ProblemsError, match=r"gone.jsonl cannot be downloaded: HTTP 404, at attempt 1 of 4"):
        fetch(f"{server.url}/gone.jsonl#sha256={'0' * 64}", tmp_path)
    assert files(tmp_path) == ["math.jsonl"]


def test_a_path_stands_for_itself(tmp_path: Path) -> None:
    (tmp_path / "math.jsonl").write_bytes(BODY)
    with pytest.raises(ProblemsError, match="1 problems, but math500 has exactly 500"):
        load_set(tmp_path / "math.jsonl", "math500")
    with pytest.raises(ProblemsError, match="choice has no rows to evaluate with; name a file"):
        load_set(None, "choice")
    with pytest.raises(ProblemsError, match="no evaluation set is named"):
        load_set(None)


_FETCH = """
import sys
from eval.problems.sources import fetch
from eval.problems import ProblemsError
for source in sys.argv[1:]:
    try:
        print(fetch(source).read_bytes().count(b"problem"))
    except ProblemsError as error:
        print(error)
"""


@pytest.mark.parametrize("hub", ["hf", "modelscope"])
def test_a_dataset_of_a_hub_comes_from_the_endpoint_of_the_environment(
    server: FileServer, tmp_path: Path, hub: str
) -> None:
    def gone(handler: _Handler) -> bool:
        if "gone" not in handler.path:
            return False
        handler.send_error(404)
        return True

    server.behave = gone
    environment = {
        **os.environ,
        "HF_ENDPOINT": server.url,
        "MODELSCOPE_ENDPOINT": server.url,
        "HF_HOME": str(tmp_path / "hf"),
        "MODELSCOPE_CACHE": str(tmp_path / "ms"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYTHONPATH": str(ROOT),
    }
    wrong = "0" * 64
    words = [
        f"{hub}:org/name/data/test.jsonl@v1#sha256={DIGEST}",
        f"{hub}:org/name/data/other.jsonl#sha256={wrong}",
        f"{hub}:org/name/gone.jsonl#sha256={wrong}",
        f"{hub}:name#sha256={wrong}",
    ]
    done = subprocess.run(
        [sys.executable, "-c", _FETCH, *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    assert lines[0] == "50"
    assert f"{hub}:org/name/data/other.jsonl is not the file that was named: its sha256 is {DIGEST}" in done.stdout
    assert f"{hub}:org/name/gone.jsonl cannot be downloaded" in done.stdout
    assert f"{hub}:name is not of the form {hub}:ORG/NAME/FILE" in done.stdout
    assert any("v1" in path for path in server.requests)
    assert files(tmp_path / "cache") == ["test.jsonl"]
