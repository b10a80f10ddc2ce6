"""AISBench's string rule for math_prm800k_500_0shot_cot_gen, so that accuracies compare with published ones."""

from __future__ import annotations

import re


def is_equal_aisbench(answer: str, gold: str) -> bool:
    """True when two answers are equal strings, raw or under either or both of AISBench's normalisations.

    No numbers and no algebra, so `0.5` is not `\\frac12`; and its known false equalities come with it
    (`1,2` is `12`, `3 \\cdot 4` is `34`), because published figures contain them.
    """
    stripped = strip_latex(answer), strip_latex(gold)
    return (
        answer == gold
        or stripped[0] == stripped[1]
        or normalise(stripped[0]) == normalise(stripped[1])
        or normalise(answer) == normalise(gold)
    )


# Rewrites that remove LaTeX which does not change the value, in AISBench's order: (pattern, replacement).
_LATEX_REWRITES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\n|\.+\Z", ""),
        (r"\\[! ]", ""),
        (r"\\\\+", r"\\"),
        (r"[td]frac", "frac"),
        (r"\\left|\\right", ""),
        (r"(?<=.)\\text\{[^{}]*\}\s*\Z", ""),  # a unit behind a value
        (r"\^\{\\circ\}|\^\\circ", ""),
        (r"\\?\$|\\text|x\\in|\\?%|\\cdot|\\mathbf|\\mbox\{.*?\}", ""),
        (r"( |\{)\.", r"\g<1>0."),
        (r"infinity|(?<!\\)inf(?!ty)", r"\\infty"),
        (r"and", ""),
        (r"(\d+)\.0+(?=\D|\Z)", r"\1"),
        (r"^\.", "0."),
        (r"^[^=]{0,2}=([^=]*)\Z", r"\1"),
        (r"\\sqrt(\w+)", r"\\sqrt{\1}"),
        (r" ", ""),
        (r"\\frac([^{])([^{])", r"\\frac{\1}{\2}"),
        (r"\\frac([^{])\{", r"\\frac{\1}{"),
        (r"^(-?\d+)/(-?\d+)\Z", r"\\frac{\1}{\2}"),
    )
)


def strip_latex(text: str) -> str:
    """The answer without spacing, units, degree and currency signs, with \\frac and \\sqrt written in full."""
    text = text.strip()
    for pattern, replacement in _LATEX_REWRITES:
        text = pattern.sub(replacement, text)
    return text


_REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"),
    (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"), ("\\le", "<"),
)  # fmt: skip
_REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "ft", "hours", "km", "units", "\\ldots", "sue",
    "points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges",
    "students", "childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2",
    "\\text{}^3", "\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"',
    "\\dots", "\n", "\r", "\f",
)  # fmt: skip
# The last match of each replaces the whole text.
_NARROWED = tuple(
    re.compile(pattern) for pattern in (r"finalansweris(.*)", r"answer?is:?(.*)", r"oxed\{(.*?)\}", r"\$(.*?)\$")
)


def normalise(text: str) -> str:
    """The answer without unit words, text macros and spaces (Minerva, arXiv:2206.14858, appendix D.1)."""
    for before, after in _REPLACED:
        text = text.replace(before, after)
    for expression in _REMOVED:
        text = text.replace(expression, "")
    text = re.sub(r"\\text\{\((.*?)\)\}", r"\1", text)
    text = re.sub(r"\\(?:text|textbf|overline)\{(.*?)\}", r"\1", text)
    text = re.sub(r"\\boxed\{(.*)\}", r"\1", text)
    for pattern in _NARROWED:
        found = pattern.findall(text)
        text = found[-1] if found else text
    text = text.strip()
    if "rac" in text and "\\frac" not in text:
        text = text.replace("rac", "\\frac")
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt([^{])", r"sqrt{\1}", text).replace("$", "")
    without_commas = text.replace(",", "")
    return without_commas if without_commas.isdigit() else text
