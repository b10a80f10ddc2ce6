"""The before/after report of a run."""

from __future__ import annotations

from typing import Any

from tasks.artifacts import Artifact
from tasks.page import show_report
from tasks.runs.history import REPORT_FOLDER
from tasks.runs.report import report_run
from tasks.runs.run import Run
from tasks.stage_task import retried_task


@retried_task("write-report")
def write_report(run: Run, before: Artifact, after: Artifact, training: Artifact) -> dict[str, Any]:
    """report.json, report.md and report.html in the run's folder, and the report on Prefect's page."""
    report = report_run(run, before, after, training)
    show_report(run, run.folder / REPORT_FOLDER, report["verdict"])
    return report
