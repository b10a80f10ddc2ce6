"""Plots of the report as SVG text for an HTML page, in the page's light and dark colours."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from eval.compare import Comparison, GroupResult, Side
from eval.figures import COLOUR, errors, legend, legend_above, new_figure, plain, svg_of, wrapped
from eval.training import Steps, series, with_kept_share

_LINE_COLOURS = tuple(COLOUR[name] for name in ("after", "third", "up", "fourth", "down", "fifth"))
MAX_SIDES = len(_LINE_COLOURS)
Plots = dict[str, list[str]]
_MARKED_BELOW = 12  # a curve with fewer points gets markers


CURVE_PLOTS: dict[str, dict[str, str]] = {  # title -> {metric: label}
    "Reward per response": {"critic/rewards/mean": "reward", "critic/score/mean": "score alone"},
    "Accuracy (share)": {
        "validation/accuracy": "held-out",
        "sampler/accuracy": "all sampled",
        "reward/right_ratio": "trained on",
    },
    "Without a finished answer (share)": {
        "reward/no_answer_ratio": "no answer",
        "response_length/clip_ratio": "truncated",
    },
    "Policy entropy": {"actor/entropy": "entropy"},
    "Response length (tokens)": {"response_length/mean": "mean", "validation/response_length/mean": "held-out"},
    "Clipped tokens (share)": {"actor/pg_clipfrac": "clipped", "actor/pg_clipfrac_lower": "dual clip"},
    "Gradient norm": {"actor/grad_norm": "before clipping"},
    "Dynamic sampling (share)": {"sampler/kept_share": "groups kept", "sampler/waste_ratio": "tokens wasted"},
    "Seconds per step": {
        "timing_s/gen": "generate",
        "timing_s/update_actor": "update",
        "timing_s/old_log_prob": "old log-probs",
        "timing_s/weight_sync": "weight sync",
        "timing_s/save_checkpoint": "checkpoint",
        "timing_s/testing": "validation",
    },
}
SIDE_PLOTS: dict[str, tuple[str, ...]] = {  # title -> metrics, of which the first that a training has is drawn
    "Reward per response": ("critic/rewards/mean", "critic/score/mean"),
    "Response length (tokens)": ("response_length/mean",),
    "Policy entropy": ("actor/entropy",),
    "Throughput (tokens per second and device)": ("perf/throughput",),
}
_BY_SET = {  # title -> the metric of a set
    "Score by set": re.compile("train-core/(.+)/score/mean"),
    "Accuracy by set, all sampled (share)": re.compile("train-core/(.+)/acc/mean"),
    "Accuracy by set, held-out (share)": re.compile("val-core/(.+)/acc/mean@[0-9]+"),
}
_SIGNED = ("Reward per response", "Score by set")  # the other plots start at zero


def draw_plots(comparison: Comparison, steps: Steps) -> Plots:
    """All plots of a report: SVGs under "accuracy", "gain", "transition", "length" and "training"."""
    return {
        "accuracy": accuracy_plots(comparison.before, comparison.after),
        "gain": [gain_plot(comparison)],
        "transition": [transition_plot(comparison)],
        "length": [length_plot(comparison)],
        "limit": [limit_plot(comparison)] if comparison.by_limit else [],
        "training": training_plots(steps),
    }


def training_plots(steps: Steps) -> list[str]:
    """SVGs of the curves that the steps have values for; those of each set where there are several."""
    steps = with_kept_share(steps)
    plots = []
    for title, labels in {**CURVE_PLOTS, **_plots_by_set(steps)}.items():
        curves = {label: series(steps, key) for key, label in labels.items()}
        curves = {label: curve for label, curve in curves.items() if curve[0]}
        if curves:
            plots.append(_curve_svg(title, curves))
    return plots


def side_plots(sides: Mapping[str, Steps]) -> list[str]:
    """SVGs of reward, length, entropy and throughput with a line for each training, at most MAX_SIDES of them."""
    plots = []
    for title, keys in SIDE_PLOTS.items():
        found = {
            label: [curve for key in keys if (curve := series(steps, key))[0]] for label, steps in sides.items()
        }
        # A place for every side, so that each has its colour in all plots.
        curves = {plain(label): curves[0] if curves else ([], []) for label, curves in found.items()}
        if any(found.values()):
            plots.append(_curve_svg(title, curves))
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
    """SVG of the histogram of a data card's prompt lengths; a line marks the longest prompt allowed."""
    figure, axes = new_figure(width=5.2, height=2.6)
    edges, counts = list(lengths["edges"]), lengths["counts"]
    if len(edges) > 2:
        edges[-1] = 2 * edges[-2] - edges[-3]  # the last bin holds all that is longer: as wide as the others
    axes.stairs(counts, edges, color=COLOUR["after"], fill=True, alpha=0.85)
    if lengths["max_prompt_tokens"] <= edges[-1]:
        axes.axvline(lengths["max_prompt_tokens"], color=COLOUR["down"], linewidth=1, linestyle=(0, (4, 3)))
    axes.set_title("Prompt length (tokens); the last bar is open", loc="left", fontsize=9.5)
    axes.set_xlim(left=0)
    axes.set_ylabel("prompts")
    return svg_of(figure, "Prompt lengths in tokens")


def accuracy_plots(before: Side, after: Side) -> list[str]:
    """SVGs of both accuracies with 95 % intervals: overall and by level, and by subject if there are subjects."""
    levels = [(f"level {key}", x, after.by_level[key]) for key, x in before.by_level.items()]
    subjects = [(key, x, after.by_subject[key]) for key, x in before.by_subject.items()]
    plots = [_bars([("all", before, after), *levels], "Accuracy before and after, by level")]
    return [*plots, _bars(subjects, "Accuracy before and after, by subject")] if subjects else plots


def length_plot(comparison: Comparison) -> str:
    """SVG of both length distributions, drawn as outlines over common bins."""
    lengths = comparison.lengths
    figure, axes = new_figure(width=5.2, height=2.6)
    for side in ("before", "after"):
        axes.stairs(lengths.histogram[side], lengths.edges, color=COLOUR[side], linewidth=1.6, label=side)
        axes.stairs(lengths.histogram[side], lengths.edges, color=COLOUR[side], fill=True, alpha=0.18)
        axes.axvline(lengths.quantiles[side]["50"], color=COLOUR[side], linewidth=1, linestyle=(0, (4, 3)))
    axes.set_title(f"Response length ({lengths.unit}); medians dashed", loc="left", fontsize=9.5)
    axes.set_xlim(left=0)
    axes.set_ylabel("responses")
    legend(axes)
    return svg_of(figure, "Response lengths before and after")


def limit_plot(comparison: Comparison) -> str:
    """SVG of both accuracies under lower token limits, computed by cutting."""
    figure, axes = new_figure(width=5.2, height=2.6)
    limits = [sides[0].max_tokens for sides in comparison.by_limit]
    for number, side in enumerate(("before", "after")):
        accuracies = [100 * sides[number].accuracy for sides in comparison.by_limit]
        axes.plot(limits, accuracies, color=COLOUR[side], linewidth=1.5, marker="o", markersize=3.5, label=side)
    axes.set_xscale("log", base=2)
    axes.set_xticks(limits, [f"{limit:,}" for limit in limits])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_ylabel("accuracy (%)")
    axes.set_xlabel("token limit, by cutting this run's responses")
    legend_above(axes, ncols=2)
    return svg_of(figure, "Accuracy by token limit")


def gain_plot(comparison: Comparison) -> str:
    """SVG of the difference and its parts, in points with 95 % intervals."""
    parts = [
        ("difference", comparison.difference, comparison.ci95),
        *(
            (name, part.difference, part.ci95)
            for name, part in comparison.gain.items()
            if name in ("content", "format")
        ),
    ]
    figure, axes = new_figure(width=5.2, height=2.6)
    for row, (_, value, (low, high)) in enumerate(reversed(parts)):
        axes.barh(row, 100 * value, height=0.55, color=COLOUR["up" if value >= 0 else "down"], alpha=0.85)
        axes.plot(
            [100 * low, 100 * high], [row, row], color=COLOUR["ink"], linewidth=1.2, marker="|", markersize=7
        )
    axes.axvline(0, color=COLOUR["soft"], linewidth=1)
    axes.set_yticks(range(len(parts)), [name for name, *_ in reversed(parts)])
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x", color=COLOUR["line"], linewidth=0.8)
    axes.set_title("Parts of the difference (points)", loc="left", fontsize=9.5)
    return svg_of(figure, "Parts of the difference")


def transition_plot(comparison: Comparison) -> str:
    """SVG of the transitions: one bar per verdict before, split by verdict after."""
    colours = dict(
        zip(comparison.transitions, (COLOUR[x] for x in ("up", "down", "before", "third")), strict=True)
    )
    figure, axes = new_figure(width=7.6, height=2.4)
    names = list(comparison.transitions)
    starts = [0.0] * len(names)
    for outcome in names:
        counts = [comparison.transitions[name][outcome] for name in names]
        axes.barh(
            range(len(names)), counts, left=starts, height=0.62, color=colours[outcome],
            label=f"{outcome.replace('_', ' ')} after",
        )  # fmt: skip
        starts = [start + count for start, count in zip(starts, counts, strict=True)]
    axes.set_yticks(range(len(names)), [f"{name.replace('_', ' ')} before" for name in names])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("items")
    legend_above(axes, ncols=4)
    return svg_of(figure, "Verdicts after, by verdict before")


def history_plot(
    labels: Sequence[str],
    points: Sequence[tuple[float, tuple[float, float]]],
    trend: tuple[float, float] | None,
    changes: Sequence[tuple[int, float, float]] = (),
) -> str:
    """SVG of accuracies with 95 % intervals over runs; `trend` is the line's first and last value.

    `changes` are change points, each as (place, level before, level after).
    """
    figure, axes = new_figure(width=7.6, height=3.0)
    places = list(range(len(points)))
    axes.errorbar(
        places, [100 * accuracy for accuracy, _ in points], yerr=errors(points), color=COLOUR["after"],
        ecolor=COLOUR["soft"], linewidth=1.5, elinewidth=1, capsize=2.5, marker="o", markersize=4,
        label="accuracy, 95 % interval",
    )  # fmt: skip
    if trend is not None:
        line = [100 * value for value in trend]
        axes.plot([0, len(points) - 1], line, color=COLOUR["third"], linewidth=1.2, linestyle="--", label="trend")
    for place, before, after in changes:
        colour = COLOUR["up" if after > before else "down"]
        axes.axvline(place - 0.5, color=colour, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.annotate(
            f"{100 * (after - before):+.1f}",
            (place - 0.4, 0.02),
            xycoords=("data", "axes fraction"),
            color=colour,
            fontsize=8,
        )
    step = -(-len(labels) // 8)
    axes.set_xticks(places[::step], [plain(label) for label in labels[::step]])
    axes.set_ylabel("accuracy (%)")
    legend_above(axes, ncols=2)
    return svg_of(figure, "Accuracy over runs")


def suite_plots(report: Mapping[str, Any]) -> list[str]:
    """SVGs of a suite's report.json: each benchmark's change, and with baselines the accuracies of every model."""
    rows, pooled = report["benchmarks"], report["pooled"]
    names = [row["name"] for row in rows]
    plots = [_change_rows([*names, "pooled"], [*rows, {**pooled, "direction": "pooled"}])]
    models = {side: [(row[side], row[f"{side}_interval"]) for row in rows] for side in ("before", "after")}
    for baseline in report["baselines"]:
        found = {row["name"]: row for row in baseline.get("after", {"benchmarks": []})["benchmarks"]}
        unknown = (float("nan"), (float("nan"), float("nan")))
        models[baseline["name"]] = [
            (found[name]["before"], found[name]["before_interval"]) if name in found else unknown for name in names
        ]
    return [*plots, _model_bars(names, models)] if report["baselines"] else plots


def _change_rows(names: Sequence[str], changes: Sequence[Mapping[str, Any]]) -> str:
    figure, axes = new_figure(width=7.6, height=1.3 + 0.3 * len(names))
    colours = {"up": COLOUR["up"], "down": COLOUR["down"], "pooled": COLOUR["ink"], "": COLOUR["soft"]}
    for row, change in enumerate(changes):
        colour = colours[change["direction"]]
        axes.plot([100 * bound for bound in change["ci95"]], [row, row], color=colour, linewidth=1.6)
        marker = "D" if change["direction"] == "pooled" else "o"
        axes.plot([100 * change["difference"]], [row], color=colour, marker=marker, markersize=6)
    axes.axvline(0, color=COLOUR["ink"], linewidth=0.8)
    axes.set_yticks(range(len(names)), [plain(name) for name in names])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x", color=COLOUR["line"], linewidth=0.8)
    axes.set_title("After minus before (points), 95 % intervals", loc="left", fontsize=9.5)
    return svg_of(figure, "Change of each benchmark")


def _model_bars(names: Sequence[str], models: Mapping[str, Sequence[tuple[float, tuple[float, float]]]]) -> str:
    figure, axes = new_figure(width=7.6, height=2.9)
    others = (COLOUR[name] for name in ("third", "fourth", "fifth", "soft"))
    colours = {"before": COLOUR["before"], "after": COLOUR["after"]}
    width = 0.8 / len(models)
    for number, (model, results) in enumerate(models.items()):
        axes.bar(
            [place + width * (number - (len(models) - 1) / 2) for place in range(len(names))],
            [100 * accuracy for accuracy, _ in results],
            width=0.94 * width,
            color=colours.get(model) or next(others, COLOUR["line"]),
            label=plain(model),
            yerr=errors(results),
            error_kw={"ecolor": COLOUR["ink"], "elinewidth": 1, "capsize": 2},
        )
    axes.set_xticks(range(len(names)), [plain(wrapped(name)) for name in names])
    axes.set_ylim(0, 100)
    axes.set_ylabel("accuracy (%)")
    legend_above(axes, ncols=4)
    return svg_of(figure, "Accuracy of every model")


def checkpoint_plot(curve: Mapping[str, Any]) -> str:
    """SVG of accuracies against training steps: pooled with 95 % intervals, and each benchmark of several."""
    figure, axes = new_figure(width=7.6, height=3.2)
    steps, pooled = curve["steps"], curve["pooled"]
    points = [(share["accuracy"], share["interval"]) for share in pooled]
    several = len(curve["benchmarks"]) > 1
    axes.errorbar(
        steps, [100 * accuracy for accuracy, _ in points], yerr=errors(points), color=COLOUR["ink"],
        ecolor=COLOUR["soft"], linewidth=1.8, elinewidth=1, capsize=2.5, marker="o", markersize=4,
        label="pooled" if several else "accuracy, 95 % interval",
    )  # fmt: skip
    colours = itertools.cycle(COLOUR[name] for name in ("after", "third", "up", "fourth", "down", "fifth"))
    for (name, shares), colour in zip(curve["benchmarks"].items() if several else (), colours, strict=False):
        accuracies = [100 * share["accuracy"] for share in shares]
        axes.plot(steps, accuracies, color=colour, linewidth=1.2, marker=".", label=plain(name))
    if curve["best"] is not None:
        axes.axvline(curve["best"]["step"], color=COLOUR["soft"], linewidth=1, linestyle=(0, (4, 3)), label="best")
    axes.set_xticks(steps)
    axes.set_xlabel("training step")
    axes.set_ylabel("accuracy (%)")
    legend_above(axes, ncols=5)
    return svg_of(figure, "Accuracy against training steps")


def _bars(groups: Sequence[tuple[str, Side | GroupResult, Side | GroupResult]], label: str) -> str:
    figure, axes = new_figure(width=7.6, height=2.9)
    for side, name in enumerate(("before", "after")):
        results = [(x, y)[side] for _, x, y in groups]
        axes.bar(
            [place + 0.38 * (side - 0.5) for place in range(len(groups))],
            [100 * result.accuracy for result in results],
            width=0.36,
            color=COLOUR[name],
            label=name,
            yerr=errors([(result.accuracy, result.interval) for result in results]),
            error_kw={"ecolor": COLOUR["ink"], "elinewidth": 1, "capsize": 2.5},
        )
    names = [f"{plain(wrapped(name))}\nn = {x.n}" for name, x, _ in groups]
    axes.set_xticks(range(len(groups)), names)
    axes.set_ylim(0, 100)
    axes.set_ylabel("accuracy (%)")
    legend_above(axes, ncols=2)
    return svg_of(figure, label)


def _curve_svg(title: str, curves: Mapping[str, tuple[list[int], list[float]]]) -> str:
    from matplotlib.ticker import MaxNLocator

    figure, axes = new_figure(width=3.7, height=2.3)
    axes.set_title(title, loc="left", fontsize=9.5)
    for (label, (steps, values)), colour in zip(curves.items(), _LINE_COLOURS, strict=False):
        marker = "o" if len(steps) < _MARKED_BELOW else None
        axes.plot(steps, values, color=colour, label=label, linewidth=1.5, marker=marker, markersize=3)
    if title not in _SIGNED:
        axes.set_ylim(bottom=0)
    if len(curves) > 1:  # room for the legend above the curves
        bottom, top = axes.get_ylim()
        axes.set_ylim(top=top + (top - bottom) * 0.16 * ((len(curves) + 1) // 2))
        legend(axes)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.set_xlabel("step")
    return svg_of(figure, title)
