"""Response text to a verdict: find the answer, compare it with the gold answer, judge."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

Verdict = Literal["right", "wrong", "no_answer", "truncated", "request_failed"]
VERDICTS: tuple[Verdict, ...] = ("right", "wrong", "no_answer", "truncated", "request_failed")

# Recorded with every result: a row graded by another rule is never mixed with these.
GRADER = "aisbench-strings+numbers/1"

_BRACES = re.compile(r"\\{1,4}(boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_BARE_BOX = re.compile(r"\\boxed\s*([+-]?[\w.,/]+)")
_ANSWER_LINE = re.compile(r"answer\W{0,4}?\s*[:：]\**[ \t]*([^\n]*\S)", re.IGNORECASE)
_MAX_NUMBER_CHARS = 100


@dataclass(frozen=True)
class Grade:
    """The answer found in a response (None when there is none) and the verdict on it."""

    answer: str | None
    verdict: Verdict


def grade(response: str | None, finish_reason: str | None, gold: str) -> Grade:
    """Verdict on one response; `response` None means that the request failed.

    A response stopped by the length limit is `truncated` whatever it holds: unfinished text never grades
    right, since a box halfway through a solution is not the answer the model would have given.
    """
    if response is None:
        return Grade(None, "request_failed")
    answer = extract_answer(response)
    if finish_reason == "length":
        return Grade(answer, "truncated")
    if answer is None:
        return Grade(None, "no_answer")
    return Grade(answer, "right" if is_equal(answer, gold) else "wrong")


def extract_answer(text: str) -> str | None:
    """The final answer of a response, or None.

    Looks behind the last `</think>`: the last \\boxed{} with matching braces, else the last \\fbox{}, else
    the last `Answer:` line, which is what DAPO's prompts ask for.
    """
    text = text.rpartition("</think>")[2]
    boxed = extract_boxed(text)
    if boxed is not None:
        return boxed
    lines = _ANSWER_LINE.findall(text)
    return _unwrap(lines[-1]) if lines else None


def extract_boxed(text: str) -> str | None:
    """Content of the last \\boxed{} that closes, else of the last \\fbox{}; None when empty or absent. O(n)."""
    open_braces: list[tuple[str, int]] = []  # (macro or "", index behind the brace)
    last: dict[str, tuple[int, int]] = {}  # macro -> (start, end) of the box that begins last
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "}" and open_braces:
            macro, start = open_braces.pop()
            if macro and start > last.get(macro, (-1, -1))[0]:
                last[macro] = (start, match.start())
        elif token == "{" or match.group(1):
            open_braces.append((match.group(1) or "", match.end()))
    if "boxed" not in last:
        bare = _BARE_BOX.findall(text)
        if bare:
            return bare[-1].rstrip(".,")
    span = last.get("boxed") or last.get("fbox")
    content = text[span[0] : span[1]].strip() if span else ""
    return content or None


def is_equal(answer: str, gold: str) -> bool:
    """True when two answers are equal as plain numbers, or as strings under AISBench's rule.

    Two plain numbers (integers, decimals, thousands separators, fractions) are compared exactly, by value.
    """
    numbers = parse_number(answer), parse_number(gold)
    if numbers[0] is not None and numbers[1] is not None:
        return numbers[0] == numbers[1]
    return is_equal_aisbench(answer, gold)


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


def parse_number(text: str) -> Fraction | None:
    """Exact value of an integer, decimal, a/b or \\frac{a}{b} with optional thousands separators, else None."""
    if len(text) > _MAX_NUMBER_CHARS:
        return None
    plain = re.sub(r"\\[!,; ]|\\?\$|\s", "", text).replace("{,}", ",").replace("−", "-").rstrip(".")
    plain = re.sub(r"^([+-]?)\\[dt]?frac(?:\{(\d+)\}|(\d))(?:\{(\d+)\}|(\d))$", r"\1\2\3/\4\5", plain)
    if re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?", plain):
        plain = plain.replace(",", "")
    if not re.fullmatch(r"[+-]?(\d+(\.\d*)?|\.\d+|\d+/\d+)", plain, re.ASCII):
        return None
    try:
        return Fraction(plain.rstrip("."))
    except ZeroDivisionError:
        return None


def _unwrap(line: str) -> str | None:
    """An answer line without Markdown emphasis, surrounding dollar signs or a closing full stop."""
    bare = line.strip().strip("*`").strip().rstrip(".").strip()
    if len(bare) > 1 and bare.startswith("$") and bare.endswith("$"):
        bare = bare.strip("$").strip()
    return bare or None


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
