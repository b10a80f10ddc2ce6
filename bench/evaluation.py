"""The evaluation client against a mock server of 500 problems in a process of its own.

    python bench/evaluation.py [--items 500]

One line per situation with what was measured and what is required; a requirement that is not met is an error.
The server is plain asyncio and counts how often each problem was asked. AISBench beside such a server: 6 s without
latency, 42 s for its command, 14.4 s with one second of latency and 48 in flight; it scores 503 as wrong answers.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval import EvaluationError
from eval.client import Endpoint, Sampling
from eval.dispatch import Limits
from eval.problems.items import EvaluationSet, Item
from eval.results import read_rows
from eval.run import evaluate

ROOT = Path(__file__).resolve().parents[1]
CONCURRENCY = 48
TIMEOUT_SECONDS = 3.0


@dataclass(frozen=True)
class Behaviour:
    """What the server does beside answering."""

    latency_seconds: float = 0.0
    refuse_one_in: int = 0  # HTTP 503
    silent_problem: int | None = None  # never answered


class MockServer:
    """Chat completions that add one, over keep-alive connections."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.asked: collections.Counter[int] = collections.Counter()
        self.answered: collections.Counter[int] = collections.Counter()

    async def serve(self, control: multiprocessing.connection.Connection) -> None:
        """Answer until asked to stop, then send the counts."""
        server = await asyncio.start_server(self._talk, "127.0.0.1", 0, backlog=512)
        control.send(server.sockets[0].getsockname()[1])
        await asyncio.get_running_loop().run_in_executor(None, control.recv)
        server.close()
        control.send((sum(self.asked.values()), dict(self.answered)))

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
                body = await reader.readexactly(int(length.group(1))) if length else b""
                status, content = await self._answer(body)
                writer.write(f"HTTP/1.1 {status} -\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
                await writer.drain()
        writer.close()

    async def _answer(self, body: bytes) -> tuple[int, bytes]:
        if not body:
            return 200, json.dumps({"data": [{"id": "m", "root": "mock"}]}).encode()
        number = int(re.findall(r"\d+", json.loads(body)["messages"][-1]["content"])[0])
        self.asked[number] += 1
        if number == self.behaviour.silent_problem:
            await asyncio.sleep(3600)
        await asyncio.sleep(self.behaviour.latency_seconds)
        if self.behaviour.refuse_one_in and sum(self.asked.values()) % self.behaviour.refuse_one_in == 0:
            return 503, b"busy"
        self.answered[number] += 1
        choice = {"message": {"content": f"It is $\\boxed{{{number + 1}}}$."}, "finish_reason": "stop"}
        return 200, json.dumps({"choices": [choice], "usage": {"completion_tokens": 12}}).encode()


class RunningServer:
    """A mock server in its own process."""

    def __init__(self, behaviour: Behaviour) -> None:
        self._control, other = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(target=_serve, args=(behaviour, other))
        self._process.start()
        self.url = f"http://127.0.0.1:{self._control.recv()}"

    def stop(self) -> tuple[int, dict[int, int]]:
        """(requests, answers by problem) while it ran."""
        self._control.send("stop")
        counts = self._control.recv()
        self._process.terminate()
        self._process.join()
        return counts


def _serve(behaviour: Behaviour, control: multiprocessing.connection.Connection) -> None:
    asyncio.run(MockServer(behaviour).serve(control))


@contextlib.contextmanager
def serving(behaviour: Behaviour) -> Iterator[tuple[RunningServer, Path]]:
    """A server with this behaviour, and an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        server = RunningServer(behaviour)
        try:
            yield server, Path(folder)
        finally:
            server._process.kill()


def make_items(count: int) -> EvaluationSet:
    """Problems `n + 1 = ?`."""
    return EvaluationSet(
        tuple(Item(f"{n}", ({"role": "user", "content": f"{n} + 1 = ?"},), str(n + 1)) for n in range(count))
    )


def ask(server: RunningServer, folder: Path, count: int) -> Any:
    """The summary of an evaluation in this process."""
    limits = Limits(concurrency=CONCURRENCY, timeout_seconds=TIMEOUT_SECONDS)
    return evaluate(make_items(count), [Endpoint(server.url, "m")], Sampling(max_tokens=64), folder, limits=limits)


def run_command(server: RunningServer, folder: Path, count: int, *settings: str) -> subprocess.Popen[str]:
    """`dapo eval` on a file of as many problems."""
    data = folder / "problems.jsonl"
    rows = [{"problem": f"{n} + 1 = ?", "answer": str(n + 1)} for n in range(count)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--base-url", server.url, "--model-name", "m", "--data", str(data), "--output", str(folder / "out")]
    words += [word for setting in ("evaluate.prompt=bare", *settings) for word in ("--set", setting)]
    command = [sys.executable, "-m", "flows.cli", "eval", *words]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )


def measure_client(behaviour: Behaviour, count: int) -> tuple[float, Any, int]:
    """(seconds, summary, requests) of an evaluation."""
    with serving(behaviour) as (server, folder):
        start = time.monotonic()
        summary = ask(server, folder, count)
        seconds = time.monotonic() - start
        return seconds, summary, server.stop()[0]


def measure_command(count: int) -> float:
    """Seconds of the whole command."""
    with serving(Behaviour()) as (server, folder):
        start = time.monotonic()
        process = run_command(server, folder, count)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        return time.monotonic() - start


def measure_silence(count: int) -> tuple[float, int, int, str]:
    """(seconds, exit status, failed rows, reason) of a command whose request 7 is never answered."""
    with serving(Behaviour(silent_problem=7)) as (server, folder):
        start = time.monotonic()
        process = run_command(server, folder, count, f"evaluate.request_timeout_seconds={TIMEOUT_SECONDS:g}")
        process.communicate(timeout=120)
        failed = [row for row in read_rows(folder / "out").values() if not row.is_answered]
        return time.monotonic() - start, process.returncode, len(failed), str(failed[0].failure)


def measure_kill(count: int) -> tuple[int, int, int]:
    """(rows when killed, of these asked again, problems answered twice) of a command that is killed at half."""
    with serving(Behaviour(latency_seconds=0.1)) as (server, folder):
        process = run_command(server, folder, count, "evaluate.concurrency=16")
        while len(read_rows(folder / "out")) < count // 2 and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        finished = {identity for identity, _ in read_rows(folder / "out")}
        again = run_command(server, folder, count, "evaluate.concurrency=16")
        again.communicate(timeout=120)
        assert again.returncode == 0
        assert len(read_rows(folder / "out")) == count
        _, answered = server.stop()
        twice = {number for number, times in answered.items() if times > 1}
        ids = {int(identity.removeprefix("row-")) for identity in finished}
        return len(finished), len(ids & twice), len(twice)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=500)
    count = parser.parse_args().items
    missed: list[str] = []

    def report(situation: str, measured: str, required: str, is_met: bool) -> None:
        print(f"{situation:28} {measured:64} {required}")
        missed.extend([] if is_met else [situation])

    seconds, summary, _ = measure_client(Behaviour(), count)
    report("no latency, client", f"{seconds:.2f} s", "<= 3 s", seconds <= 3 and summary.n == count)
    seconds = measure_command(count)
    report("no latency, dapo eval", f"{seconds:.2f} s", "<= 10 s", seconds <= 10)
    seconds, summary, _ = measure_client(Behaviour(latency_seconds=1.0), count)
    is_met = seconds <= 11.5 and summary.n == count
    report("1 s latency, 48 in flight", f"{seconds:.2f} s", "<= 11.5 s", is_met)
    seconds, summary, requests = measure_client(Behaviour(refuse_one_in=10), count)
    found = f"{summary.n} answered, {requests} requests, {seconds:.2f} s"
    report("one in ten HTTP 503", found, f"{count} answered", summary.n == count == summary.accuracy * count)
    seconds, status, failed, reason = measure_silence(count)
    found = f"status {status}, {failed} failed ({reason}), {seconds:.2f} s"
    bound = TIMEOUT_SECONDS + 10
    is_met = bool(status) and failed == 1 and seconds <= bound
    report("a request never answered", found, f"status not 0, <= {bound:g} s", is_met)
    finished, again, twice = measure_kill(count)
    found = f"{finished} rows kept, {again} of them asked again, {twice} in flight asked again"
    report("SIGKILL at half", found, "0 asked again", again == 0 and finished >= count // 2)
    if missed:
        raise EvaluationError(f"not met: {', '.join(missed)}")


if __name__ == "__main__":
    main()
