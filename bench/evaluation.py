"""Measures the evaluation client against a mock server in a separate process.

    python bench/evaluation.py [--items 500] [--pairs 5] [--compare] [--serve [--answers FILE]]

Prints measured and required seconds per situation, and fails if a requirement is not met. AISBench
against the same server takes 6 s without latency, 42 s for its command, and 14.4 s with 1 s of
latency and 48 requests in flight; it scores HTTP 503 as wrong answers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval import EvaluationError
from eval.endpoint import Endpoint, Sampling
from eval.problems.items import EvaluationSet, Item
from eval.requests.dispatch import Limits
from eval.requests.recorder import Benchmark
from eval.requests.run import evaluate_all
from eval.results.rows import make_settings, write_json
from eval.results.summary import Summary

ROOT = Path(__file__).resolve().parents[1]
CONCURRENCY = 48


@dataclass
class MockServer:
    """Chat completions that add one, over keep-alive connections."""

    latency_seconds: float = 0.0
    refuse_one_in: int = 0  # with HTTP 503
    num_requests: int = 0
    answers: Mapping[str, str] = field(default_factory=dict)  # by problem; empty: sums

    async def serve(self, port: Connection) -> None:
        """Send the port, then serve forever."""
        server = await asyncio.start_server(self._talk, "127.0.0.1", 0, backlog=512)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
                body = await reader.readexactly(int(length.group(1))) if length else b""
                status, content = await self._answer(body)
                fields = f"Content-Type: application/json\r\nContent-Length: {len(content)}"
                writer.write(f"HTTP/1.1 {status} -\r\n{fields}\r\n\r\n".encode() + content)
                await writer.drain()
        writer.close()

    async def _answer(self, body: bytes) -> tuple[int, bytes]:
        if not body:
            return 200, json.dumps({"data": [{"id": "m", "root": "mock"}]}).encode()
        request = json.loads(body)
        if request.get("logprobs"):
            return 400, b"no log-probs"
        self.num_requests += 1
        await asyncio.sleep(self.latency_seconds)
        if self.refuse_one_in and self.num_requests % self.refuse_one_in == 0:
            return 503, b"busy"
        prompt = request["messages"][-1]["content"]
        if self.answers:
            text = next(answer for problem, answer in self.answers.items() if problem in prompt)
        else:
            number = int(re.findall(r"\d+", prompt)[0])
            text = f"It is $\\boxed{{{number + 1}}}$."
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        head = {
            "id": "1",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
        }  # required by strict clients
        usage = {"prompt_tokens": 9, "completion_tokens": 12, "total_tokens": 21}
        return 200, json.dumps({**head, "choices": [choice], "usage": usage}).encode()


def read_answers(path: Path) -> dict[str, str]:
    """Return answers to MATH-500: by turns the solution, another spelling, named, in words, and a
    wrong one.
    """
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {
        row["problem"]: _answer(index, row, rows[index - 1]["answer"])
        for index, row in enumerate(rows)
    }


def _answer(index: int, row: Mapping[str, str], other: str) -> str:
    gold = row["answer"]
    fractions = re.sub(r"\\frac\{(\d+)\}\{(\d+)\}", r"\1/\2", gold)
    spelled = gold.replace("\\frac", "\\dfrac") if fractions == gold else fractions
    named = gold if "=" in gold else f"N = {gold}"
    wrong = str(int(gold) + 1) if re.fullmatch(r"-?\d+", gold) else other
    answers = (
        row["solution"],
        f"So we get $\\boxed{{{spelled}}}$.",
        f"So we get $\\boxed{{{named}}}$.",
        f"The final answer is ${gold}$.",
        f"So we get $\\boxed{{{wrong}}}$.",
    )
    return answers[index % len(answers)]


def _serve(server: MockServer, port: Connection) -> None:
    asyncio.run(server.serve(port))


@contextlib.contextmanager
def serving(server: MockServer) -> Iterator[tuple[str, Path]]:
    """Yield the URL of a server in a separate process, and an empty folder."""
    port, other = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_serve, args=(server, other), daemon=True
    )
    process.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield f"http://127.0.0.1:{port.recv()}", Path(folder)
    finally:
        process.kill()


def measure_client(server: MockServer, count: int) -> tuple[float, float]:
    """Return (seconds, share of right answers) of an evaluation in this process."""
    with serving(server) as (url, folder):
        start = time.monotonic()
        summary = evaluate(url, make_set(count), folder, CONCURRENCY)
        return time.monotonic() - start, summary.accuracy * summary.n / count


def evaluate(url: str, evaluation_set: EvaluationSet, folder: Path, concurrency: int) -> Summary:
    """Evaluate the mock server."""
    benchmark = Benchmark(evaluation_set, Sampling(max_tokens=64), folder)
    [summary] = evaluate_all(
        [benchmark], Endpoint(url, "m"), limits=Limits(concurrency=concurrency)
    )
    return summary


def make_set(count: int) -> EvaluationSet:
    """Sums as chats."""
    items = (
        Item(f"{n}", ({"role": "user", "content": f"{n} + 1 = ?"},), str(n + 1))
        for n in range(count)
    )
    return EvaluationSet(tuple(items))


async def ask_bare(url: str, evaluation_set: EvaluationSet, concurrency: int) -> list[str]:
    """Request all responses with a minimal aiohttp loop that checks, grades and stores nothing."""
    left, responses = iter(evaluation_set.items), []
    fields = {"model": "m", "max_tokens": 64, "temperature": 0.0, "top_p": 1.0, "seed": 1234}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=concurrency)) as session:

        async def work() -> None:
            for item in left:
                body = {**fields, "messages": list(item.prompt)}
                async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                    answer = await response.json(content_type=None)
                responses.append(answer["choices"][0]["message"]["content"])

        await asyncio.gather(*(work() for _ in range(concurrency)))
    return responses


def measure_beside_bare(
    num_pairs: int, latency_seconds: float, count: int = 5000, concurrency: int = 256
) -> None:
    """Print wall and CPU seconds of evaluations, each beside a bare loop, and the median ratios."""
    evaluation_set, ratios = make_set(count), []
    for _ in range(num_pairs):
        with serving(MockServer(latency_seconds)) as (url, folder):
            bare = _timed(lambda: asyncio.run(ask_bare(url, evaluation_set, concurrency)))
        with serving(MockServer(latency_seconds)) as (url, folder):
            own = _timed(lambda: evaluate(url, evaluation_set, folder, concurrency))
        ratios.append([ours / theirs for ours, theirs in zip(own, bare, strict=True)])
        print(
            f"  bare {bare[0]:.2f} s (CPU {bare[1]:.2f}), evaluation {own[0]:.2f} s (CPU "
            f"{own[1]:.2f})",
            flush=True,
        )
    seconds, cpu = map(statistics.median, zip(*ratios, strict=True))
    print(
        f"{count} requests, {concurrency} in flight, {latency_seconds:g} s: {seconds:.2f}x, CPU "
        f"{cpu:.2f}x"
    )


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    start = time.monotonic(), time.process_time()
    work()
    return time.monotonic() - start[0], time.process_time() - start[1]


def measure_command(count: int) -> float:
    """Return the seconds of `dapo eval` on `count` problems."""
    with serving(MockServer()) as (url, folder):
        data = folder / "problems.jsonl"
        rows = [{"problem": f"{n} + 1 = ?", "answer": str(n + 1)} for n in range(count)]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        words = [
            "--base-url",
            url,
            "--model-name",
            "m",
            "--data",
            str(data),
            "--output",
            str(folder / "out"),
        ]
        command = [
            sys.executable,
            "-m",
            "flows.cli",
            "eval",
            *words,
            "--set",
            "evaluate.prompt=bare",
        ]
        start = time.monotonic()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return time.monotonic() - start


def measure_compare(count: int = 4000, chars: int = 31_000) -> None:
    """Print time and memory of `dapo compare` on two results of 125 MB each."""
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / model for model in ("before", "after")]
        for seed, folder in enumerate(folders):
            folder.mkdir()
            _write_results(folder, random.Random(seed), count, chars)
        start = time.monotonic()
        words = [sys.executable, "-m", "flows.cli", "compare", *map(str, folders)]
        process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        assert status == 0
        megabytes = (folders[0] / "results.jsonl").stat().st_size / 1e6
        print(
            f"compare {count} rows of {megabytes:.0f} MB a side: {time.monotonic() - start:.1f} s, "
            f"CPU {usage.ru_utime + usage.ru_stime:.1f} s, peak memory "
            f"{usage.ru_maxrss / 1000:.0f} MB"
        )


def _write_results(folder: Path, draw: random.Random, count: int, chars: int) -> None:
    text = ('So $\\frac{a}{b} + \\sqrt{3} = 5$, and "x" is 7.\nNext: ' * chars)[:chars]
    fields = {
        "sample": 0,
        "finish_reason": "stop",
        "answer": "7",
        "gold": "7",
    }
    rest = {
        "attempts": 1,
        "level": None,
        "subject": None,
        "failure": None,
    }
    items = make_set(count).items
    write_json(
        folder / "settings.json",
        make_settings(items, Endpoint("http://x", folder.name), Sampling(8192), None),
    )
    with (folder / "results.jsonl").open("w") as file:
        for item in items:
            verdict = draw.choice(("right", "right", "wrong", "truncated"))
            own = {
                "verdict": verdict,
                "aisbench": {"answer": "7", "is_right": verdict == "right", "raises": False},
                "seconds": draw.random(),
            }
            shown = {
                "id": item.id,
                "prompt": item.prompt,
                "response": text,
                "response_tokens": draw.randrange(8192),
            }
            file.write(json.dumps({**fields, **rest, **own, **shown}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--items", type=int, default=500)
    parser.add_argument(
        "--pairs", type=int, default=0, help="only compare with a bare loop, this many times"
    )
    parser.add_argument(
        "--compare", action="store_true", help="only measure dapo compare on large results"
    )
    parser.add_argument("--serve", action="store_true", help="only run the server, until Ctrl-C")
    parser.add_argument(
        "--answers", type=Path, help="with --serve: answer the problems of this MATH-500 file"
    )
    arguments = parser.parse_args()
    count = arguments.items
    if arguments.serve:
        answers = read_answers(arguments.answers) if arguments.answers else {}
        with (
            serving(MockServer(answers=answers)) as (url, _),
            contextlib.suppress(KeyboardInterrupt),
        ):
            print(url, flush=True)
            threading.Event().wait()
        return
    if arguments.compare:
        measure_compare()
        return
    if arguments.pairs:
        for latency_seconds in (0.0, 0.1):
            measure_beside_bare(arguments.pairs, latency_seconds)
        return
    missed = []
    for situation, server, required_seconds in (
        ("no latency, client", MockServer(), 3.0),
        ("1 s latency, 48 in flight", MockServer(latency_seconds=1.0), 12.5),
        ("one in ten HTTP 503", MockServer(refuse_one_in=10), 10.0),
        ("no latency, dapo eval", None, 10.0),
    ):
        seconds, right = measure_client(server, count) if server else (measure_command(count), 1.0)
        print(
            f"{situation:28} {seconds:6.2f} s, at most {required_seconds:4.1f} s; {right:.1%} "
            "right",
            flush=True,
        )
        missed += [situation] if seconds > required_seconds or right < 1 else []
    if missed:
        raise EvaluationError(f"not met: {', '.join(missed)}")


if __name__ == "__main__":
    main()
