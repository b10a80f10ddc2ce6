"""The before/after report of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dapo_core.metrics import METRICS_FILE
from eval.report import write_report as write_files
from tasks.artifacts import Artifact
from tasks.page import show_report
from tasks.runs.history import REPORT_FOLDER
from tasks.runs.run import Run
from tasks.stage_task import retried_task


@retried_task("write-report")
def write_report(run: Run, before: Artifact, after: Artifact, training: Artifact) -> dict[str, Any]:
    """report.json, report.md and report.html in the run's folder, and the report on Prefect's page.

    Written in each run, cached stages or not, because it tells which they were.
    """
    folder = run.folder / REPORT_FOLDER
    report = write_files(
        before.path,
        after.path,
        Path(training.path) / METRICS_FILE,
        folder,
        stages={label: {"cached": stage.cached, "seconds": stage.seconds} for label, stage in run.stages.items()},
        artifacts={label: stage.artifact for label, stage in run.stages.items()},
        title=run.config.run.name,
    )
    run.record(report=headline(report))
    show_report(run, folder, report["verdict"])
    return report


def headline(report: dict[str, Any]) -> dict[str, Any]:
    """What a list of runs shows of a report."""
    return {
        "before": report["before"]["accuracy"],
        "after": report["after"]["accuracy"],
        "difference": report["difference"],
        "p": report["p"],
        "n": report["n"],
    }
