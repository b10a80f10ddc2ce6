"""The stage evaluate_model on a suite: stored benchmarks are reused, without serving."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.config import Config
from tasks import chain
from tasks.artifacts.artifact import Artifact
from tasks.runs.run import Run
from tests.integration.arithmetic_server import ArithmeticServer, serving_the_chain
from tests.recorded_runs import Outcome, produce, small_config

SAMPLED = "{set: arithmetic, name: sampled, num_samples: 2, temperature: 0.6}"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ArithmeticServer]:
    with serving_the_chain(monkeypatch) as server:
        yield server


def evaluate(config: Config, *forced: str) -> Artifact:
    with Run.start(config, "evaluate-model", forced) as run:
        made = produce(run, Outcome(), ("prepare_data", "fetch_model"))
        artifact: Artifact = chain.evaluate_model.fn(
            run, *made.values(), "evaluate_before"
        ).result()
    return artifact


def test_stored_benchmarks_are_reused_and_no_server_starts_if_all_are_stored(
    server: ArithmeticServer, tmp_path: Path
) -> None:
    def config(benchmarks: str, *words: str) -> Config:
        return small_config(tmp_path, f"evaluate.benchmarks=[{benchmarks}]", *words)

    first = evaluate(config(f"arithmetic, {SAMPLED}"))
    assert len(server.requests) == 8 + 2 * 8
    metrics = first.manifest()["metrics"]
    assert (metrics["n"], metrics["sampled/n"], metrics["serve_command"]) == (
        8,
        16,
        "vllm serve MODEL",
    )

    other = evaluate(config(f"arithmetic, {SAMPLED}", "evaluate.headline=sampled"))
    assert len(server.requests) == 24
    metrics = other.manifest()["metrics"]
    assert other.path != first.path
    assert (metrics["n"], metrics["serve_command"]) == (16, "")
    assert metrics["sampled/from"] == str(Path(first.path) / "sampled")

    evaluate(config(f"arithmetic, {SAMPLED}, {{set: arithmetic, name: cot, prompt: cot}}"))
    assert len(server.requests) == 24 + 8
    # A single benchmark shares its results with the suite.
    evaluate(small_config(tmp_path))
    assert len(server.requests) == 32

    # --force evaluates all.
    evaluate(config(f"arithmetic, {SAMPLED}"), "evaluate_before")
    assert len(server.requests) == 32 + 24
