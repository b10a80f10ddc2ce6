"""What a response is worth: a scorer chosen by data source, plus overlong shaping."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dapo_core.errors import DataError

if TYPE_CHECKING:
    from dapo_core.config import OverlongConfig

Verdict = Literal["right", "wrong", "no_answer", "error", "timeout"]

ANSWER_WINDOW_CHARACTERS = 300
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_REMOVED_WORDS = re.compile(
    r"square|ways|integers|dollars|mph|inches|hours|km|units|points|feet|minutes|digits|cents|degrees"
    r"|cm|gm|pounds|meters|meals|edges|students|tickets|multiples"
)
_REPLACED = (("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"))
_REMOVED = ("{,}", "\\left", "\\right", "\\!", "\\,", "\\:", "\\;", "^{\\circ}", "^\\circ", "\\%", "%")
_BETWEEN_DOLLARS = re.compile(r".*?\$(.+?)\$.*")
_NESTED = r"(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*"  # braces within braces, two deep: \frac{\sqrt{2}}{2}
_WRAPPER = re.compile(rf"\\(?:text|textbf|mathrm|overline|boxed|fbox)\{{({_NESTED})\}}")
_GROUPED_NUMBER = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?")


@dataclass(frozen=True)
class Score:
    """A scorer's word on one response."""

    value: float
    verdict: Verdict
    answer: str | None = None
    acc: float = 0.0  # what the filter metric `acc` looks at: 1 right, 0 not, unless the scorer says otherwise


Scorer = Callable[[str, str], Score]


def score_math(response: str, ground_truth: str) -> Score:
    r"""+1 when the response's final answer equals the ground truth, else -1 (verl's `math_dapo` rule).

    The answer is the last `Answer:` line within the last 300 characters, else the last \boxed{} there. Both
    sides are normalised as strings; nothing is computed.
    """
    tail = response[-ANSWER_WINDOW_CHARACTERS:]
    lines = _ANSWER.findall(tail)
    answer = lines[-1] if lines else last_boxed(tail)
    if answer is None or not answer.strip():
        return Score(-1.0, "no_answer", None)
    answer = normalize_answer(answer)
    is_right = answer == normalize_answer(ground_truth)
    return Score(1.0 if is_right else -1.0, "right" if is_right else "wrong", answer, float(is_right))


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...} with matching braces, None when there is none or it never closes."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for position in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : position]
    return None


def normalize_answer(answer: str) -> str:
    """The answer without units, spacing, LaTeX wrappers, dollar signs and thousands separators.

    Of text around a formula in dollar signs the formula remains.
    """
    answer = answer.split("=")[-1]
    for old, new in _REPLACED:
        answer = answer.replace(old, new)
    for old in _REMOVED:
        answer = answer.replace(old, "")
    answer = _BETWEEN_DOLLARS.sub(r"\1", answer)
    answer = _REMOVED_WORDS.sub("", answer)
    for _ in range(8):  # \boxed{\text{x}}: one wrapper a pass
        unwrapped = _WRAPPER.sub(r"\1", answer)
        if unwrapped == answer:
            break
        answer = unwrapped
    answer = answer.replace("$", "").strip().rstrip(".")
    answer = re.sub(r"\\[dt]frac", r"\\frac", answer)
    answer = re.sub(r"\\frac(\w)(\w)", r"\\frac{\1}{\2}", answer)
    answer = re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", answer)
    return answer.replace(",", "") if _GROUPED_NUMBER.fullmatch(answer) else answer


SCORERS: dict[str, Scorer] = {
    "arithmetic": score_math,
    "math_dapo": score_math,
    "math_dapo_reasoning": score_math,
}


def scorer_for(data_source: str) -> Scorer:
    """The scorer of a data source; raises DataError naming the known ones."""
    if data_source not in SCORERS:
        raise DataError(
            f"data_source {data_source!r} has no scorer; known are {', '.join(sorted(SCORERS))}: "
            "correct the column data_source of the training parquet or add a scorer to dapo_core/reward.py"
        )
    return SCORERS[data_source]


def overlong_penalty(num_tokens: int, max_response_tokens: int, overlong: OverlongConfig) -> float:
    """Soft overlong punishment (DAPO, arXiv:2503.14476, eq. 13): from 0 down to -penalty_factor.

    0 up to max_response_tokens - buffer_tokens, then linear, -penalty_factor at the limit and clamped there.
    """
    if not overlong.enabled:
        return 0.0
    excess = num_tokens - (max_response_tokens - overlong.buffer_tokens)
    return -overlong.penalty_factor * min(max(excess / overlong.buffer_tokens, 0.0), 1.0)
