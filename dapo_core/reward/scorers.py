"""Scoring rules for responses. Scoring processes import this module, so it has no heavy imports."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dapo_core.errors import DataError
from eval.answers.choice import find_options, option_letters
from eval.answers.exact import is_equal_exact
from eval.answers.extraction import extract_boxed, find_answer
from eval.answers.grading import decide_quickly, is_gold_exact
from eval.answers.math_dapo import WINDOW_CHARACTERS, answer_line, normalize, normalize_as_verl

if TYPE_CHECKING:
    from dapo_core.config.training import OverlongConfig

Verdict = Literal["right", "wrong", "no_answer", "error", "timeout"]

GEO3K_FORMAT_WEIGHT = 0.1
_FINAL_NUMBER = re.compile(r"#### (-?[0-9.,]+)")


@dataclass(frozen=True)
class Score:
    """A scorer's result for one response.

    The verdicts `error` and `timeout` mean that the scorer failed; their value is 0.0, halfway
    between math_dapo's right and wrong.
    """

    value: float
    verdict: Verdict
    answer: str | None = None
    acc: float = 0.0  # the filter metric: 1 if right, else 0, or a user scorer's own number


def score_math(response: str, ground_truth: str) -> Score:
    r"""+1 if the final answer equals the ground truth, else -1.

    The answer is the last `Answer:` line within the last 300 characters, else the last \boxed{}
    there. Both sides are compared as normalized strings; nothing is computed.
    """
    answer = answer_line(response)
    if answer is None:
        answer = extract_boxed(response[-WINDOW_CHARACTERS:])
    return _equal(answer, ground_truth, normalize)


def score_math_as_verl(response: str, ground_truth: str) -> Score:
    """Like verl's `math_dapo`: only the last `Answer:` line counts, with verl's normalization."""
    return _equal(answer_line(response), ground_truth, normalize_as_verl)


def _equal(answer: str | None, ground_truth: str, normalize: Callable[[str], str]) -> Score:
    answer, truth = None if answer is None else normalize(answer), normalize(ground_truth)
    if answer is None or (not answer and truth):
        return Score(-1.0, "no_answer")
    return _graded(answer == truth, answer)


def _graded(is_right: bool, answer: str, right: float = 1.0, wrong: float = -1.0) -> Score:
    verdict: Verdict = "right" if is_right else "wrong"
    return Score(right if is_right else wrong, verdict, answer, float(is_right))


def score_gsm8k(response: str, ground_truth: str) -> Score:
    """1 if the last `#### number` of the last 300 characters is the ground truth, else 0.

    As in verl (`reward_score/gsm8k.py`, method strict, format score 0), a number counts only after
    `#### `, commas are dropped, and the rest is compared as a string: `18.0` is not `18`.
    """
    numbers = _FINAL_NUMBER.findall(response[-WINDOW_CHARACTERS:])
    if not numbers:
        return Score(0.0, "no_answer")
    answer = numbers[-1].replace(",", "")
    return _graded(answer == ground_truth, answer, wrong=0.0)


def score_exact(response: str, ground_truth: str) -> Score:
    r"""+1 if the evaluation's exact rule finds the final answer right, else -1.

    A calculation in place of its result is right, as in the evaluation: 17 \cdot 2 for 34.
    """
    score = score_exact_in_place(response, ground_truth)
    if score is not None:
        return score
    found = find_answer(response)
    return _graded(is_gold_exact(found, ground_truth), found.answers[0])


def score_exact_in_place(response: str, ground_truth: str) -> Score | None:
    """Return what score_exact does if strings or plain numbers decide, else None."""
    answers = find_answer(response).answers
    if not answers:
        return Score(-1.0, "no_answer")
    is_right = decide_quickly(answers, ground_truth)
    return None if is_right is None else _graded(is_right, answers[0])


def score_choice(response: str, ground_truth: str) -> Score:
    """+1 if the response names exactly the options of the ground truth, in any order, else -1.

    Raises DataError if the ground truth names no options.
    """
    truth = option_letters(ground_truth)
    if not truth:
        raise DataError(
            f"ground_truth {ground_truth!r} names no options A to J; fix the training parquet"
        )
    answer = find_options(response)
    if not answer:
        return Score(-1.0, "no_answer")
    return _graded(answer == truth, answer)


def score_geo3k(response: str, ground_truth: str) -> Score:
    r"""0.9 for a right answer in the last \boxed{}, plus 0.1 for the format.

    As in verl (`reward_score/geo3k.py`), the format is `<think>` at the start, `</think>`, then a
    \boxed{}; the answer also counts without it. The exact rule compares values, where verl uses
    sympy through mathruler: 5\sqrt{2} and \sqrt{50}, 13.5 and \frac{27}{2}.
    """
    answer = (extract_boxed(response) or "").strip()
    format_value = GEO3K_FORMAT_WEIGHT * has_geo3k_format(response)
    if not answer:
        return Score(format_value, "no_answer")
    right = (1.0 - GEO3K_FORMAT_WEIGHT) + format_value
    return _graded(is_equal_exact(answer, ground_truth), answer, right, wrong=format_value)


def has_geo3k_format(response: str) -> bool:
    r"""True if the response is `<think>...</think>...\boxed{...}...`, in linear time."""
    end_of_thinking = response.find("</think>", len("<think>"))
    box = response.find("\\boxed{", end_of_thinking)
    return (
        response.startswith("<think>")
        and end_of_thinking >= 0
        and box >= 0
        and "}" in response[box:]
    )


@dataclass(frozen=True)
class Scorer:
    """A rule, and how it is run.

    A rule may raise and take long: it runs in a separate process under a time limit. `in_place`
    decides what it can in linear time without raising, and returns None for the rest.
    Unless it `reads_thinking`, a rule gets only the text after the last </think>, and nothing if
    thinking has not ended.
    """

    rule: Callable[[str, str], Score]
    in_place: Callable[[str, str], Score | None] = lambda response, ground_truth: None
    window_characters: int | None = None  # read from the end of the response; None: all
    reads_thinking: bool = False

    def __call__(self, response: str, ground_truth: str) -> Score:
        return self.rule(self._read(response), ground_truth)

    def quickly(self, response: str, ground_truth: str) -> Score | None:
        """Return the score if it can be decided in this process, else None."""
        return self.in_place(self._read(response), ground_truth)

    def _read(self, response: str) -> str:
        if self.reads_thinking:
            return response
        response = response.rpartition("</think>")[2]
        return "" if "<think>" in response else response


def _bounded(rule: Callable[[str, str], Score], reads_thinking: bool = False) -> Scorer:
    """A rule that reads a bounded tail in linear time and never raises."""
    return Scorer(rule, rule, WINDOW_CHARACTERS, reads_thinking)


SCORERS: Mapping[str, Scorer] = {
    "exact": Scorer(score_exact, score_exact_in_place),
    "math_dapo": _bounded(score_math),
    "choice": Scorer(score_choice),
    "geo3k": Scorer(score_geo3k, reads_thinking=True),  # the format includes the tags
    "gsm8k": _bounded(score_gsm8k),
}
VERL_SCORERS: Mapping[str, Scorer] = {
    **SCORERS,
    "math_dapo": _bounded(score_math_as_verl, reads_thinking=True),
    "gsm8k": _bounded(score_gsm8k, reads_thinking=True),
}
# In addition to the registered sets: scorers by their own names, and names in verl's
# default_compute_score.
DATA_SOURCES: Mapping[str, str] = {
    "exact": "exact",
    "math_dapo": "math_dapo",
    "math_dapo_reasoning": "math_dapo",
    "aime": "math_dapo",
    "cflue_mcq": "choice",
    "openai/gsm8k": "gsm8k",
    "hiyouga/geometry3k": "geo3k",
}
REPLACED = ("math_verify", "math_boxed")  # by exact


def scorer_hint(name: str) -> str:
    """Say which scorer a user may mean by an unknown name."""
    if name in REPLACED:
        return f"use exact instead of {name}; docs/data.md shows math-verify in a reward file"
    close = difflib.get_close_matches(name, SCORERS, n=1)
    return f"did you mean {close[0]}?" if close else f"scorers are {', '.join(sorted(SCORERS))}"


def overlong_penalty(
    num_tokens: int, max_response_tokens: int, overlong: OverlongConfig, is_clamped: bool = True
) -> float:
    """Soft overlong punishment (DAPO, arXiv:2503.14476, eq. 13).

    0 up to max_response_tokens - buffer_tokens, then linear down to -penalty_factor at
    max_response_tokens. It is clamped there, unless `is_clamped` is False (as in verl).
    """
    if not overlong.enabled:
        return 0.0
    num_free = max_response_tokens - overlong.buffer_tokens
    excess = max(num_tokens - num_free, 0) / overlong.buffer_tokens
    return -overlong.penalty_factor * (min(excess, 1.0) if is_clamped else excess)
