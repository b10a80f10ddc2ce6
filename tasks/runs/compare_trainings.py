"""Side-by-side comparison of trainings, including other trainers': metrics and plots."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from durable import write_atomically
from eval.report.pages import render
from eval.report.plots import MAX_SIDES, side_plots
from eval.report.training import Steps, series
from eval.results.rows import ResultsError, make_folder
from interop.logs import metric_names, read_training

TRAININGS_PAGE = "trainings.html"
TRAININGS_JSON = "trainings.json"
_METRICS = {
    "critic/rewards/mean": "reward",
    "critic/score/mean": "score",
    "validation/accuracy": "accuracy, held-out",
    "response_length/mean": "response tokens",
    "response_length/clip_ratio": "responses truncated",
    "prompt_length/mean": "prompt tokens",
    "actor/entropy": "entropy",
    "actor/pg_loss": "policy loss",
    "actor/kl_loss": "KL to the reference",
    "actor/ppo_kl": "KL of the update",
    "actor/pg_clipfrac": "tokens clipped",
    "actor/grad_norm": "gradient norm",
    "actor/lr": "learning rate",
    "train/num_gen_batches": "draws",
    "perf/throughput": "tokens/s per device",
    "timing_s/step": "seconds per step",
    "timing_s/gen": "generation, seconds",
    "timing_s/old_log_prob": "old log-probs, seconds",
    "timing_s/update_actor": "update, seconds",
    "timing_s/weight_sync": "weight sync, seconds",
}
_PER_SET = "val-core/"  # accuracies by data source
_PART = 10  # "first" and "last" are means over a tenth of the steps


@dataclass(frozen=True)
class Ends:
    """Means of a metric over the first and last tenth of the steps that report it."""

    first: float
    last: float
    num_steps: int


@dataclass(frozen=True)
class Side:
    """One training: its steps, and the first and last values of each metric."""

    label: str
    trainer: str
    steps: Steps
    metrics: dict[str, Ends]

    @property
    def extent(self) -> str:
        """Range of steps in words. Step 0 is a validation before training."""
        numbers = [metrics["step"] for metrics in self.steps]
        return f"{numbers[0]:,} to {numbers[-1]:,}" if len(numbers) > 1 else f"{numbers[0]:,}"


def compare_trainings(paths: Mapping[str, Path]) -> list[Side]:
    """Read the console logs or metrics files at these paths, by label.

    Raises ResultsError for a file without training steps, and for more than MAX_SIDES files.
    """
    if len(paths) > MAX_SIDES:
        raise ResultsError(
            f"{len(paths)} trainings do not fit in one plot; name at most {MAX_SIDES}"
        )
    return [_read(label, path) for label, path in paths.items()]


def _read(label: str, path: Path) -> Side:
    training = read_training(path)
    if not training.steps:
        raise ResultsError(
            f"{path} contains no training step. Expected are lines `step:1 - name:value - ...` "
            "(verl console), `iteration: 1 / 100 | name : value | ...` (MindSpeed) or JSON with "
            "`step` (metrics file)"
        )
    names = dict.fromkeys(name for metrics in training.steps for name in metrics if name != "step")
    metrics = {name: ends for name in names if (ends := _ends(training.steps, name)) is not None}
    return Side(
        label,
        {"": "own", "mindspeed": "MindSpeed"}.get(training.trainer, training.trainer),
        training.steps,
        metrics,
    )


def _ends(steps: Steps, name: str) -> Ends | None:
    _, values = series(steps, name)
    if not values:
        return None
    part = max(1, len(values) // _PART)
    return Ends(sum(values[:part]) / part, sum(values[-part:]) / part, len(values))


def _table(sides: Sequence[Side]) -> list[tuple[str, list[str]]]:
    """(metric label, one cell per side) for every metric that a side has."""
    by_set = sorted({name for side in sides for name in side.metrics if name.startswith(_PER_SET)})
    labels = {**_METRICS, **{name: name for name in by_set}}
    rows = [("steps", [side.extent for side in sides])]
    for name, label in labels.items():
        if any(name in side.metrics for side in sides):
            rows.append((label, [_cell(side.metrics.get(name)) for side in sides]))
    return rows


def _cell(ends: Ends | None) -> str:
    if ends is None:
        return "-"
    values = (ends.first, ends.last)
    first, last = (f"{one:,.0f}" if abs(one) >= 1000 else f"{one:.4g}" for one in values)
    return first if ends.num_steps == 1 else f"{first} → {last}"


def _notes(sides: Sequence[Side]) -> list[str]:
    """How values of other trainers differ from dapo-pipeline's values of the same name."""
    notes = []
    for trainer in dict.fromkeys(side.trainer for side in sides if side.trainer != "own"):
        for entry in metric_names(trainer.lower()).values():
            shown = any(entry["ours"] in side.metrics for side in sides if side.trainer == trainer)
            if "note" in entry and entry["ours"] in _METRICS and shown:
                notes.append(f"{trainer}, {_METRICS[entry['ours']]}: {entry['note']}.")
    return list(dict.fromkeys(notes))


def render_markdown(sides: Sequence[Side]) -> str:
    """The table as Markdown for a terminal."""
    return render("trainings.md.j2", sides=sides, rows=_table(sides), notes=_notes(sides))


def write_page(sides: Sequence[Side], output_dir: str | Path) -> Path:
    """Write trainings.html (plots) and trainings.json; returns the page."""
    from markupsafe import Markup

    folder = make_folder(output_dir)
    drawings = [Markup(plot) for plot in side_plots({side.label: side.steps for side in sides})]
    page = render(
        "trainings.html.j2", sides=sides, rows=_table(sides), notes=_notes(sides), drawings=drawings
    )
    content = {
        side.label: {
            "trainer": side.trainer,
            "steps": [metrics["step"] for metrics in side.steps],
            "metrics": {name: asdict(ends) for name, ends in side.metrics.items()},
        }
        for side in sides
    }
    write_atomically(folder / TRAININGS_JSON, json.dumps(content, indent=1, ensure_ascii=False))
    write_atomically(folder / TRAININGS_PAGE, page)
    return folder / TRAININGS_PAGE
