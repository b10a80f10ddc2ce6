"""verl's `geo3k` rule: accuracy and format."""

from __future__ import annotations

import logging
import re

from dapo_core.reward.math_dapo import last_boxed, normalize_answer
from dapo_core.reward.score import Score

FORMAT_WEIGHT = 0.1
MAX_ANSWER_CHARACTERS = 200
_TOWER = re.compile(r"\^\s*[{(]|\^\s*\d+\s*\^|\^\s*\d\d")


def score_geo3k(response: str, ground_truth: str) -> Score:
    r"""0.9 for a right answer in the last \boxed{}, and 0.1 for the format: from 0 to 1.

    As in verl (`reward_score/geo3k.py`) the format is `<think>` at the beginning, `</think>`, then a \boxed{};
    the answer counts without it too. Answers are equal as normalised strings or, where verl asks sympy through
    mathruler, when math-verify finds them equal: 5\sqrt{2} and \sqrt{50}, 13.5 and \frac{27}{2}.
    """
    answer = (last_boxed(response) or "").strip()
    format_value = FORMAT_WEIGHT * has_format(response)
    if not answer:
        return Score(format_value, "no_answer")
    is_right = are_equal(answer, ground_truth)
    value = (1.0 - FORMAT_WEIGHT) * is_right + format_value
    return Score(value, "right" if is_right else "wrong", answer, float(is_right))


def has_format(response: str) -> bool:
    r"""Whether the response is `<think>...</think>...\boxed{...}...`. O(n), unlike the regular expression."""
    end_of_thought = response.find("</think>", len("<think>"))
    box = response.find("\\boxed{", end_of_thought)
    return response.startswith("<think>") and end_of_thought >= 0 and box >= 0 and "}" in response[box:]


def are_equal(answer: str, ground_truth: str) -> bool:
    """Whether two answers are the same string after normalisation, or the same value.

    As in mathruler, the value of something with a large or nested exponent is not asked for: 9^{9^9} would take
    the memory of the machine. Other ways to keep sympy busy end at the time limit of the process.
    """
    if normalize_answer(answer) == normalize_answer(ground_truth):
        return True
    if len(answer) > MAX_ANSWER_CHARACTERS or _TOWER.search(answer):
        return False
    from math_verify import parse, verify  # loads sympy, half a second: only where strings differ

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits (SIGALRM) are off
    gold, given = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (ground_truth, answer))
    return bool(verify(gold, given, timeout_seconds=None))
