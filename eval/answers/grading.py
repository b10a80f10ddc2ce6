"""Response text to verdicts under two rulers, in place or with the exact ruler's work in a worker."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from eval.answers.aisbench import extract_aisbench, is_equal_aisbench
from eval.answers.extraction import Found, find_answer

Verdict = Literal["right", "wrong", "no_answer", "truncated", "request_failed"]
VERDICTS: tuple[Verdict, ...] = ("right", "wrong", "no_answer", "truncated", "request_failed")

# Recorded with every result: a row graded by another rule is never mixed with these.
GRADER = "exact/3+aisbench-v2/1"

_MAX_NUMBER_CHARS = 100
# The server ended the response, not the model: max_tokens, shutdown or a filter.
_CUT = ("length", "abort", "content_filter")

Comparison = Callable[[Found, str], bool]  # True when what was found is the gold answer


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
    """Verdicts on one response, in place and without limits: for trusted text. `Judge.grade` has the limits."""
    return grade_with(is_gold_exact, response, finish_reason, gold)


def grade_with(is_gold: Comparison, response: str | None, finish_reason: str | None, gold: str) -> Grade:
    """Verdicts on one response; `response` None means that the request failed.

    A response stopped by the length limit or the server is `truncated` whatever it holds: unfinished text never
    grades right, since a box halfway through a solution is not the answer the model would have given. Where the
    server gives no reason (None), the text decides: thinking or a box that does not close, or much text behind
    the answer that breaks off.
    """
    if response is None:
        return Grade(None, "request_failed", None, False, False)
    aisbench_answer, raises = extract_aisbench(response)
    aisbench_right = is_equal_aisbench(aisbench_answer, gold)
    found = find_answer(response)
    answer = found.answers[0] if found.answers else None
    return Grade(answer, _verdict(is_gold, found, finish_reason, gold), aisbench_answer, aisbench_right, raises)


def _verdict(is_gold: Comparison, found: Found, finish_reason: str | None, gold: str) -> Verdict:
    if finish_reason in _CUT or (finish_reason is None and found.looks_cut):
        return "truncated"
    if not found.answers:
        return "no_answer"
    decided = decide_quickly(found.answers, gold)
    if decided is None:
        decided = is_gold(found, gold)
    return "right" if decided else "wrong"


def is_gold_exact(found: Found, gold: str) -> bool:
    """True when the answer found in a response is the gold answer under the exact ruler.

    Boxes side by side are a list of answers, or one answer in several forms; where the gold answer is a list, so
    may be all boxes of the response.
    """
    from eval.answers.exact import is_equal_exact, is_list

    if any(is_equal_exact(answer, gold) for answer in found.answers):
        return True
    if len(found.run) > 1 and all(is_equal_exact(box, gold) for box in found.run):
        return True
    return len(found.boxes) > len(found.run) and is_list(gold) and is_equal_exact(", ".join(found.boxes), gold)


def decide_quickly(answers: Sequence[str], gold: str) -> bool | None:
    """The verdict where strings or plain numbers decide it, else None."""
    if gold in answers:
        return True
    if len(answers) > 1:
        return None
    numbers = parse_number(answers[0]), parse_number(gold)
    if numbers[0] is None or numbers[1] is None:
        return None
    return numbers[0] == numbers[1]


def parse_number(text: str) -> Fraction | None:
    """Exact value of an integer, decimal, a/b or \\frac{a}{b} with optional thousands separators, else None."""
    if len(text) > _MAX_NUMBER_CHARS:
        return None
    plain = re.sub(r"\\[!,; ]|\\?\$", "", text).strip().replace("{,}", ",").replace("−", "-").rstrip(".")
    plain = re.sub(r"^([+-]?)\\[dt]?frac(?:\{(\d+)\}|\s?(\d))(?:\{(\d+)\}|(\d))$", r"\1\2\3/\4\5", plain)
    if re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?", plain):
        plain = plain.replace(",", "")
    if not re.fullmatch(r"[+-]?(\d+(\.\d*)?|\.\d+|\d+/\d+)", plain, re.ASCII):
        return None
    try:
        return Fraction(plain.rstrip("."))
    except ZeroDivisionError:
        return None
