r"""Renders untrusted model output as escaped HTML, with LaTeX as MathML.

latex2mathml copies \text{<script>}, \href and \style to its output, so only known elements and
attributes are kept. Formulas that cannot be converted stay as text.
"""

from __future__ import annotations

import html
import re
from xml.etree.ElementTree import Element

from markupsafe import Markup

MAX_FORMULA_CHARS = 1000
MAX_MATHML_CHARS = 20_000
_BOX = r"\\boxed\s?\{(?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}){1,400}\}"
_FORMULA = re.compile(
    r"\$\$(?P<dollars>[^$]{1,1000})\$\$"
    r"|\\\[(?P<brackets>.{1,1000}?)\\\]"
    r"|\\\((?P<parentheses>[^\n]{1,1000}?)\\\)"
    r"|(?<![\\$\w])\$(?![\s$])(?P<inline>[^$\n]{1,1000}?)(?<![\s\\])\$(?![\w$])"
    r"|(?P<environment>\\begin\{(?P<name>(?:align|equation|gather)\*?)\}"
    r".{1,1000}?\\end\{(?P=name)\})"
    rf"|(?P<box>{_BOX})",
    re.DOTALL,
)
_DEFINES = re.compile(
    r"\\(?:def|edef|gdef|let|(?:re|provide)?newcommand|providecommand|DeclareMathOperator)(?![a-z])"
)
_ELEMENTS = frozenset(
    "math mrow mi mn mo mtext mspace msup msub msubsup mfrac msqrt mroot mover munder munderover "
    "mtable mtr mtd mstyle mpadded mphantom menclose".split()
)
_ATTRIBUTES = {
    "display": re.compile("block|inline"),
    "displaystyle": re.compile("true|false"),
    "stretchy": re.compile("true|false"),
    "mathvariant": re.compile("normal"),
    "linethickness": re.compile("0"),
    "width": re.compile(r"\d?(?:\.\d{1,3})?em"),
    "minsize": re.compile(r"\d(?:\.\d{1,3})?em"),
    "maxsize": re.compile(r"\d(?:\.\d{1,3})?em"),
}


class Formulas:
    """Renders texts, converting at most `max_formulas` different formulas to bound the time."""

    def __init__(self, max_formulas: int) -> None:
        self._converted: dict[tuple[str, bool], str | None] = {}
        self._max_formulas = max_formulas

    def render(self, text: str) -> Markup:
        """Convert a text to HTML: formulas to MathML with their source, the rest escaped."""
        pieces: list[str] = []
        position = 0
        for match in _FORMULA.finditer(text):
            name = str(match.lastgroup if match.lastgroup != "name" else "environment")
            is_block = name in ("dollars", "brackets", "environment")
            formula = self._convert(match.group(name), is_block)
            if formula is not None:
                pieces += [html.escape(text[position : match.start()]), formula]
                position = match.end()
        return Markup("".join([*pieces, html.escape(text[position:])]))

    def _convert(self, latex: str, is_block: bool) -> str | None:
        key = latex, is_block
        if key not in self._converted and len(self._converted) < self._max_formulas:
            self._converted[key] = mathml(latex, is_block)
        return self._converted.get(key)


def mathml(latex: str, is_block: bool = False) -> str | None:
    """Convert a formula to a <math> element of known elements and attributes; None if that fails.

    Macro definitions are refused, because a few of them can expand to gigabytes.
    """
    if len(latex) > MAX_FORMULA_CHARS or _DEFINES.search(latex):
        return None
    try:
        from latex2mathml.converter import convert_to_element

        element = convert_to_element(latex, display="block" if is_block else "inline")
        content = "".join(_markup(child) for child in element)
    except Exception:  # noqa: BLE001 - the converter may raise anything on untrusted text
        return None
    if len(content) > MAX_MATHML_CHARS:
        return None
    display = ' display="block"' if is_block else ""
    source = html.escape(latex)
    return (
        f"<math{display}><semantics><mrow>{content}</mrow>"
        f'<annotation encoding="application/x-tex">{source}</annotation></semantics></math>'
    )


def _markup(element: Element) -> str:
    """Serialise an element. Raises ValueError for unknown elements and commands."""
    name = element.tag
    text = html.unescape(element.text or "")
    if name not in _ELEMENTS or text.startswith("\\") or (element.tail or "").strip():
        raise ValueError(name)
    attributes = "".join(
        f' {key}="{value}"'
        for key, value in element.attrib.items()
        if key in _ATTRIBUTES and _ATTRIBUTES[key].fullmatch(value)
    )
    if name == "menclose":  # browsers do not render it
        is_box = element.get("notation") == "box"
        name, attributes = "mrow", ' class="boxed"' if is_box else ""
    content = html.escape(text) + "".join(map(_markup, element))
    return f"<{name}{attributes}>{content}</{name}>"
