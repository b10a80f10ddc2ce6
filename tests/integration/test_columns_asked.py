"""Baselines and checkpoints through the chain's tasks: evaluated once, cached, and failing
independently.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dapo_core.checkpoint.folder import CHECKPOINTS, step_folder
from dapo_core.metrics.log import METRICS_FILE
from dapo_core.model.folder import MERGE_MANIFEST
from flows import dapo_full
from flows.config import Config
from tasks import chain
from tasks.artifacts.artifact import Artifact
from tasks.artifacts.references import forget_resolved
from tasks.links import label_of, link_of
from tasks.preflight.finding import FAIL, OK, Findings
from tasks.preflight.run import check_baselines
from tasks.runs.report import Columns, take_columns
from tasks.runs.run import Run
from tests.hubs import hub_of_this_machine
from tests.integration.arithmetic_server import ArithmeticServer, serving_the_chain
from tests.recorded_runs import Outcome, produce, small_config
from tests.tiny_models import build_tiny_qwen3


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ArithmeticServer]:
    """A server in place of vLLM and of a remote one, and a merge that copies a model."""
    merged = build_tiny_qwen3(tmp_path / "merged")

    def run_dapo(words: list[Any], *_: object, **__: object) -> None:
        assert words[0] == "merge", words
        assert words[1].is_dir()
        shutil.copytree(merged, words[2], dirs_exist_ok=True)
        (words[2] / "step").write_text(words[1].name)
        (words[2] / MERGE_MANIFEST).write_text('{"files": {}}')

    with serving_the_chain(monkeypatch) as server:
        monkeypatch.setattr(chain, "run_dapo", run_dapo)
        for name in ("fetch_model", "evaluate_model", "merge_checkpoint"):
            task = getattr(chain, name)
            monkeypatch.setattr(
                dapo_full, name, lambda *values, task=task: task.fn(*values).result()
            )
        yield server


def ask(config: Config) -> tuple[Run, Columns]:
    """Evaluate the baselines and checkpoints of a run whose training kept steps 20 and 60."""
    forget_resolved()
    columns = Columns()
    with Run.start(config) as run:
        made = produce(run, Outcome(), ("prepare_data", "fetch_model"))

        def train(folder: Path) -> dict[str, Any]:
            for step in (20, 60):
                step_folder(folder / CHECKPOINTS, step).mkdir(parents=True)
                (step_folder(folder / CHECKPOINTS, step) / "weights").write_text(str(step))
            (folder / METRICS_FILE).write_text('{"step": 60}\n')
            return {}

        training = run.produce(
            "train_policy", link_of(config, "train_policy").key(*made.values()), train
        )
        dapo_full.evaluate_baselines(run, made["prepare_data"], columns)
        dapo_full.evaluate_checkpoints(run, made["prepare_data"], training, columns)
    return run, columns


def test_each_column_is_evaluated_once_and_fails_alone(
    server: ArithmeticServer, tmp_path: Path
) -> None:
    model = build_tiny_qwen3(tmp_path / "model", seed=1)
    entries = [
        {"name": "folder", "path": str(model)},
        {"name": "theirs", "base_url": server.url, "model": "m"},
        {"name": "away", "base_url": "http://127.0.0.1:9", "model": "m"},
    ]
    store = tmp_path / "store"
    baselines = f"evaluate.baselines={json.dumps(entries)}"
    run, columns = ask(small_config(store, baselines, "evaluate.checkpoints=[20]"))
    assert list(columns.baselines) == ["folder", "theirs"]
    assert list(columns.checkpoints) == [20]
    assert {name: why.split(":")[0] for name, why in columns.absent.items()} == {
        "away": "ServerUnreachable"
    }
    assert [served_by(columns.baselines[name]) for name in ("folder", "theirs")] == [
        "vllm serve MODEL",
        "",
    ]
    num_asked = len(server.requests)
    assert num_asked == 3 * 8
    merged = Path(run.stages["merge_step_20"].artifact)
    assert (merged / "step").read_text() == "step_000020"

    # A longer list costs only new steps; a step that the training did not keep is missing, with a
    # fix.
    again = small_config(store, baselines, "evaluate.checkpoints=[20, 40, 60]")
    run, columns = ask(again)
    assert all(
        run.stages[label].cached for label in ("evaluate_baseline_theirs", "evaluate_step_20")
    )
    assert not run.stages["evaluate_step_60"].cached
    assert len(server.requests) == num_asked + 8
    assert "--force trains again and keeps it" in columns.absent["step 40"]
    with Run.start(again) as run:
        taken = take_columns(run)
    assert (taken.baselines, taken.checkpoints) == (columns.baselines, columns.checkpoints)

    # Another model at the URL is evaluated again, and nothing else.
    server.logprobs = {" it": -0.5, " we": -1.5, " the": -3.0}
    run, columns = ask(again)
    assert not run.stages["evaluate_baseline_theirs"].cached
    assert run.stages["evaluate_baseline_folder"].cached
    assert len(server.requests) == num_asked + 16
    assert label_of(again, "evaluate_model", "theirs") == "evaluate_baseline_theirs"


def test_a_hub_baseline_shares_its_artifact_with_a_recipe_for_that_model(tmp_path: Path) -> None:
    folder = build_tiny_qwen3(tmp_path / "tiny")
    with hub_of_this_machine(tmp_path) as hub:
        hub.model().commit({path.name: path.read_bytes() for path in folder.iterdir()})
        entries = "[{name: hub, id: org/tiny}, {name: none, id: org/none}]"
        config = small_config(tmp_path / "store", f"evaluate.baselines={entries}")
        columns = Columns()
        with Run.start(config) as run:
            model = chain.fetch_model.fn(run, None, "fetch_baseline_hub").result()
            with columns.one("none"):
                chain.fetch_model.fn(run, None, "fetch_baseline_none")
        named = ("model.source=huggingface", "model.id=org/tiny")
        assert (
            link_of(small_config(tmp_path / "store", *named), "fetch_model").key().key == model.key
        )
        findings = Findings()
        check_baselines(config, findings)
    assert (Path(model.path) / "model.safetensors").read_bytes() == (
        folder / "model.safetensors"
    ).read_bytes()
    assert [finding.status for finding in findings] == [OK, FAIL]
    assert columns.absent["none"].startswith("DownloadError: ")


def served_by(artifact: Artifact) -> str:
    """Return the command of the server that answered."""
    return str(artifact.manifest()["metrics"]["serve_command"])
