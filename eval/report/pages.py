"""Template rendering: number formats, Markdown tables, HTML pages with one bundled script."""

from __future__ import annotations

import base64
import hashlib
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from eval.report.training import usage_lines

TEMPLATES = Path(__file__).parent / "templates"
MARKDOWN_WIDTH = 100
_MAX_CELL_CHARS = 17
_MAX_ID_CHARS = 24


def render(template: str, **values: Any) -> str:
    """Render a template. An .html.j2 escapes every value that is not Markup."""
    is_html = template.endswith(".html.j2")
    return _environment(is_html).get_template(template).render(**values)


def inline_script(name: str) -> tuple[Markup, str]:
    """(script as Markup, its hash for the page's Content-Security-Policy)."""
    text = (TEMPLATES / name).read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return Markup(text), f"sha256-{digest}"


def markup(plots: Mapping[str, Sequence[str]]) -> dict[str, list[Markup]]:
    """Mark drawings as HTML; matplotlib escapes the texts in its SVG."""
    return {name: [Markup(plot) for plot in drawn] for name, drawn in plots.items()}


def field_of(content: Mapping[str, Any]) -> Callable[..., Markup]:
    """Return `field(form, *keys)`, which formats the value at these keys of `content` as a <span>.

    The span's data-field holds the path of keys, so tests can check the page against the JSON.
    """

    def field(form: str, *keys: str) -> Markup:
        value: Any = content
        for key in keys:
            value = value[int(key)] if isinstance(value, (list, tuple)) else value[key]
        path = "/".join(key.replace("/", "~1") for key in keys)
        return Markup('<span data-field="{}" data-form="{}">{}</span>').format(
            path, form, escape(FORMS[form](value))
        )

    return field


def percent(share: float | None) -> str:
    """A share as "81.8 %"; "none" for a share of nothing."""
    return "none" if share is None else f"{100 * share:.1f} %"


def points(share: float) -> str:
    """A difference of shares in signed percentage points; never "-0.0"."""
    return f"{round(100 * share, 1) + 0.0:+.1f}"


def format_p(p: float) -> str:
    """A p-value with its relation sign, e.g. "= 0.0051" or "< 0.0001"."""
    return "< 0.0001" if p < 0.0001 else f"= {p:.2g}" if p < 0.995 else "= 1"


def plain_p(p: float) -> str:
    """A p-value for a table: "0.0051" or "< 0.0001"."""
    return format_p(p).removeprefix("= ")


def format_duration(seconds: float | None) -> str:
    """A duration as "0.4 s", "12 s", "3 min 05 s" or "2 h 10 min"."""
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


def interval(bounds: Sequence[float]) -> str:
    """An interval of shares, in percent."""
    return f"{100 * bounds[0]:.1f} to {100 * bounds[1]:.1f}"


def points_interval(bounds: Sequence[float]) -> str:
    """An interval of differences, in signed percentage points."""
    return f"{points(bounds[0])} to {points(bounds[1])}"


def count(number: float | None) -> str:
    """A count with thousands separators; small fractions keep one decimal."""
    if number is None:
        return "unknown"
    return f"{number:,.0f}" if number == int(number) or number >= 100 else f"{number:,.1f}"


FORMS: dict[str, Callable[[Any], str]] = {
    "percent": percent,
    "points": points,
    "interval": interval,
    "points_interval": points_interval,
    "p_value": format_p,
    "plain_p": plain_p,
    "size": lambda share: f"{100 * share:.1f}",
    "count": count,
    "seconds": lambda seconds: f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms",
    "text": str,
}


@cache
def _environment(is_html: bool) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=is_html,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= FORMS
    environment.filters |= {
        "duration": format_duration,
        "measure": measure,
        "best_step": best_step,
        "zip": zip,
        "verdict_name": lambda verdict: verdict.replace("_", " "),
        "cell": _cell,
        "id_cell": _id_cell,
        "tail_cell": lambda text: _cell(" ".join(text.split())[-_MAX_CELL_CHARS:]),
        "plain_cell": _plain_cell,
        "answer_cell": _answer_cell,
        "paragraph": _paragraph,
        "usage_lines": usage_lines,
        "line": lambda text: " ".join(str(text).split()),
    }
    environment.globals["markdown_table"] = _markdown_table
    return environment


def best_step(curve: Mapping[str, Any]) -> str:
    """Sentences on the best checkpoint of a curve and the problems it was chosen on."""
    best = curve["best"]
    if best is None:
        return "There are too few problems to choose a best step."
    chosen = (
        f"The best of {len(curve['steps'])} steps is {best['step']}, chosen on "
        f"{best['num_chosen_on']} of the problems ({percent(best['chosen_on'])} there). On the "
        f"other {best['num_reported_on']} it has {percent(best['reported']['accuracy'])} (95 % "
        f"interval {interval(best['reported']['interval'])})"
    )
    if best["step"] == best["last_step"]:
        return f"{chosen}. It is the last step."
    change = best["change"]
    against = (
        f"{points(change['difference'])} points (95 % interval {points_interval(change['ci95'])}"
    )
    return (
        f"{chosen}, {against}, p {format_p(change['p'])}) against the last step, "
        f"{best['last_step']}."
    )


def measure(value: float | None, unit: str) -> str:
    """A percentage or token count as "81.8 %" or "1,024"; "unknown" for None."""
    return "unknown" if value is None else f"{value:.1f} %" if unit == "%" else count(round(value))


def _cell(text: Any, width: int = _MAX_CELL_CHARS) -> str:
    """Untrusted text as a one-line code span that cannot break a Markdown table."""
    line = " ".join(str(text).split()).replace("`", "'")
    if len(line) > width:
        line = line[: width - 3] + "..."
    return f"`{line}`".replace("|", "\\|") if line else "-"


def _id_cell(identity: str) -> str:
    """Id of an item or run. Long ids are cut at the front, because their ends distinguish them."""
    short = identity if len(identity) <= _MAX_ID_CHARS else "..." + identity[3 - _MAX_ID_CHARS :]
    return "`" + " ".join(short.split()).replace("`", "'").replace("|", "\\|") + "`"


def _plain_cell(text: Any) -> str:
    """A group's name, as a code span if it is long or contains Markdown characters."""
    text = str(text)
    is_plain = (
        all(char.isalnum() or char in " &-_.,:/↓" for char in text)
        and len(text) <= 1.5 * _MAX_CELL_CHARS
    )
    return text if is_plain else _cell(text)


def _answer_cell(side: Mapping[str, Any]) -> str:
    """The answer of a flip's side, or its verdict if there is no answer."""
    return side["verdict"].replace("_", " ") if side["answer"] is None else _cell(side["answer"])


def _paragraph(text: str, indent: str = "") -> str:
    """Wrap a paragraph at MARKDOWN_WIDTH columns."""
    return textwrap.fill(
        text,
        MARKDOWN_WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table with padded columns: the first left-aligned, the others right-aligned."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(header))]
    lines = [
        "| "
        + " | ".join(
            c.rjust(w) if i else c.ljust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        + " |"
        for row in cells
    ]
    rule = "|" + "|".join("-" * (w + 1) + (":" if i else "-") for i, w in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])
