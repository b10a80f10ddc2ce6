"""Plots of the report, as SVG text that can stand inside an HTML page."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eval.compare import GroupResult, Side
from eval.training import Steps, series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BEFORE_COLOUR = "#9aa5b1"
AFTER_COLOUR = "#2563a8"
_LINE_COLOURS = ("#2563a8", "#d9822b", "#3c8a5a", "#8e5ea2")


@dataclass(frozen=True)
class CurvePlot:
    """One small plot of training metrics over steps: {metric key: label}."""

    title: str
    curves: Mapping[str, str]
    has_zero: bool = False  # the axis starts at zero: shares, lengths, seconds


CURVE_PLOTS = (
    CurvePlot("Score per response", {"critic/score/mean": "mean"}),
    CurvePlot(
        "Share of responses", {"reward/right_ratio": "right", "reward/no_answer_ratio": "no answer"}, has_zero=True
    ),
    CurvePlot("Policy entropy", {"actor/entropy": "entropy"}, has_zero=True),
    CurvePlot("Response length (tokens)", {"response_length/mean": "mean"}, has_zero=True),
    CurvePlot(
        "Clipped tokens (share)",
        {"actor/pg_clipfrac": "clipped", "actor/pg_clipfrac_lower": "dual clip"},
        has_zero=True,
    ),
    CurvePlot("Gradient norm", {"actor/grad_norm": "before clipping"}, has_zero=True),
    CurvePlot("Generated tokens not trained on (share)", {"sampler/waste_ratio": "waste"}, has_zero=True),
    CurvePlot(
        "Seconds per step",
        {
            "timing_s/gen": "generate",
            "timing_s/update_actor": "update",
            "timing_s/old_log_prob": "old log-probs",
            "timing_s/weight_sync": "weight sync",
        },
        has_zero=True,
    ),
)


def training_plots(steps: Steps) -> list[str]:
    """SVGs of the curves for which the steps carry values."""
    plots = []
    for plot in CURVE_PLOTS:
        curves = {label: series(steps, key) for key, label in plot.curves.items()}
        curves = {label: curve for label, curve in curves.items() if curve[0]}
        if curves:
            plots.append(_curve_svg(plot, curves))
    return plots


def accuracy_plot(before: Side, after: Side) -> str:
    """SVG of both accuracies, overall and by level, with Wilson's 95 % intervals."""
    groups: dict[str, tuple[Side | GroupResult, ...]] = {"all": (before, after)}
    groups |= {
        f"level {key}".replace("$", r"\$"): (before.by_level[key], after.by_level[key]) for key in before.by_level
    }
    figure, axes = _new_figure(width=7.6, height=3.0)
    for side, (label, colour) in enumerate((("before", BEFORE_COLOUR), ("after", AFTER_COLOUR))):
        results = [pair[side] for pair in groups.values()]
        heights = [100 * result.accuracy for result in results]
        errors = [
            [100 * (r.accuracy - r.interval[0]) for r in results],
            [100 * (r.interval[1] - r.accuracy) for r in results],
        ]
        axes.bar(
            [position + 0.38 * (side - 0.5) for position in range(len(groups))],
            heights,
            width=0.36,
            color=colour,
            label=label,
            yerr=errors,
            error_kw={"ecolor": "#3a4653", "elinewidth": 1, "capsize": 2.5},
        )
    axes.set_xticks(range(len(groups)), [f"{name}\nn = {pair[0].n}" for name, pair in groups.items()])
    axes.set_ylim(0, 100)
    axes.set_ylabel("accuracy (%)")
    axes.legend(frameon=False, fontsize=8.5, loc="upper left", ncols=2, bbox_to_anchor=(0, 1.14))
    return _svg(figure)


def _curve_svg(plot: CurvePlot, curves: Mapping[str, tuple[list[int], list[float]]]) -> str:
    from matplotlib.ticker import MaxNLocator

    figure, axes = _new_figure(width=3.7, height=2.2)
    axes.set_title(plot.title, loc="left", fontsize=9.5)
    for (label, (steps, values)), colour in zip(curves.items(), _LINE_COLOURS, strict=False):
        marker = "o" if len(steps) < 4 else None
        axes.plot(steps, values, color=colour, label=label, linewidth=1.5, marker=marker, markersize=3)
    if plot.has_zero:
        axes.set_ylim(bottom=0)
    if len(curves) > 1:  # room above the curves, so that the legend hides none
        axes.set_ylim(top=axes.get_ylim()[1] * 1.3)
        axes.legend(frameon=False, fontsize=7.5, ncols=2, loc="upper right", borderaxespad=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.set_xlabel("step")
    return _svg(figure)


def _new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#b8c0c8")
    axes.grid(axis="y", color="#e6eaee", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, colors="#4a5560", length=0)
    axes.xaxis.label.set_fontsize(8)
    axes.yaxis.label.set_fontsize(8)
    return figure, axes


def _svg(figure: Figure) -> str:
    """The figure's <svg> element alone: text as text, and no date, so that equal data give equal bytes."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "report", "font.family": "sans-serif"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    text = buffer.getvalue()
    return re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
