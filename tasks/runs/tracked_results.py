"""The results of a run's evaluations, sent to the trackers that followed its training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dapo_core.trackers import send_results
from tasks.artifacts.artifact import Artifact
from tasks.data.sources import eval_sources
from tasks.runs.run import Run

FIGURES = ("before", "after", "difference", "p", "p_holm")


def send_report(run: Run, report: Mapping[str, Any], training: Artifact) -> None:
    """Send the figures of report.json, at the training's last step. A tracker's failure is logged, not raised.

    A run that took everything from the store sends nothing: an earlier one did.
    """
    if all(stage.cached for stage in run.stages.values()):
        return
    name = "+".join(source.name for source in eval_sources(run.config))
    send_results(Path(training.path), results_of(report, name), run.config.train.total_steps)


def results_of(report: Mapping[str, Any], name: str) -> dict[str, float]:
    """`eval/BENCHMARK/FIGURE` of each benchmark, and of `pooled` for a suite; accuracies are shares.

    `name` is what the only benchmark is called, if it is one.
    """
    rows = [*report.get("benchmarks", ())]
    if rows:
        rows.append({"name": "pooled", **report["pooled"]})
    else:
        sides = {side: report[side]["accuracy"] for side in ("before", "after")}
        rows = [{"name": name, **sides, "difference": report["difference"], "p": report["p"]}]
    return {
        f"eval/{row['name']}/{figure}": float(row[figure])
        for row in rows
        for figure in FIGURES
        if row.get(figure) is not None
    }
