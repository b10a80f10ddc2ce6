"""Plots of a suite's front page, of the checkpoints along the way, and of token limits."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from eval.figures import COLOUR, errors, legend_above, new_figure, plain, svg_of, wrapped


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
