r"""String normalisation of answers: exactly verl's `math_dapo`, and our more lenient rule.

Both read the last 300 characters, take linear time and never raise.
"""

from __future__ import annotations

import functools
import re

WINDOW_CHARACTERS = 300
# Minerva's normalisation (arXiv:2206.14858, appendix D.1), the basis of verl's and AISBench's.
# Order matters.
MINERVA_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
MINERVA_REMOVED = (
    *"square ways integers dollars mph inches hours km units \\ldots sue points feet".split(),
    *"minutes digits cents degrees cm gm pounds meters meals edges students".split(),
    *"childrentickets multiples \\text{s} \\text{.}".split(),
    "\\text{\ns}",
    *"\\text{}^2 \\text{}^3".split(),
    "\\text{\n}",
    *'\\text{} \\mathrm{th} ^\\circ ^{\\circ} \\; ,\\! {,} " \\dots'.split(),
)

_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_FIRST_FORMULA = re.compile(r".*?\$(.*?)\$.*")
_WRAPPED = (r"\\text\{(.*?)\}", r"\\textbf\{(.*?)\}", r"\\overline\{(.*?)\}", r"\\boxed\{(.*)\}")

_REMOVED_WORDS = re.compile(
    r"square|ways|integers|dollars|mph|inches|hours|km|units|points|feet|minutes|"
    r"digits|cents|degrees"
    r"|cm|gm|pounds|meters|meals|edges|students|tickets|multiples"
)
_REMOVED = tuple("{,} \\left \\right \\! \\, \\: \\; ^{\\circ} ^\\circ \\% %".split())
_BETWEEN_DOLLARS = re.compile(r".*?\$(.+?)\$.*")
_BRACES = re.compile(r"\\(?:text|textbf|mathrm|mathbf|overline|boxed|fbox)\{|\\[{}]|[{}]")
_GROUPED_NUMBER = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?")


def answer_line(response: str) -> str | None:
    """Return the last `Answer:` in the last 300 characters, on its line or the next."""
    lines = _ANSWER.findall(response[-WINDOW_CHARACTERS:])
    return lines[-1] if lines else None


@functools.lru_cache(maxsize=1024)  # siblings share the ground truth, and often the answer
def normalize_as_verl(answer: str) -> str:
    r"""Normalise an answer as verl does (`reward_score/math_dapo.py`).

    `\dfrac`, a full stop and a percent sign stay, and `12,34` becomes 1234.
    """
    answer = answer.split("=")[-1]
    for old, new in MINERVA_REPLACED:
        answer = answer.replace(old, new)
    for old in MINERVA_REMOVED:
        answer = answer.replace(old, "")
    answer = _FIRST_FORMULA.sub(r"$\1$", answer)
    for wrapped in _WRAPPED:
        answer = re.sub(wrapped, r"\1", answer)
    answer = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", answer)
    answer = re.sub(r"sqrt([^{])", r"sqrt{\1}", answer).replace("$", "")
    without_commas = answer.replace(",", "")
    return (without_commas if without_commas.isdigit() else answer).strip()


@functools.lru_cache(maxsize=1024)
def normalize(answer: str) -> str:
    """Strip units, spacing, LaTeX wrappers, dollar signs and thousands separators from an answer.

    If the text contains a formula in dollar signs, only the formula is kept. docs/departures.md
    lists the differences from verl.
    """
    answer = answer.split("=")[-1]
    for old, new in MINERVA_REPLACED[:7]:
        answer = answer.replace(old, new)
    for old in _REMOVED:
        answer = answer.replace(old, "")
    answer = _BETWEEN_DOLLARS.sub(r"\1", answer)
    answer = unwrap(_REMOVED_WORDS.sub("", answer))
    answer = answer.replace("$", "").strip().rstrip(".")
    answer = re.sub(r"\\[dt]frac", r"\\frac", answer)
    answer = re.sub(r"\\frac(\w)(\w)", r"\\frac{\1}{\2}", answer)
    answer = re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", answer)
    return answer.replace(",", "") if _GROUPED_NUMBER.fullmatch(answer) else answer


def unwrap(text: str) -> str:
    r"""Replace \text{}, \boxed{} and the like by their content, in linear time for any braces."""
    pieces: list[str] = []
    open_braces: list[
        int | None
    ] = []  # index of the wrapper in `pieces`; None for a brace that is kept
    position = 0
    for match in _BRACES.finditer(text):
        token = match.group()
        pieces += [text[position : match.start()], token]
        position = match.end()
        if token == "{" or len(token) > 2:
            open_braces.append(None if token == "{" else len(pieces) - 1)
        elif token == "}" and open_braces:
            wrapper = open_braces.pop()
            if wrapper is not None:
                pieces[wrapper] = pieces[-1] = ""
    return "".join([*pieces, text[position:]])
