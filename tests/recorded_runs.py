"""Runs of the chain in a small store: real keys, data, manifests and reports; only the weights are
fake.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo_core.checkpoint.folder import CHECKPOINTS, step_folder
from dapo_core.metrics.log import METRICS_FILE
from eval.report.compare import compare
from eval.report.report import (
    REPORT_JSON,
    REPORT_MARKDOWN,
    Provenance,
    make_report,
    render_markdown,
)
from eval.report.training import read_training_metrics
from flows.config import Config, load_config
from tasks.artifacts.artifact import Artifact
from tasks.artifacts.stage_key import PROJECT_ROOT
from tasks.data.prepare import build_dataset
from tasks.links import chain_of, link_of
from tasks.runs.history import REPORT_FOLDER
from tasks.runs.report import headline
from tasks.runs.run import Run
from tests.evaluations import write_results

SMALL = ("data.arithmetic.num_train=32", "data.arithmetic.num_eval=8")
LABELS = tuple(
    link.label for link in chain_of(load_config(PROJECT_ROOT / "configs" / "arith_cpu.yaml"))
)
STEP = {"perf/trained_response_tokens": 900, "perf/generated_tokens": 1200, "timing_s/step": 2.5}


@dataclass(frozen=True)
class Outcome:
    """What the stages of a run produce."""

    weights: str = "trained"  # what training writes
    before: str = "rwww"  # verdicts
    after: str = "rrrw"


def small_config(store: Path, *overrides: str) -> Config:
    """The default recipe with little data, in the given store."""
    path = PROJECT_ROOT / "configs" / "arith_cpu.yaml"
    return load_config(path, [*SMALL, f"store.path={store}", *overrides])


def record_run(
    config: Config,
    outcome: Outcome | None = None,
    labels: Collection[str] = LABELS,
    flow: str = "dapo-full",
    forced: Collection[str] = (),
) -> Run:
    """A finished run, with a report if it covers the whole chain."""
    with Run.start(config, flow, forced) as run:
        artifacts = produce(run, outcome or Outcome(), labels)
        if len(labels) == len(LABELS):
            write_report(run, artifacts)
    return run


def write_report(run: Run, artifacts: Mapping[str, Artifact]) -> None:
    """The run's report without report.html, whose plots take a second."""
    comparison = compare(artifacts["evaluate_before"].path, artifacts["evaluate_after"].path)
    steps = read_training_metrics(Path(artifacts["train_policy"].path) / METRICS_FILE)
    places = {label: stage.artifact for label, stage in run.stages.items()}
    report = make_report(comparison, steps, Provenance(title=run.config.run.name, artifacts=places))
    folder = run.folder / REPORT_FOLDER
    folder.mkdir()
    (folder / REPORT_JSON).write_text(json.dumps(report))
    (folder / REPORT_MARKDOWN).write_text(render_markdown(report))
    run.record(report=headline(report))


def produce(run: Run, outcome: Outcome, labels: Collection[str]) -> dict[str, Artifact]:
    """The artifacts of these stages, built if missing; upstream artifacts come from the store."""
    artifacts: dict[str, Artifact] = {}
    for label in labels:
        link = link_of(run.config, label)
        needs = [artifacts.get(need) or run.take(need) for need in link.needs]
        artifacts[label] = run.produce(label, link.key(*needs), builder(run.config, label, outcome))
    return artifacts


def builder(config: Config, label: str, outcome: Outcome) -> Callable[[Path], Mapping[str, Any]]:
    """The build function of a stage."""

    def build(folder: Path) -> Mapping[str, Any]:
        if label == "prepare_data":
            return build_dataset(config, folder)
        if label.startswith("evaluate"):
            is_before = label == "evaluate_before"
            with tempfile.TemporaryDirectory() as place:
                letters = outcome.before if is_before else outcome.after
                model = "base" if is_before else outcome.weights
                results = write_results(Path(place) / "results", letters, model=model)
                shutil.copytree(results, folder, dirs_exist_ok=True)
        else:
            (folder / "weights").write_text("base" if label == "fetch_model" else outcome.weights)
        if label == "train_policy":
            (folder / METRICS_FILE).write_text(json.dumps({"step": 1, **STEP}) + "\n")
            for step in config.checkpoint_steps:
                checkpoint = step_folder(folder / CHECKPOINTS, step)
                checkpoint.mkdir(parents=True)
                (checkpoint / "weights").write_text(f"{outcome.weights} {step}")
        return {}

    return build
