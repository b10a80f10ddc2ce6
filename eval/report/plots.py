"""Report plots as SVG text, in the page's light and dark colours."""

from __future__ import annotations

import io
import itertools
import re
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from markupsafe import escape

from eval.report.compare import Comparison
from eval.report.training import PHASES, Steps, series, with_derived

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# matplotlib draws in these placeholder colours; `svg_of` replaces each with the page's CSS
# variable.
_PAGE_COLOURS = {
    "#010101": "--ink",
    "#020202": "--soft",
    "#030303": "--line",
    "#040404": "--before",
    "#050505": "--after",
    "#060606": "--up",
    "#070707": "--down",
    "#080808": "--third",
    "#090909": "--fourth",
    "#0a0a0a": "--fifth",
}
COLOUR = {name.removeprefix("--"): code for code, name in _PAGE_COLOURS.items()}
_LINE_COLOURS = tuple(COLOUR[name] for name in ("after", "third", "up", "fourth", "down", "fifth"))
MAX_SIDES = len(_LINE_COLOURS)
Plots = dict[str, list[str]]
Accuracy = tuple[float, tuple[float, float]]  # with its 95 % interval
_MARKED_BELOW = 12  # a curve with fewer points gets markers


CURVE_PLOTS: dict[str, dict[str, str]] = {  # title -> {metric: label}
    "Reward per response": {"critic/rewards/mean": "reward", "critic/score/mean": "score only"},
    "Accuracy (share)": {
        "validation/accuracy": "held-out",
        "sampler/accuracy": "all sampled",
        "reward/right_ratio": "trained on",
    },
    "Unfinished responses (share)": {
        "reward/no_answer_ratio": "no answer",
        "response_length/clip_ratio": "truncated",
    },
    "Policy entropy": {"actor/entropy": "entropy"},
    "Response length (tokens)": {
        "response_length/mean": "mean",
        "validation/response_length/mean": "held-out",
    },
    "Clipped tokens (share)": {
        "actor/pg_clipfrac": "clipped",
        "actor/pg_clipfrac_lower": "dual clip",
    },
    "Engine and policy (per token)": {
        "rollout/fresh_probs_diff_mean": "mean",
        "rollout/fresh_probs_diff_max": "max",
        "rollout/fresh_kl_size": "|k1|",
        "rollout/fresh_k3_kl": "k3",
        "rollout/fresh_probs_diff_high_ratio": "share > 0.1",
    },
    "Gradient norm": {"actor/grad_norm": "before clipping"},
    "Dynamic sampling (share)": {
        "sampler/kept_share": "groups kept",
        "sampler/waste_ratio": "tokens wasted",
    },
    "Seconds per step": PHASES,
}
SIDE_PLOTS: dict[str, tuple[str, ...]] = {  # title -> metrics; the first one present is drawn
    "Reward per response": ("critic/rewards/mean", "critic/score/mean"),
    "Response length (tokens)": ("response_length/mean",),
    "Policy entropy": ("actor/entropy",),
    "Throughput (tokens/s per device)": ("perf/throughput",),
}
_BY_SET = {  # title -> pattern of the per-set metrics
    "Score by set": re.compile("train-core/(.+)/score/mean"),
    "Accuracy by set, all sampled (share)": re.compile("train-core/(.+)/acc/mean"),
    "Accuracy by set, held-out (share)": re.compile("val-core/(.+)/acc/mean@[0-9]+"),
}
_SIGNED = ("Reward per response", "Score by set")  # the other linear plots start at zero
_LOGARITHMIC = ("Engine and policy (per token)",)


def draw_plots(comparison: Comparison, steps: Steps) -> Plots:
    """All plots of a report: SVGs under accuracy, gain, transition, length, limit, training."""
    return {
        "accuracy": accuracy_plots(comparison),
        "gain": [gain_plot(comparison)],
        "transition": [transition_plot(comparison)],
        "length": [length_plot(comparison)],
        "limit": [limit_plot(comparison)] if comparison.by_limit else [],
        "training": training_plots(steps),
    }


def training_plots(steps: Steps) -> list[str]:
    """Training curves as SVGs, one per group of recorded metrics and per set of several."""
    steps = with_derived(steps)
    plots = []
    for title, labels in {**CURVE_PLOTS, **_plots_by_set(steps)}.items():
        curves = {label: series(steps, key) for key, label in labels.items()}
        curves = {label: curve for label, curve in curves.items() if curve[0]}
        if curves:
            plots.append(_curve_plot(title, curves))
    return plots


def side_plots(sides: Mapping[str, Steps]) -> list[str]:
    """Reward, length, entropy and throughput as SVGs, a line per training (at most MAX_SIDES)."""
    plots = []
    for title, keys in SIDE_PLOTS.items():
        found = {
            label: [curve for key in keys if (curve := series(steps, key))[0]]
            for label, steps in sides.items()
        }
        # Sides without values keep their place, so a side has the same colour in every plot.
        curves = {
            plain(label): curves[0] if curves else ([], []) for label, curves in found.items()
        }
        if any(found.values()):
            plots.append(_curve_plot(title, curves))
    return plots


def _plots_by_set(steps: Steps) -> dict[str, dict[str, str]]:
    names = sorted({name for metrics in steps for name in metrics})
    plots = {}
    for title, pattern in _BY_SET.items():
        found = {name: match[1] for name in names if (match := pattern.fullmatch(name))}
        if len(found) > 1:
            plots[title] = found
    return plots


def prompt_length_plot(lengths: Mapping[str, Any]) -> str:
    """Histogram of a data card's prompt lengths; a line marks data.max_prompt_tokens."""
    figure, axes = _new_figure(width=5.2, height=2.6)
    edges, counts = list(lengths["edges"]), lengths["counts"]
    if len(edges) > 2:
        # the last bin is open-ended; draw it as wide as the others
        edges[-1] = 2 * edges[-2] - edges[-3]
    axes.stairs(counts, edges, color=COLOUR["after"], fill=True, alpha=0.85)
    if lengths["max_prompt_tokens"] <= edges[-1]:
        _mark(axes, lengths["max_prompt_tokens"], "down")
    axes.set_title("Prompt length (tokens); the last bar is open-ended", loc="left", fontsize=9.5)
    axes.set_xlim(left=0)
    axes.set_ylabel("prompts")
    return svg_of(figure, "Prompt lengths in tokens")


def accuracy_plots(comparison: Comparison) -> list[str]:
    """Both accuracies with 95 % intervals: overall and by level, then by subject if any."""
    sides = ((side.accuracy, side.interval) for side in (comparison.before, comparison.after))
    groups = {"level": {f"all\nn = {comparison.n}": tuple(sides)}, "subject": {}}
    for field, found in comparison.groups.items():
        for key, x in found.items():
            name = _wrapped(f"level {key}" if field == "level" else key)
            accuracies = (x.before, x.before_interval), (x.after, x.after_interval)
            groups[field][f"{name}\nn = {x.n}"] = accuracies
    return [
        _grouped_bars(
            list(bars),
            dict(zip(("before", "after"), zip(*bars.values(), strict=True), strict=True)),
            f"Accuracy before and after, by {field}",
        )
        for field, bars in groups.items()
        if bars
    ]


def length_plot(comparison: Comparison) -> str:
    """Histograms of both response lengths over common bins."""
    lengths = comparison.lengths
    figure, axes = _new_figure(width=5.2, height=2.6)
    for side in ("before", "after"):
        counts, edges, colour = lengths.histogram[side], lengths.edges, COLOUR[side]
        axes.stairs(counts, edges, color=colour, linewidth=1.6, label=side)
        axes.stairs(counts, edges, color=colour, fill=True, alpha=0.18)
        _mark(axes, lengths.quantiles[side]["50"], side)
    axes.set_title(f"Response length ({lengths.unit}); medians dashed", loc="left", fontsize=9.5)
    axes.set_xlim(left=0)
    axes.set_ylabel("responses")
    _legend(axes)
    return svg_of(figure, "Response lengths before and after")


def limit_plot(comparison: Comparison) -> str:
    """Both accuracies under lower token limits, simulated by truncating the responses."""
    figure, axes = _new_figure(width=5.2, height=2.6)
    limits = [sides[0].max_tokens for sides in comparison.by_limit]
    for number, side in enumerate(("before", "after")):
        accuracies = [100 * sides[number].accuracy for sides in comparison.by_limit]
        axes.plot(limits, accuracies, color=COLOUR[side], label=side, marker="o", markersize=3.5)
    axes.set_xscale("log", base=2)
    axes.set_xticks(limits, [f"{limit:,}" for limit in limits])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_ylabel("accuracy (%)")
    axes.set_xlabel("token limit, simulated by truncating this run's responses")
    _legend_above(axes, ncols=2)
    return svg_of(figure, "Accuracy by token limit")


def gain_plot(comparison: Comparison) -> str:
    """The difference and its components, in points with 95 % intervals."""
    parts = {name: comparison.gain[name] for name in ("content", "format")}
    rows = {"difference": (comparison.difference, comparison.ci95)}
    rows |= {name: (part.difference, part.ci95) for name, part in parts.items()}
    colours = [
        "up" if low > 0 else "down" if high < 0 else "soft" for _, (low, high) in rows.values()
    ]
    return _interval_plot(
        rows, colours, "Components of the difference (points), 95 % intervals", (5.2, 2.6)
    )


def transition_plot(comparison: Comparison) -> str:
    """Transitions: one bar per verdict before, split by verdict after."""
    figure, axes = _new_figure(width=7.6, height=2.4)
    names = list(comparison.transitions)
    starts, places = [0.0] * len(names), range(len(names))
    for outcome, colour in zip(names, ("up", "down", "before", "third"), strict=True):
        counts = [comparison.transitions[name][outcome] for name in names]
        label = f"{outcome.replace('_', ' ')} after"
        axes.barh(places, counts, left=starts, height=0.62, color=COLOUR[colour], label=label)
        starts = [start + count for start, count in zip(starts, counts, strict=True)]
    axes.set_yticks(places, [f"{name.replace('_', ' ')} before" for name in names])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("items")
    _legend_above(axes, ncols=4)
    return svg_of(figure, "Verdicts after, by verdict before")


def history_plot(labels: Sequence[str], points: Sequence[Accuracy]) -> str:
    """Accuracies with 95 % intervals over runs."""
    figure, axes = _new_figure(width=7.6, height=3.0)
    places = list(range(len(points)))
    _accuracy_line(axes, places, points, "after", "accuracy, 95 % interval")
    step = -(-len(labels) // 8)
    axes.set_xticks(places[::step], [plain(label) for label in labels[::step]])
    axes.set_ylabel("accuracy (%)")
    _legend_above(axes, ncols=2)
    return svg_of(figure, "Accuracy over runs")


def suite_plots(report: Mapping[str, Any]) -> list[str]:
    """Plots of a suite: each benchmark's change and, with baselines, every model's accuracy."""
    rows, pooled = report["benchmarks"], report["pooled"]
    names = [row["name"] for row in rows]
    changes = {
        row["name"]: (row["difference"], row["ci95"])
        for row in [*rows, {**pooled, "name": "pooled"}]
    }
    colours = [*(row["direction"] or "soft" for row in rows), "ink"]
    size = (7.6, 1.3 + 0.3 * len(changes))
    plots = [_interval_plot(changes, colours, "After minus before (points), 95 % intervals", size)]
    models = {
        side: [(row[side], row[f"{side}_interval"]) for row in rows] for side in ("before", "after")
    }
    for baseline in report["baselines"]:
        found = {
            row["name"]: row for row in baseline.get("after", {"benchmarks": []})["benchmarks"]
        }
        unknown = (float("nan"), (float("nan"), float("nan")))
        models[baseline["name"]] = [
            (found[name]["before"], found[name]["before_interval"]) if name in found else unknown
            for name in names
        ]
    if not report["baselines"]:
        return plots
    return [
        *plots,
        _grouped_bars([_wrapped(name) for name in names], models, "Accuracy of every model"),
    ]


def _interval_plot(
    rows: Mapping[str, tuple[float, Sequence[float]]],
    colours: Sequence[str],
    title: str,
    size: tuple[float, float],
) -> str:
    """One row per name: a difference in points and its interval."""
    figure, axes = _new_figure(*size)
    for row, ((difference, interval), colour) in enumerate(
        zip(rows.values(), colours, strict=True)
    ):
        axes.plot(
            [100 * bound for bound in interval], [row, row], color=COLOUR[colour], linewidth=1.6
        )
        marker = "D" if colour == "ink" else "o"
        axes.plot([100 * difference], [row], color=COLOUR[colour], marker=marker, markersize=6)
    axes.axvline(0, color=COLOUR["ink"], linewidth=0.8)
    axes.set_yticks(range(len(rows)), [plain(name) for name in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x", color=COLOUR["line"], linewidth=0.8)
    axes.set_title(title, loc="left", fontsize=9.5)
    return svg_of(figure, title)


def checkpoint_plot(curve: Mapping[str, Any]) -> str:
    """Accuracy over training steps: pooled with 95 % intervals, and a line per benchmark."""
    figure, axes = _new_figure(width=7.6, height=3.2)
    steps, pooled = curve["steps"], curve["pooled"]
    points = [(share["accuracy"], share["interval"]) for share in pooled]
    several = len(curve["benchmarks"]) > 1
    label = "pooled" if several else "accuracy, 95 % interval"
    _accuracy_line(axes, steps, points, "ink", label)
    lines = curve["benchmarks"].items() if several else ()
    for (name, shares), colour in zip(lines, itertools.cycle(_LINE_COLOURS), strict=False):
        accuracies = [100 * share["accuracy"] for share in shares]
        axes.plot(steps, accuracies, color=colour, linewidth=1.2, marker=".", label=plain(name))
    if curve["best"] is not None:
        _mark(axes, curve["best"]["step"], "soft", label="best")
    axes.set_xticks(steps)
    axes.set_xlabel("training step")
    axes.set_ylabel("accuracy (%)")
    _legend_above(axes, ncols=5)
    return svg_of(figure, "Accuracy over training steps")


def _grouped_bars(
    names: Sequence[str], series_of: Mapping[str, Sequence[Accuracy]], label: str
) -> str:
    """One group of bars per name and one bar per series, each an (accuracy, 95 % interval)."""
    figure, axes = _new_figure(width=7.6, height=2.9)
    others = (COLOUR[name] for name in ("third", "fourth", "fifth", "soft"))
    width = 0.76 / len(series_of)
    for number, (name, results) in enumerate(series_of.items()):
        axes.bar(
            [place + width * (number - (len(series_of) - 1) / 2) for place in range(len(names))],
            [100 * accuracy for accuracy, _ in results],
            width=0.95 * width,
            color=COLOUR[name] if name in ("before", "after") else next(others, COLOUR["line"]),
            label=plain(name),
            yerr=_errors(results),
            error_kw={"ecolor": COLOUR["ink"], "elinewidth": 1, "capsize": 2},
        )
    axes.set_xticks(range(len(names)), [plain(name) for name in names])
    axes.set_ylim(0, 100)
    axes.set_ylabel("accuracy (%)")
    _legend_above(axes, ncols=4)
    return svg_of(figure, label)


def _curve_plot(title: str, curves: Mapping[str, tuple[list[int], list[float]]]) -> str:
    from matplotlib.ticker import MaxNLocator

    figure, axes = _new_figure(width=3.7, height=2.3)
    axes.set_title(title, loc="left", fontsize=9.5)
    for (label, (steps, values)), colour in zip(curves.items(), _LINE_COLOURS, strict=False):
        marker = "o" if len(steps) < _MARKED_BELOW else None
        axes.plot(
            steps, values, color=colour, label=label, linewidth=1.5, marker=marker, markersize=3
        )
    room = 0.16 * ((len(curves) + 1) // 2)  # for the legend above the curves
    if title in _LOGARITHMIC and any(
        value > 0 for _, values in curves.values() for value in values
    ):
        axes.set_yscale("log", nonpositive="mask")
        bottom, top = axes.get_ylim()
        axes.set_ylim(top=top * (top / bottom) ** room)
        _legend(axes)
    else:
        if title not in _SIGNED:
            axes.set_ylim(bottom=0)
        if len(curves) > 1:
            bottom, top = axes.get_ylim()
            axes.set_ylim(top=top + (top - bottom) * room)
            _legend(axes)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.set_xlabel("step")
    return svg_of(figure, title)


def _legend(axes: Axes) -> None:
    """Put a legend in the upper right corner."""
    axes.legend(frameon=False, fontsize=7.5, ncols=2, loc="upper right", borderaxespad=0)


def _legend_above(axes: Axes, ncols: int) -> None:
    """Put a legend above the axes."""
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0}
    axes.legend(frameon=False, fontsize=8, ncols=ncols, **place)


def plain(text: str) -> str:
    """Escape dollar signs, which matplotlib would read as math mode."""
    return text.replace("$", r"\$")


def _wrapped(text: str) -> str:
    """Wrap the text to at most three short lines."""
    return "\n".join(textwrap.wrap(text, 14, max_lines=3, placeholder=" ...")) or text


def _new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of this size in inches, with axes styled like the page."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    style_axes(axes, COLOUR)
    return figure, axes


def style_axes(axes: Axes, colour: Mapping[str, str]) -> None:
    """Style axes like the page, in the given colours."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(colour["line"])
    axes.grid(axis="y", color=colour["line"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, colors=colour["soft"], length=0)
    axes.xaxis.label.set_fontsize(8)
    axes.yaxis.label.set_fontsize(8)


def svg_of(figure: Figure, label: str) -> str:
    """The figure's <svg> element, labelled for screen readers. Equal data give equal bytes."""
    import matplotlib

    buffer = io.StringIO()
    with (
        matplotlib.rc_context(
            {"svg.fonttype": "none", "svg.hashsalt": "report", "font.family": "sans-serif"}
        ),
        warnings.catch_warnings(),
    ):
        # The browser's font draws the text and may have glyphs that matplotlib's lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    drawing = buffer.getvalue()
    drawing = re.sub(
        r"<metadata>.*?</metadata>", "", drawing[drawing.index("<svg") :], flags=re.DOTALL
    )
    # ids repeat across the page's figures
    drawing = re.sub(r' id="[A-Za-z.0-9]+_\d+"', "", drawing)
    drawing = re.sub(
        "|".join(_PAGE_COLOURS), lambda match: f"var({_PAGE_COLOURS[match.group()]})", drawing
    )
    return drawing.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)


def _mark(axes: Axes, place: float, colour: str, label: str | None = None) -> None:
    """Draw a dashed vertical line."""
    style: dict[str, Any] = {"color": COLOUR[colour], "linewidth": 1, "linestyle": (0, (4, 3))}
    axes.axvline(place, label=label, **style)


def _accuracy_line(
    axes: Axes, places: Sequence[int], points: Sequence[Accuracy], colour: str, label: str
) -> None:
    """Draw accuracies in percent with their 95 % intervals."""
    accuracies = [100 * accuracy for accuracy, _ in points]
    line: dict[str, Any] = {"color": COLOUR[colour], "linewidth": 1.6, "marker": "o"}
    bars: dict[str, Any] = {"ecolor": COLOUR["soft"], "elinewidth": 1, "capsize": 2.5}
    axes.errorbar(places, accuracies, _errors(points), label=label, markersize=4, **line, **bars)


def _errors(points: Sequence[Accuracy]) -> list[list[float]]:
    """Lengths of the error bars below and above each point, in percent."""
    return [
        [100 * max(0.0, accuracy - low) for accuracy, (low, _) in points],
        [100 * max(0.0, high - accuracy) for accuracy, (_, high) in points],
    ]
