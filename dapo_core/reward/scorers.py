"""Scoring rules for responses. Scoring processes import this module, so it has no heavy imports."""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dapo_core.errors import ConfigError, DataError
from eval.answers.choice import find_options, option_letters
from eval.answers.extraction import extract_boxed
from eval.answers.math_dapo import WINDOW_CHARACTERS, answer_line, normalize, normalize_as_verl

if TYPE_CHECKING:
    from dapo_core.config.training import OverlongConfig

Verdict = Literal["right", "wrong", "no_answer", "error", "timeout"]

GEO3K_FORMAT_WEIGHT = 0.1
MAX_GEO3K_CHARACTERS = 200
_TOWER = re.compile(r"\^\s*[{(]|\^\s*\d+\s*\^|\^\s*\d\d")
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
    acc: float = (
        0.0  # for the filter metric `acc`: 1 if right, else 0, or a user scorer's own number
    )


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
    return Score(
        right if is_right else wrong, "right" if is_right else "wrong", answer, float(is_right)
    )


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


def score_math_verify(response: str, ground_truth: str) -> Score:
    r"""+1 if the final answer has the same value as the ground truth, else -1.

    The answer is the last \boxed{}, else the last `Answer:` line within the last 300 characters.
    Answers are equal if their normalized strings are, or if math-verify finds them equal.
    """
    answer = extract_boxed(response) or answer_line(response)
    if not (answer and answer.strip()):
        return Score(-1.0, "no_answer")
    return _graded(is_same_value(answer.strip(), ground_truth), answer.strip())


def score_choice(response: str, ground_truth: str) -> Score:
    """+1 if the response names exactly the options of the ground truth, in any order, else -1.

    Raises DataError if the ground truth names no options.
    """
    truth = option_letters(ground_truth)
    if not truth:
        raise DataError(
            f"ground_truth {ground_truth!r} names no options A to G; fix the training parquet"
        )
    answer = find_options(response)
    if not answer:
        return Score(-1.0, "no_answer")
    return _graded(answer == truth, answer)


def score_geo3k(response: str, ground_truth: str) -> Score:
    r"""0.9 for a right answer in the last \boxed{}, plus 0.1 for the format.

    As in verl (`reward_score/geo3k.py`), the format is `<think>` at the start, `</think>`, then a
    \boxed{}; the answer also counts without it. Answers are equal if their normalized strings are,
    or if math-verify finds them equal (verl uses sympy through mathruler): 5\sqrt{2} and \sqrt{50},
    13.5 and \frac{27}{2}.
    """
    answer = (extract_boxed(response) or "").strip()
    format_value = GEO3K_FORMAT_WEIGHT * has_geo3k_format(response)
    if not answer:
        return Score(format_value, "no_answer")
    right = (1.0 - GEO3K_FORMAT_WEIGHT) + format_value
    return _graded(is_same_value(answer, ground_truth), answer, right, wrong=format_value)


def has_geo3k_format(response: str) -> bool:
    r"""True if the response is `<think>...</think>...\boxed{...}...`; linear time, unlike a regular
    expression.
    """
    end_of_thinking = response.find("</think>", len("<think>"))
    box = response.find("\\boxed{", end_of_thinking)
    return (
        response.startswith("<think>")
        and end_of_thinking >= 0
        and box >= 0
        and "}" in response[box:]
    )


def is_same_value(answer: str, ground_truth: str) -> bool:
    """True if two answers are the same normalized string, or math-verify finds them equal.

    As in mathruler, answers with a large or nested exponent are not evaluated: 9^{9^9} would
    exhaust memory. The process's time limit stops other expensive inputs.
    """
    if normalize(answer) == normalize(ground_truth):
        return True
    if len(answer) > MAX_GEO3K_CHARACTERS or _TOWER.search(answer):
        return False
    from math_verify import (
        parse,
        verify,
    )  # imports sympy, half a second: only if the strings differ

    logging.getLogger("math_verify").setLevel(
        logging.ERROR
    )  # it warns that its own SIGALRM limits are off
    gold, given = (
        parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (ground_truth, answer)
    )
    return bool(verify(gold, given, timeout_seconds=None))


@dataclass(frozen=True)
class Scorer:
    """A rule and the number of characters it reads from the end of the response (None: all).

    A rule with a window runs without a time limit: it must not raise, and must run in linear time.
    Unless it `reads_thinking`, it gets only the text after the last </think>, and nothing if
    thinking has not ended.
    """

    rule: Callable[[str, str], Score]
    window_characters: int | None = None
    reads_thinking: bool = False
    package: str | None = None  # from the extra `chain`, that the rule imports

    def __call__(self, response: str, ground_truth: str) -> Score:
        if not self.reads_thinking:
            response = response.rpartition("</think>")[2]
            response = "" if "<think>" in response else response
        return self.rule(response, ground_truth)


SCORERS: Mapping[str, Scorer] = {
    "math_dapo": Scorer(score_math, WINDOW_CHARACTERS),
    "math_boxed": Scorer(score_math, WINDOW_CHARACTERS),  # not affected by algorithm.compat
    "math_verify": Scorer(score_math_verify, package="math-verify"),
    "choice": Scorer(score_choice),
    "geo3k": Scorer(
        score_geo3k, reads_thinking=True, package="math-verify"
    ),  # the format includes the tags
    "gsm8k": Scorer(score_gsm8k, WINDOW_CHARACTERS),
}


def require_package(key: str, name: str) -> None:
    """Raise ConfigError if the scorer imports a package that is not installed; `key` chose it."""
    package = SCORERS[name].package
    if package is not None and importlib.util.find_spec(package.replace("-", "_")) is None:
        raise ConfigError(
            f"{key} uses the scorer {name}, which needs the package {package} to compare values; "
            "it is not "
            f"installed: pip install {package}"
        )


VERL_SCORERS: Mapping[str, Scorer] = {
    **SCORERS,
    "math_dapo": Scorer(score_math_as_verl, WINDOW_CHARACTERS, reads_thinking=True),
    "gsm8k": Scorer(score_gsm8k, WINDOW_CHARACTERS, reads_thinking=True),
}
# In addition to the registered sets: scorers by their own names, and names in verl's
# default_compute_score.
DATA_SOURCES: Mapping[str, str] = {
    "math_dapo": "math_dapo",
    "math_dapo_reasoning": "math_dapo",
    "math_boxed": "math_boxed",
    "math_verify": "math_verify",
    "aime": "math_dapo",
    "cflue_mcq": "choice",
    "openai/gsm8k": "gsm8k",
    "hiyouga/geometry3k": "geo3k",
}


def overlong_penalty(
    num_tokens: int, max_response_tokens: int, overlong: OverlongConfig, is_clamped: bool = True
) -> float:
    """Soft overlong punishment (DAPO, arXiv:2503.14476, eq. 13).

    0 up to max_response_tokens - buffer_tokens, then linear down to -penalty_factor at
    max_response_tokens. It is clamped there, unless `is_clamped` is False (as in verl).
    """
    if not overlong.enabled:
        return 0.0
    excess = (
        max(num_tokens - (max_response_tokens - overlong.buffer_tokens), 0) / overlong.buffer_tokens
    )
    return -overlong.penalty_factor * (min(excess, 1.0) if is_clamped else excess)
