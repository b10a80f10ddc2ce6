"""matplotlib figures as SVG text in the page's light and dark colours."""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

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


def legend(axes: Axes) -> None:
    """Put a legend in the upper right corner."""
    axes.legend(frameon=False, fontsize=7.5, ncols=2, loc="upper right", borderaxespad=0)


def legend_above(axes: Axes, ncols: int) -> None:
    """Put a legend above the axes."""
    axes.legend(
        frameon=False,
        fontsize=8,
        ncols=ncols,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        borderaxespad=0,
    )


def plain(text: str) -> str:
    """Escape dollar signs, which matplotlib would read as math mode."""
    return text.replace("$", r"\$")


def wrapped(text: str) -> str:
    """Wrap the text to at most three short lines."""
    return "\n".join(textwrap.wrap(text, 14, max_lines=3, placeholder=" ...")) or text


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of this size in inches, with axes styled like the page."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(COLOUR["line"])
    axes.grid(axis="y", color=COLOUR["line"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, colors=COLOUR["soft"], length=0)
    axes.xaxis.label.set_fontsize(8)
    axes.yaxis.label.set_fontsize(8)
    return figure, axes


def svg_of(figure: Figure, label: str) -> str:
    """The figure's <svg> element, labelled for screen readers. Equal data give equal bytes."""
    import matplotlib
    from markupsafe import escape

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


def errors(points: Sequence[tuple[float, tuple[float, float]]]) -> list[list[float]]:
    """Lengths of the error bars below and above each point, in percent."""
    return [
        [100 * max(0.0, accuracy - low) for accuracy, (low, _) in points],
        [100 * max(0.0, high - accuracy) for accuracy, (_, high) in points],
    ]
