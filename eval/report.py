"""The before/after report: report.json for machines, report.md for terminals, report.html for people."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eval.compare import SIGNIFICANCE, Comparison, compare
from eval.pages import field_of, inline_script, render
from eval.plots import Plots, draw_plots
from eval.results import make_folder, write_atomically
from eval.training import Steps, read_training_metrics, training_totals
from eval.wording import notes, verdict

REPORT_JSON, REPORT_MARKDOWN, REPORT_PAGE = "report.json", "report.md", "report.html"


def write_report(
    before_dir: str | Path,
    after_dir: str | Path,
    train_metrics: str | Path | None,
    output_dir: str | Path,
    stages: Mapping[str, Mapping[str, Any]],
    artifacts: Mapping[str, str | Path],
    title: str = "Before/after report",
    draw: Callable[[Comparison, Steps], Plots] = draw_plots,
) -> dict[str, Any]:
    """The content of report.json, written to `output_dir` together with report.md and report.html.

    `train_metrics` is the training run's metrics.jsonl, None when nothing was trained; `stages` maps a stage
    to {cached, seconds}, `artifacts` a name to its path; `draw` gives what `draw_plots` does. Raises what
    `compare` raises.
    """
    comparison = compare(before_dir, after_dir)
    steps = read_training_metrics(train_metrics) if train_metrics is not None else []
    report = make_report(comparison, steps, stages, artifacts, title)
    output_dir = make_folder(output_dir)
    files = {
        REPORT_JSON: json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n",
        REPORT_MARKDOWN: render_markdown(report),
        REPORT_PAGE: render_html(report, draw(comparison, steps)),
    }
    for name, text in files.items():
        # A response may hold half of a surrogate pair, which no file can.
        write_atomically(output_dir / name, text.encode(errors="replace").decode())
    return report


def make_report(
    comparison: Comparison,
    steps: Steps,
    stages: Mapping[str, Mapping[str, Any]],
    artifacts: Mapping[str, str | Path],
    title: str,
) -> dict[str, Any]:
    """The content of report.json: the comparison, what follows from it in words, the training, the run."""
    fields = asdict(comparison)
    flips = {kind: fields.pop(kind) for kind in ("gained", "lost")}
    num_lost, num_gained = fields.pop("b"), fields.pop("c")
    num_groups = sum(map(len, comparison.groups.values()))
    report = {
        "title": title,
        "created_at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "verdict": verdict(comparison),
        "notes": notes(comparison),
        "is_significant": comparison.is_significant,
        **fields,
        "num_gained": num_gained,
        "num_lost": num_lost,
        "mcnemar": None,  # only of one sample per item
        "num_groups": num_groups,
        "expected_false_alarms": SIGNIFICANCE * num_groups,
        "flips": flips,
        "train": training_totals(steps),
        "stages": {name: dict(stage) for name, stage in stages.items()},
        "artifacts": {name: str(path) for name, path in artifacts.items()},
    }
    if comparison.num_samples == 1:
        report["mcnemar"] = {"b": num_lost, "c": num_gained, "p": comparison.p, "mid_p": comparison.mid_p}
    return json.loads(json.dumps(report))  # tuples become lists, as a reader of the file finds them


def render_markdown(report: Mapping[str, Any]) -> str:
    """report.md for terminals and Prefect's page: aligned tables, at most 100 columns but for paths."""
    return render("report.md.j2", report=report)


def render_html(report: Mapping[str, Any], plots: Plots) -> str:
    """report.html: one self-contained page; whatever a model wrote is escaped, and no script but ours may run."""
    from markupsafe import Markup

    script, script_hash = inline_script("flips.js")
    return render(
        "report.html.j2",
        report=report,
        field=field_of(report),
        script=script,
        script_hash=script_hash,
        # Markup only around SVG that we drew, whose texts come from levels and subjects: escaped by matplotlib.
        plots={name: [Markup(plot) for plot in drawn] for name, drawn in plots.items()},
    )
