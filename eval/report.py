"""The before/after report: report.json for machines, report.md for terminals, report.html for people."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.compare import Comparison, compare, format_p, points
from eval.results import write_atomically
from eval.training import Steps, read_training_metrics, training_totals

if TYPE_CHECKING:
    from jinja2 import Environment

_TEMPLATES = Path(__file__).parent / "templates"
_MAX_TEXT_CHARS = 6000  # of one response in the page; report.json has all of it
_MAX_CELL_CHARS = 40
_FORMAT_VERDICTS = ("no_answer", "truncated")


def write_report(
    before_dir: str | Path,
    after_dir: str | Path,
    train_metrics: str | Path | None,
    output_dir: str | Path,
    stages: Mapping[str, Mapping[str, Any]],
    artifacts: Mapping[str, str | Path],
    title: str = "Before/after report",
) -> dict[str, Any]:
    """The content of report.json, written to `output_dir` together with report.md and report.html.

    `train_metrics` is the training run's metrics.jsonl, None when nothing was trained; `stages` maps a stage
    to {cached, seconds}, `artifacts` a name to its path. Raises what `compare` raises.
    """
    comparison = compare(before_dir, after_dir)
    steps = read_training_metrics(train_metrics) if train_metrics is not None else []
    report = make_report(comparison, steps, stages, artifacts, title)
    output_dir = Path(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False)
    write_atomically(output_dir / "report.json", text + "\n")
    write_atomically(output_dir / "report.md", render_markdown(report))
    write_atomically(output_dir / "report.html", render_html(report, comparison, steps))
    return report


def make_report(
    comparison: Comparison,
    steps: Steps,
    stages: Mapping[str, Mapping[str, Any]],
    artifacts: Mapping[str, str | Path],
    title: str,
) -> dict[str, Any]:
    """The content of report.json."""
    return {
        "title": title,
        "verdict": comparison.verdict(),
        "is_significant": comparison.is_significant,
        "n": comparison.n,
        "num_unpaired": comparison.num_unpaired,
        "before": asdict(comparison.before),
        "after": asdict(comparison.after),
        "difference": comparison.difference,
        "ci95": list(comparison.ci95),
        "mcnemar": {"b": comparison.b, "c": comparison.c, "p": comparison.p},
        "minimal_detectable_difference": comparison.minimal_detectable_difference,
        "gained_by_format": sum(flip.before["verdict"] in _FORMAT_VERDICTS for flip in comparison.gained),
        "transitions": comparison.transitions,
        "flips": {
            "gained": [asdict(flip) for flip in comparison.gained],
            "lost": [asdict(flip) for flip in comparison.lost],
        },
        "train": training_totals(steps),
        "stages": {name: dict(stage) for name, stage in stages.items()},
        "artifacts": {name: str(path) for name, path in artifacts.items()},
        "sampling": comparison.sampling,
        "grader": comparison.grader,
    }


def render_markdown(report: Mapping[str, Any]) -> str:
    """report.md: aligned tables that read well on a terminal too."""
    return _environment(autoescape=False).get_template("report.md.j2").render(report=report)


def render_html(report: Mapping[str, Any], comparison: Comparison, steps: Steps) -> str:
    """report.html: one self-contained page; whatever a model wrote is escaped."""
    from markupsafe import Markup

    from eval.plots import accuracy_plot, training_plots

    # Markup only around SVG that we drew, whose texts come from levels: escaped by matplotlib.
    return (
        _environment(autoescape=True)
        .get_template("report.html.j2")
        .render(
            report=report,
            accuracy_plot=Markup(accuracy_plot(comparison.before, comparison.after)),
            training_plots=[Markup(plot) for plot in training_plots(steps)],
        )
    )


def _environment(autoescape: bool) -> Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=autoescape,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    filters: dict[str, Callable[..., str]] = {
        "percent": lambda share: f"{100 * share:.1f} %",
        "interval": lambda bounds: f"{100 * bounds[0]:.1f} to {100 * bounds[1]:.1f}",
        "points": points,
        "p_value": format_p,
        "duration": format_duration,
        "count": lambda number: "unknown" if number is None else f"{number:,.0f}",
        "verdict_name": lambda verdict: verdict.replace("_", " "),
        "shortened": _shortened,
        "cell": _cell,
        "answer_cell": _answer_cell,
    }
    environment.filters.update(filters)
    environment.globals["markdown_table"] = _markdown_table
    return environment


def format_duration(seconds: float | None) -> str:
    """A duration for people: "0.4 s", "12 s", "3 min 05 s", "2 h 10 min"."""
    if seconds is None:
        return "unknown"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _shortened(text: str) -> str:
    """A long text without its middle."""
    if len(text) <= _MAX_TEXT_CHARS:
        return text
    half = _MAX_TEXT_CHARS // 2
    gap = f"[... {len(text) - 2 * half:,} characters left out; report.json has them ...]"
    return f"{text[:half]}\n\n{gap}\n\n{text[-half:]}"


def _cell(text: Any) -> str:
    """Text of a model or a problem as a one-line code span that cannot break a Markdown table."""
    line = " ".join(str(text).split()).replace("`", "'")
    if len(line) > _MAX_CELL_CHARS:
        line = line[: _MAX_CELL_CHARS - 3] + "..."
    return f"`{line}`".replace("|", "\\|") if line else "-"


def _answer_cell(side: Mapping[str, Any]) -> str:
    """The answer of one side of a flip, or its verdict where it has none."""
    return side["verdict"].replace("_", " ") if side["answer"] is None else _cell(side["answer"])


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table with padded columns: the first flush left, the others flush right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(header))]
    lines = [
        "| "
        + " | ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        + " |"
        for row in cells
    ]
    rule = "|" + "|".join("-" * (w + 1) + (":" if i else "-") for i, w in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])
