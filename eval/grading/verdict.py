"""Response text to a verdict: find the answer, compare it with the gold answer, judge."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from eval.grading.aisbench import is_equal_aisbench

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
    """What the two rulers say of one response.

    `answer` and `verdict` are the exact ruler's, the headline; `aisbench_*` are AISBench's, which knows right and
    wrong only and does not look at how the response ended.
    """

    answer: str | None  # None when there is none
    verdict: Verdict
    aisbench_answer: str | None
    aisbench_right: bool
    aisbench_raises: bool  # AISBench itself would have raised here


def grade(response: str | None, finish_reason: str | None, gold: str) -> Grade:
    """Verdicts on one response; `response` None means that the request failed.

    A response stopped by the length limit is `truncated` whatever it holds: unfinished text never grades
    right, since a box halfway through a solution is not the answer the model would have given.
    """
    if response is None:
        return Grade(None, "request_failed", None, False, False)
    answer = extract_answer(response)
    verdict: Verdict = "no_answer"
    if finish_reason == "length":
        verdict = "truncated"
    elif answer is not None:
        verdict = "right" if is_equal(answer, gold) else "wrong"
    aisbench_right = answer is not None and is_equal_aisbench(answer, gold)
    return Grade(answer, verdict, answer, aisbench_right, False)


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
