"""Several benchmarks in one session: no idle server, and separate sampling, failures and rows."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eval import RequestsRefused
from eval.endpoint import Endpoint, Sampling
from eval.problems.items import EvaluationSet
from eval.problems.registry import SUITES
from eval.requests.dispatch import Limits
from eval.requests.recorder import Benchmark
from eval.requests.run import evaluate_all
from eval.results.rows import load_evaluation, read_rows
from eval.results.suite import describe_suite, read_suite
from flows.cli import app
from tests.integration.arithmetic_server import ArithmeticServer, Handler, make_set

ROOT = Path(__file__).resolve().parents[2]
FAR = 200.0  # longer than any machine stalls
LIMITS = Limits(
    concurrency=2, timeout_seconds=2 * FAR, max_attempts=2, backoff_seconds=0.01, outage_seconds=0.1
)
LONG, SHORT = 1000, 0  # the first problem of each set
LONG_SECONDS, SHORT_SECONDS = 0.4, 0.02  # of simulated time


@dataclass(eq=False)
class Held:
    """A request in flight."""

    number: int  # of the problem
    begin: float
    end: float
    may_end: threading.Event = field(default_factory=threading.Event)


class Simulation:
    """Answers requests in the order of a simulated clock, whenever the server is fully loaded."""

    def __init__(self, server: ArithmeticServer, num_requests: int) -> None:
        self.begun: list[Held] = []
        self._num_requests = num_requests
        self._now = 0.0
        self._in_work: list[Held] = []
        self._changed = threading.Condition()
        server.behave = self._hold

    def _hold(self, handler: Handler, prompt: str, attempt: int) -> bool:
        number = int(prompt.split()[0])
        with self._changed:
            end = self._now + (LONG_SECONDS if number >= LONG else SHORT_SECONDS)
            held = Held(number, self._now, end)
            self.begun.append(held)
            self._in_work.append(held)
            self._changed.notify()
        held.may_end.wait(FAR)
        return False

    def _is_busy(self) -> bool:
        is_full = len(self._in_work) == LIMITS.concurrency
        return is_full or len(self.begun) == self._num_requests

    def run(self) -> None:
        """Answer every request. Fails if the server is left idle."""
        for _ in range(self._num_requests):
            with self._changed:
                assert self._changed.wait_for(self._is_busy, FAR), (
                    "the server is idle while requests are left"
                )
                first = min(self._in_work, key=lambda held: held.end)
                self._in_work.remove(first)
                self._now = first.end
            first.may_end.set()


def set_of(count: int, first: int) -> EvaluationSet:
    """Problems `first + 1 = ?` and so on."""
    items = [
        replace(
            item,
            prompt=({"role": "user", "content": f"{first + i} + 1 = ?"},),
            gold=str(first + i + 1),
        )
        for i, item in enumerate(make_set(count).items)
    ]
    return EvaluationSet(tuple(items))


def write_sums(path: Path, first: int, count: int) -> Path:
    """Write the same problems to a file."""
    rows = [{"problem": f"{first + i} + 1 = ?", "answer": str(first + i + 1)} for i in range(count)]
    path.write_text(json.dumps(rows))
    return path


def suite(folder: Path, num_long: int = 8, num_short: int = 40) -> list[Benchmark]:
    """Short problems first, then long ones that are sampled twice."""
    short = Benchmark(set_of(num_short, SHORT), Sampling(max_tokens=16), folder / "short", "short")
    sampling = Sampling(max_tokens=512, temperature=0.6, num_samples=2)
    return [short, Benchmark(set_of(num_long, LONG), sampling, folder / "long", "long")]


def test_the_server_is_never_idle_while_any_benchmark_has_requests_left(
    server: ArithmeticServer, tmp_path: Path
) -> None:
    simulation, progress = Simulation(server, 56), list[tuple[int, int]]()
    with ThreadPoolExecutor(1) as threads:
        served = threads.submit(simulation.run)
        endpoint, report = Endpoint(server.url, "m"), lambda *done: progress.append(done)
        short, long = evaluate_all(suite(tmp_path), endpoint, limits=LIMITS, on_progress=report)
        served.result()
    assert (short.n, short.accuracy, long.n, long.num_samples) == (40, 1.0, 16, 2)
    assert progress[-1] == (56, 56)
    is_long = [held.number >= LONG for held in simulation.begun]
    assert is_long == [True] * 16 + [False] * 40
    # Short problems fill the tail of the long ones; in the suite's order, long ones would finish
    # alone.
    assert max(held.end for held in simulation.begun) - simulation.begun[-1].begin < LONG_SECONDS
    bodies = [body for _, _, body in server.requests]
    assert {(body["max_tokens"], body["temperature"]) for body in bodies} == {(16, 0.0), (512, 0.6)}


def test_longest_requests_first_is_estimated_from_another_model_s_answers(
    server: ArithmeticServer, tmp_path: Path
) -> None:
    benchmarks = suite(tmp_path / "before", num_long=2)
    evaluate_all(benchmarks, Endpoint(server.url, "m"), limits=LIMITS)
    path = tmp_path / "before" / "short" / "results.jsonl"
    lines = path.read_text().splitlines()
    lines[7] = json.dumps({**json.loads(lines[7]), "response_tokens": 700})
    path.write_text("\n".join(lines) + "\n")
    after = [
        replace(one, output_dir=tmp_path / "after" / one.name, earlier=one.output_dir)
        for one in benchmarks
    ]
    first = len(server.requests)
    one = replace(LIMITS, concurrency=1)
    evaluate_all(after, Endpoint(server.url, "m"), limits=one, model_digest="other")
    assert server.requests[first][2]["messages"][-1]["content"] == "7 + 1 = ?"


def test_a_failing_benchmark_does_not_affect_others_and_an_added_one_sends_only_its_requests(
    server: ArithmeticServer, tmp_path: Path
) -> None:
    server.behave = lambda handler, prompt, attempt: (
        int(prompt.split()[0]) >= LONG and handler.send(400, b"too long")
    )
    benchmarks = suite(tmp_path, num_long=50)
    with pytest.raises(
        RequestsRefused, match=r"^long: \d+ of 100 requests to http.* failed"
    ) as caught:
        evaluate_all(benchmarks, Endpoint(server.url, "m"), limits=LIMITS)
    assert "short" not in str(caught.value)
    assert load_evaluation(tmp_path / "short").num_samples == 1
    asked_in_vain = len(read_rows(tmp_path / "long"))
    assert 8 <= asked_in_vain < 100  # given up after 8 failures in a row
    server.behave = lambda handler, prompt, attempt: False
    server.asked.clear()
    third = Benchmark(set_of(3, 500), Sampling(max_tokens=16), tmp_path / "third", "third")
    evaluate_all([*benchmarks, third], Endpoint(server.url, "m"), limits=LIMITS)
    asked = [int(prompt.split()[0]) for prompt in server.asked.elements()]
    assert sorted(asked) == sorted(
        [*range(LONG, LONG + 50), *range(LONG, LONG + 50), 500, 501, 502]
    )


def test_a_recipe_s_suite_resumes_with_missing_requests_only(
    server: ArithmeticServer, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    short, long, later = (
        str(write_sums(tmp_path / f"{name}.json", first, count))
        for name, first, count in (("short", SHORT, 30), ("long", LONG, 10), ("later", 500, 3))
    )
    sampled = {"set": long, "num_samples": 2, "temperature": 0.6, "max_response_tokens": 256}

    def run(*benchmarks: Any) -> list[int]:
        """Return the problems requested by `dapo eval --config`."""
        server.asked.clear()
        recipe = tmp_path / "recipe.yaml"
        tree = {
            "data": {"train": "arithmetic", "eval": "arithmetic"},
            "model": {"source": "recipe"},
            "evaluate": {"prompt": "bare", "max_response_tokens": 64, "benchmarks": benchmarks},
        }
        recipe.write_text(json.dumps(tree))
        words = ["eval", "--base-url", server.url, "--model-name", "m", "--config", str(recipe)]
        done = CliRunner().invoke(app, [*words, "--output", str(out)])
        assert done.exit_code == 0, done.output
        assert f"{out / 'short'}: accuracy 100.0% of 30" in done.output
        return sorted(int(prompt.split()[0]) for prompt in server.asked.elements())

    assert run(short, sampled) == sorted([*range(30), *2 * list(range(LONG, LONG + 10))])
    results = out / "long" / "results.jsonl"
    # items 0 and 1, half of 2
    results.write_text("".join(results.read_text().splitlines(keepends=True)[:5]))
    assert run(short, sampled, later) == [500, 501, 502, 1002, *sorted(2 * list(range(1003, 1010)))]
    assert list(read_suite(out)) == ["short", "long", "later"]


def test_a_named_suite_is_evaluated_with_its_published_sets(
    server: ArithmeticServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SUITES, "tiny", ("arithmetic",))
    folder = tmp_path / "out"
    words = ["eval", "--base-url", server.url, "--model-name", "m", "--output", str(folder)]
    words += ["--set", "data.arithmetic.num_eval=4", "--set", "evaluate.prompt=bare"]
    server.behave = lambda handler, prompt, attempt: handler.answer("1 2")
    done = CliRunner().invoke(app, [*words, "--suite", "tiny"])
    assert done.exit_code == 0, done.output
    assert f"{folder / 'arithmetic'}: accuracy" in done.output
    assert describe_suite(folder).headline == "arithmetic"
    # A folder holds a suite or one benchmark.
    alone = CliRunner().invoke(
        app, [*words, "--data", str(write_sums(tmp_path / "sums.json", 0, 2))]
    )
    assert "holds a suite; choose another --output" in str(alone.exception)
    assert "'tini' is not a suite; known: math, tiny" in str(
        CliRunner().invoke(app, [*words, "--suite", "tini"]).exception
    )
    assert (
        CliRunner().invoke(app, [*words, "--suite", "tiny", "--dataset", "math500"]).exit_code == 2
    )


def test_gates_on_one_evaluation_are_checked_and_others_are_named(
    server: ArithmeticServer, tmp_path: Path
) -> None:
    files = {
        name: write_sums(tmp_path / f"{name}.json", first, 4)
        for name, first in (("one", 0), ("two", 500))
    }
    gates = ["one >= 99", "two.tokens <= 4", "pooled >= before", "one >= last-night - 1"]
    evaluate = {
        "prompt": "bare",
        "benchmarks": [str(path) for path in files.values()],
        "gates": gates,
    }
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({"evaluate": evaluate}))

    def run(output: str, *words: str) -> tuple[int, str]:
        asked = ["eval", "--base-url", server.url, "--model-name", "m"]
        done = CliRunner().invoke(app, [*asked, "--output", str(tmp_path / output), *words])
        return done.exit_code, " ".join(done.output.split())

    status, printed = run("suite", "--config", str(recipe))
    assert status == 3, printed
    assert "GATES FAILED, 1 of 4: two.tokens <= 4 (measured 5, threshold 4 tokens)." in printed
    assert (
        "Gates not checked: pooled >= before (dapo compare --gate checks it against before); one >="
        in printed
    )
    gates[1:] = []
    recipe.write_text(json.dumps({"evaluate": evaluate}))
    status, printed = run("suite", "--config", str(recipe))
    assert (status, printed.endswith("Gates: 1 of 1 passed.")) == (0, True)

    # Options replace the recipe's benchmarks, and --set adds gates to them.
    one = ("--data", str(files["one"]), "--config", str(recipe), "--set", "evaluate.prompt=bare")
    status, printed = run("alone", *one, "--set", "evaluate.gates=[one > 100]")
    assert status == 3
    assert "GATES FAILED, 1 of 1: one > 100 (measured 100, threshold 100 %)." in printed
    status, printed = run("alone", *one)
    assert status == 0
    assert f"Gates not checked: one >= 99 (for the benchmarks of {recipe})." in printed
    status, printed = run("both", "--suite", "math", "--set", "evaluate.benchmarks=[aime24]")
    assert status == 2
    assert "cannot be combined with --set evaluate.benchmarks" in printed
