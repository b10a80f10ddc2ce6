"""Renders the page and the plot of bench/learning.py from the outcomes of its trainings."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FULL = "full"
# Removed ingredient -> overrides. More open prompts than a step trains on are only useful with
# dynamic sampling; without it, they would sample a step ahead, which is another change.
VARIANTS: dict[str, tuple[str, ...]] = {
    FULL: (),
    "clip-higher": ("algorithm.clip_ratio_high=0.2",),
    "dynamic-sampling": ("sampler.dynamic=false", "sampler.gen_prompts=16"),
    "token-mean": ("algorithm.loss_aggregation=seq-mean-token-mean",),
    "overlong-shaping": ("reward.overlong.enabled=false",),
}
INGREDIENTS = tuple(VARIANTS)[1:]
LOSSES = ("gspo", "cispo", "sapo", "gmpo", "dppo-tv", "clip-cov", "kl-cov", "dro", "reinforce")
COLOURS = dict(zip(VARIANTS, ("#2563a8", "#d9822b", "#3c8a5a", "#8e5ea2", "#b5473c"), strict=True))
VARIANTS |= {name: (f"algorithm.loss={name}",) for name in LOSSES}
CURVES = {  # metric: title of its plot
    "sampler/accuracy": "Right in training (share of finished responses)",
    "actor/entropy": "Policy entropy (nats per token)",
    "response_length/mean": "Length trained on (tokens)",
}
WINDOW = 5  # steps averaged for each point of a curve, and for the final values in the table
# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom.
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class Job:
    """One training, or the model before training if variant is None."""

    variant: str | None
    seed: int
    steps: int | None
    store: str

    @property
    def overrides(self) -> tuple[str, ...]:
        steps = () if self.steps is None else (f"train.total_steps={self.steps}",)
        changes = VARIANTS[self.variant] if self.variant else ()
        return (f"run.seed={self.seed}", "validation.every=0", *steps, *changes)

    @property
    def label(self) -> str:
        return f"{'before' if self.variant is None else _name(self.variant)}, seed {self.seed}"


@dataclass(frozen=True)
class Outcome:
    """Result of one job."""

    job: Job
    accuracy: float  # on the held-out items, greedy
    answer_tokens: float  # mean over the same items
    curves: Mapping[str, list[float]]  # metric: a value per step
    generated_tokens: float
    num_items: int

    def last(self, metric: str) -> float:
        """Mean over the last steps."""
        return statistics.fmean(self.curves[metric][-WINDOW:])


@dataclass(frozen=True)
class Comparison:
    """Accuracy of a variant minus that of the full recipe, paired by seed, in points."""

    differences: list[float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.differences)

    @property
    def half_width(self) -> float | None:
        """Half width of the 95 % t-interval of the mean; None with a single seed."""
        n = len(self.differences)
        return T_95[n - 2] * statistics.stdev(self.differences) / n**0.5 if n > 1 else None

    @property
    def verdict(self) -> str:
        if self.half_width is None:
            return "one seed: noise unknown"
        if abs(self.mean) <= self.half_width:
            return "within noise"
        return "worse" if self.mean < 0 else "better"


def render(outcomes: Sequence[Outcome], command: str) -> str:
    """Render the page: the table and a sentence per comparison. `command` is the command that wrote
    it.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    templates = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=templates, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.get_template("learning.md.j2")
    trained = by_variant(outcomes)
    befores = [outcome for outcome in outcomes if outcome.job.variant is None]
    text = template.render(
        rows=_rows(trained, (FULL, *INGREDIENTS)),
        loss_rows=_rows(trained, (FULL, *LOSSES)),
        before=_spread([100 * outcome.accuracy for outcome in befores], 1),
        comparisons={
            ingredient(name): compare(group, trained[FULL])
            for name, group in trained.items()
            if name in INGREDIENTS
        },
        num_intervals=len(trained) - 1,
        settings={ingredient(name): keys for name, keys in VARIANTS.items()},
        num_seeds=len(befores),
        num_steps=len(next(iter(trained[FULL][0].curves.values()))),
        num_items=trained[FULL][0].num_items,
        window=min(WINDOW, len(trained[FULL][0].curves["actor/entropy"])),
        command=command,
    )
    return text.rstrip() + "\n"


def ingredient(variant: str) -> str:
    """Return the name of the removed ingredient."""
    return variant if variant in ("clip-higher", "token-mean") else variant.replace("-", " ")


def by_variant(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """Group the trainings by variant, in order of seed."""
    ordered = sorted(outcomes, key=lambda outcome: outcome.job.seed)
    groups = {
        name: [outcome for outcome in ordered if outcome.job.variant == name] for name in VARIANTS
    }
    return {name: group for name, group in groups.items() if group}


def compare(group: Sequence[Outcome], full: Sequence[Outcome]) -> Comparison:
    """Compare a variant's trainings with the full recipe's of the same seeds."""
    assert [outcome.job.seed for outcome in group] == [outcome.job.seed for outcome in full]
    return Comparison([100 * (a.accuracy - b.accuracy) for a, b in zip(group, full, strict=True)])


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """Plot training curves (mean and min-max band over seeds), and held-out accuracies as dots."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    grouped = by_variant(outcomes)
    trained = {name: grouped[name] for name in COLOURS if name in grouped}
    figure = Figure(figsize=(10.5, 7), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2).flat
    for axes, (metric, title) in zip(panels, CURVES.items(), strict=False):
        for name, group in trained.items():
            _draw_band(axes, name, [_running_mean(outcome.curves[metric]) for outcome in group])
        axes.set_xlabel(f"training step (mean of {WINDOW} steps)", fontsize=8)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        _style(axes, title)
    axes = figure.axes[3]
    for place, (name, group) in enumerate(trained.items()):
        accuracies = [100 * outcome.accuracy for outcome in group]
        axes.plot(
            [place] * len(group), accuracies, "o", color=COLOURS[name], alpha=0.6, markersize=5
        )
        axes.plot(
            [place - 0.2, place + 0.2],
            [statistics.fmean(accuracies)] * 2,
            color=COLOURS[name],
            linewidth=2,
        )
    axes.set_xticks(range(len(trained)), [_name(name).replace(" ", "\n", 1) for name in trained])
    _style(axes, "Held-out accuracy after training (%), a dot for each seed")
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=5,
        frameon=False,
    )
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _rows(trained: Mapping[str, Sequence[Outcome]], names: Sequence[str]) -> list[list[str]]:
    """Return the rows of those variants that were trained."""
    return [_row(name, trained[name], trained[FULL]) for name in names if name in trained]


def _row(name: str, group: Sequence[Outcome], full: Sequence[Outcome]) -> list[str]:
    """Return a variant's cells in the table."""
    return [
        _name(name),
        _spread([100 * outcome.accuracy for outcome in group], 1),
        "" if name == FULL else _interval(compare(group, full)),
        _spread([outcome.last("actor/entropy") for outcome in group], 3),
        _spread([outcome.last("response_length/mean") for outcome in group], 1),
        _spread([outcome.answer_tokens for outcome in group], 1),
        _spread([outcome.generated_tokens / 1000 for outcome in group], 0),
    ]


def _interval(comparison: Comparison) -> str:
    if comparison.half_width is None:
        return f"{comparison.mean:+.1f}"
    low, high = comparison.mean - comparison.half_width, comparison.mean + comparison.half_width
    return f"{comparison.mean:+.1f} [{low:+.1f}, {high:+.1f}]"


def _spread(values: Sequence[float], digits: int) -> str:
    """Format as mean (min..max)."""
    return (
        f"{statistics.fmean(values):,.{digits}f} "
        f"({min(values):,.{digits}f}..{max(values):,.{digits}f})"
    )


def _name(variant: str) -> str:
    if variant == FULL:
        return "full recipe"
    return f"loss {variant}" if variant in LOSSES else f"without {ingredient(variant)}"


def _draw_band(axes: Axes, name: str, curves: Sequence[Sequence[float]]) -> None:
    points = list(zip(*curves, strict=True))
    steps = range(1, len(points) + 1)
    width = 2.2 if name == FULL else 1.3
    axes.plot(
        steps,
        [statistics.fmean(p) for p in points],
        color=COLOURS[name],
        linewidth=width,
        label=_name(name),
    )
    axes.fill_between(
        steps, [min(p) for p in points], [max(p) for p in points], color=COLOURS[name], alpha=0.1
    )


def _style(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=9.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6eaee", linewidth=0.8)
    axes.tick_params(labelsize=8, length=0)


def _running_mean(values: Sequence[float]) -> list[float]:
    """Return the means of WINDOW steps, of which those that finished no group have no value."""
    windows = [values[max(0, end - WINDOW) : end] for end in range(1, len(values) + 1)]
    known = [[value for value in window if math.isfinite(value)] for window in windows]
    return [statistics.fmean(each) if each else math.nan for each in known]
