"""The before/after report of a run, in its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dapo_core.metrics import METRICS_FILE
from durable import write_atomically
from eval.compare import Comparison
from eval.plots import Plots, draw_plots
from eval.report import write_report
from eval.training import Steps
from tasks.artifacts import Artifact, StageKey, code_digest, package_versions
from tasks.runs.history import REPORT_FOLDER, read_runs
from tasks.runs.run import Run
from tasks.stages import CHAIN

PLOTS_FILE = "plots.json"  # drawing takes longer than all else of a report


def report_run(run: Run, before: Artifact, after: Artifact, training: Artifact) -> dict[str, Any]:
    """The content of report.json, written with report.md and report.html; its headline goes to the run's record.

    Written in each run, cached stages or not, because it tells which they were; plots of equal contents are those
    of an earlier run.
    """
    key = StageKey(
        stage="plots",
        config={},
        inputs={"before": before.digest, "after": after.digest, "training": training.digest},
        code_digest=code_digest(("eval/plots.py",)),
        versions=package_versions(("matplotlib",)),
    ).key

    def draw(comparison: Comparison, steps: Steps) -> Plots:
        plots = _find_plots(run, key) or draw_plots(comparison, steps)
        write_atomically(run.folder / PLOTS_FILE, json.dumps({"key": key, "plots": plots}))
        return plots

    report = write_report(
        before.path,
        after.path,
        Path(training.path) / METRICS_FILE,
        run.folder / REPORT_FOLDER,
        stages={label: {"cached": stage.cached, "seconds": stage.seconds} for label, stage in run.stages.items()},
        artifacts={label: stage.artifact for label, stage in run.stages.items()},
        title=run.config.run.name,
        draw=draw,
    )
    run.record(report=headline(report))
    return report


def repeat_chain(run: Run) -> dict[str, Any]:
    """The report of a run whose every stage the store has; raises StoreError when it has one no longer."""
    taken = {link.label: run.take(link.label) for link in CHAIN}
    return report_run(run, taken["evaluate_before"], taken["evaluate_after"], taken["train_policy"])


def headline(report: Mapping[str, Any]) -> dict[str, Any]:
    """What a list of runs shows of a report."""
    return {
        "before": report["before"]["accuracy"],
        "after": report["after"]["accuracy"],
        "difference": report["difference"],
        "p": report["p"],
        "n": report["n"],
    }


def _find_plots(run: Run, key: str) -> Plots | None:
    """The plots of this key in the newest run with the same outputs that has them; None where none has."""
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
        except (OSError, ValueError, KeyError):  # another version's, or removed: they are drawn anew
            continue
    return None
