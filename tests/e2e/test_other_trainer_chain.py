"""The whole chain around another trainer, and one that is cached: with a stand-in, since verl needs
a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from durable import read_json_lines
from eval.report.training import read_training_metrics
from flows.config import Config
from tasks import chain
from tasks.external.training import train_with_other
from tasks.processes.child import ChildProcessFailed
from tasks.runs.plan import plan_chain
from tasks.runs.report import Columns, report_run
from tasks.runs.run import Run
from tests.integration.arithmetic_server import ArithmeticServer, serving_the_chain
from tests.other_trainings import config_of, inputs, make_place

pytestmark = pytest.mark.timeout(600)  # on two busy cores


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("other"))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ArithmeticServer]:
    with serving_the_chain(monkeypatch) as server:
        yield server


def run_chain(config: Config) -> tuple[Run, dict[str, Any]]:
    """The stages of dapo-full in this process, without Prefect, and the report."""
    with Run.start(config) as run:
        data = chain.prepare_data.fn(run).result()
        model = chain.fetch_model.fn(run, None).result()
        before = chain.evaluate_model.fn(run, data, model, "evaluate_before").result()
        training = chain.train_policy.fn(run, data, model).result()
        merged = chain.merge_checkpoint.fn(run, training).result()
        after = chain.evaluate_model.fn(run, data, merged, "evaluate_after").result()
        report = report_run(run, before, after, training, Columns())
    return run, report


def test_the_chain_trains_merges_evaluates_and_reports(
    place: Path, tmp_path: Path, server: ArithmeticServer
) -> None:
    from safetensors.torch import load_file

    config = config_of(place, tmp_path / "store", "crash:4")
    with pytest.raises(
        ChildProcessFailed, match=r"trainer\.log: \[rank0\]: RuntimeError: NCCL error in step 4"
    ):
        run_chain(config)
    planned = {stage.label: stage for stage in plan_chain(config)}
    assert planned["train_policy"].state == "resumes"

    run, report = run_chain(config)
    cached = {label: stage.cached for label, stage in run.stages.items()}
    assert cached == {
        label: label in ("prepare_data", "fetch_model", "evaluate_before") for label in cached
    }
    training = Path(run.stages["train_policy"].artifact)
    assert [row["step"] for row in read_training_metrics(training / "metrics.jsonl")] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]
    assert report["train"]["steps"] == 6
    manifest = json.loads((training / "manifest.json").read_text())
    assert (manifest["versions"], manifest["config"]["train"]["backend"]) == (
        {"verl": "0.9.1"},
        "verl",
    )
    merged = load_file(Path(run.stages["merge_checkpoint"].artifact) / "model.safetensors")
    before = load_file(place / "model/model.safetensors")
    assert merged.keys() == before.keys()
    assert not any((merged[name] == before[name]).all() for name in merged if "proj" in name)

    again, _ = run_chain(config)
    assert all(stage.cached for stage in again.stages.values())
    assert len(server.requests) == 2 * 8
    # An interrupted training equals the uninterrupted one.
    files = inputs(place, tmp_path / "t")
    train_with_other(config_of(place, tmp_path, ""), files)
    names = ("critic/score/mean", "actor/pg_loss")
    whole, cut = (
        read_json_lines(files.output / "metrics.jsonl"),
        read_json_lines(training / "metrics.jsonl"),
    )
    assert [[row[name] for name in names] for row in whole] == [
        [row[name] for name in names] for row in cut
    ]
