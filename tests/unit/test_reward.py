"""The math_dapo rule on texts as models write them, and the overlong penalty at its edges."""

from __future__ import annotations

import pytest

from dapo_core.config import OverlongConfig
from dapo_core.errors import DataError
from dapo_core.reward import overlong_penalty, scorer_for
from dapo_core.reward.math_dapo import last_boxed, normalize_answer, score_math


def test_right_and_wrong_are_plus_and_minus_one() -> None:
    right, wrong = score_math("12 + 7 = 19\nAnswer: 19", "19"), score_math("Answer: 18", "19")
    assert (right.value, right.verdict, right.answer, right.acc) == (1.0, "right", "19", 1.0)
    assert (wrong.value, wrong.verdict, wrong.answer, wrong.acc) == (-1.0, "wrong", "18", 0.0)


@pytest.mark.parametrize(
    ("response", "verdict"),
    [
        ("Answer: 18\nNo, again.\nAnswer: 19", "right"),  # the last one counts
        ("Answer: 19\nNo, again.\nAnswer: 18", "wrong"),
        ("answer : 19", "right"),
        ("Answer:\n\\boxed{19}", "right"),
        ("So \\boxed{18}, no, \\boxed{19}.", "right"),  # boxed where there is no `Answer:`
        ("\\boxed{19} but Answer: 18", "wrong"),  # which goes before boxed
        ("Answer: 19\nand then \\boxed{18}", "right"),
        ("Answer: 19" + " " * 290, "right"),  # the 300 characters begin with the `A`
        ("Answer: 19" + " " * 291, "no_answer"),  # and here behind it
        ("Answer: 19" + "." * 400 + "Answer: 18", "wrong"),
        ("I do not know", "no_answer"),
        ("", "no_answer"),
        ("Answer:", "no_answer"),
        ("Answer:   ", "no_answer"),
        ("\\boxed{}", "no_answer"),
        ("\\boxed{19", "no_answer"),
    ],
)
def test_where_the_answer_stands(response: str, verdict: str) -> None:
    score = score_math(response, "19")
    assert score.verdict == verdict
    assert score.value == (1.0 if verdict == "right" else -1.0)


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        ("$42$", "42"),
        ("42.", "42"),
        ("$42$.", "42"),
        ("The value is $42$ indeed", "42"),
        ("x = 42", "42"),
        ("42 units", "42"),
        ("5 km", "5"),
        ("\\$5", "5"),
        ("5 dollars", "5"),
        ("50\\%", "50"),
        ("90^\\circ", "90"),
        ("90^{\\circ}", "90"),
        (" 1 234 ", "1234"),
        ("1,234,567", "1234567"),
        ("-1,234.5", "-1234.5"),
        ("1{,}234", "1234"),
        ("1,\\!234", "1234"),
        ("1,2", "1,2"),  # two numbers, not twelve
        ("(1, 2)", "(1,2)"),
        ("\\frac12", "\\frac{1}{2}"),
        ("\\dfrac{1}{2}", "\\frac{1}{2}"),
        ("\\tfrac12", "\\frac{1}{2}"),
        ("\\sqrt2", "\\sqrt{2}"),
        ("\\text{even}", "even"),
        ("\\mbox{even}", "even"),
        ("\\boxed{\\text{even}}", "even"),
        ("\\left( 1, 2 \\right)", "(1,2)"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\frac{\\sqrt{2}}{2}}", "\\frac{\\sqrt{2}}{2}"),
    ],
)
def test_normalisation(answer: str, normal: str) -> None:
    assert normalize_answer(answer) == normal


def test_both_sides_are_normalised_but_nothing_is_computed() -> None:
    assert score_math("Answer: $\\frac12$", "\\dfrac{1}{2}").acc
    assert score_math("Answer: 1234 dollars", "\\$1,234").acc
    assert not score_math("Answer: 0.5", "\\frac12").acc
    assert not score_math("Answer: 3 \\cdot 4", "34").acc


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("\\boxed{a} \\boxed{\\frac{1}{2}} end", "\\frac{1}{2}"),
        ("\\boxed{a} \\boxed{b", None),
        ("nothing", None),
        ("\\boxed{}", ""),
    ],
)
def test_last_boxed(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("num_tokens", "penalty"),
    [
        # limit 100, buffer 20, factor 2: 0 up to 80, then -2 * (tokens - 80) / 20
        (0, 0.0),
        (80, 0.0),
        (81, -0.1),
        (90, -1.0),
        (100, -2.0),
        (101, -2.0),  # clamped
        (10_000, -2.0),
    ],
)
def test_overlong_penalty(num_tokens: int, penalty: float) -> None:
    overlong = OverlongConfig(buffer_tokens=20, penalty_factor=2.0)
    assert overlong_penalty(num_tokens, 100, overlong) == pytest.approx(penalty, abs=1e-12)
    assert overlong_penalty(num_tokens, 100, overlong.model_copy(update={"enabled": False})) == 0.0


def test_an_unknown_data_source_names_the_known_ones() -> None:
    assert scorer_for("math_dapo").rule is score_math
    with pytest.raises(
        DataError, match=r"data_source 'gsm9k' has no scorer; known are .*arithmetic, .*math_dapo, .*data_source"
    ):
        scorer_for("gsm9k")
