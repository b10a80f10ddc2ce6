"""Timelines of simulated training steps: what ranks do, and how many slots decode."""

from __future__ import annotations

import io
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from eval.report.pages import TEMPLATES, render
from eval.report.plots import COLOUR, plain, style_axes, svg_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Span = tuple[str, float, float]  # phase, start, end
Timeline = tuple[Sequence[Span], Sequence[tuple[float, float]]]  # and share of slots from a time on
NUM_SHOWN = 4  # steps
NUM_POINTS = 600
_PHASES = {  # name -> colour, label
    "generate": ("line", "ranks wait for the draw"),
    "anchor": ("third", "old log-probs"),
    "update": ("after", "update"),
    "publish": ("up", "weights"),
    "other": ("fourth", "other"),
}


def render_timelines(
    content: Mapping[str, Any], names: Sequence[str], timelines: Mapping[str, Timeline]
) -> str:
    """Return the page of a simulation: verdict, timelines, and a row per alternative."""
    svg = svg_of(_draw(timelines, COLOUR), "Timelines of simulated steps")
    return render("simulation.html.j2", content=content, names=names, drawing=Markup(svg))


def timeline_png(timelines: Mapping[str, Timeline]) -> bytes:
    """Return the timelines as a picture, in the page's light colours."""
    light = (TEMPLATES / "page.css").read_text(encoding="utf-8").partition("@media")[0]
    buffer = io.BytesIO()
    figure = _draw(timelines, dict(re.findall(r"--(\w+): (#\w+)", light)))
    figure.savefig(buffer, format="png", dpi=130, metadata={"Software": None})
    return buffer.getvalue()


def _draw(timelines: Mapping[str, Timeline], colour: Mapping[str, str]) -> Figure:
    """Draw the last steps of each timeline, all over the same number of seconds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 2.3 * len(timelines) + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    heights = [1, 4] * len(timelines)
    panels = figure.subplots(2 * len(timelines), sharex=True, height_ratios=heights, squeeze=False)
    longest = 0.0
    for number, (name, (spans, occupied)) in enumerate(timelines.items()):
        shown = spans[-len(_PHASES) * NUM_SHOWN :]
        start, end = shown[0][1], shown[-1][2]
        longest = max(longest, end - start)
        ranks, slots = panels[2 * number, 0], panels[2 * number + 1, 0]
        style_axes(ranks, colour)
        style_axes(slots, colour)
        for phase, (shade, label) in _PHASES.items():
            bars = [(first - start, last - first) for one, first, last in shown if one == phase]
            ranks.broken_barh(bars, (0, 1), facecolors=colour[shade], label=label)
        ranks.set_title(plain(name), loc="left", fontsize=8.5)
        ranks.set_yticks([0.5], ["ranks"])
        ranks.grid(visible=False)
        times = [time for time, _ in occupied]
        grid = [start + (end - start) * place / NUM_POINTS for place in range(NUM_POINTS)]
        shares = [100 * occupied[max(bisect_right(times, time) - 1, 0)][1] for time in grid]
        places = [time - start for time in grid]
        slots.fill_between(places, shares, step="post", color=colour["after"], alpha=0.35)
        slots.set_ylim(bottom=0)
        slots.set_ylabel("slots (%)")
    panels[-1, 0].set_xlim(0, longest)
    panels[-1, 0].set_xlabel("seconds")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=5, frameon=False, fontsize=8)
    return figure
