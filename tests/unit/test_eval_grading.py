"""Answer extraction, equality and verdicts."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest

from eval.grading import extract_answer, grade, is_equal, is_equal_aisbench, parse_number


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}.", "42"),
        (r"first \boxed{1}, then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\left\{ 1, 2 \right.}", r"\left\{ 1, 2 \right."),  # an escaped brace opens nothing
        (r"\boxed{x = \boxed{5}}", "5"),
        (r"\boxed {7}", "7"),
        (r"\boxed 7.", "7"),
        (r"\\boxed{3}", "3"),  # a model that doubles its backslashes
        (r"\fbox{9}", "9"),
        (r"\fbox{9} or \boxed{8} or \fbox{7}", "8"),
        (r"\boxed{1} and then \boxed{2", "1"),  # the last box never closes
        ("Answer: 12\nno wait\nAnswer: 13", "13"),
        ("**Answer:** $13$.", "13"),
        ("Final answer : 13\n", "13"),
        ("\\boxed{4}\nAnswer: 5", "4"),
        ("<think>\\boxed{1}</think> Answer: 2", "2"),
        ("<think>\\boxed{1}</think> I give up", None),
        ("the answer might be 5", None),
        ("Answer:", None),
        ("\\boxed{}", None),
        ("", None),
    ],
)
def test_extract_answer(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize("text", ["\\boxed{" * 20_000, "\\" * 50_001, "Answer" * 20_000, "{" * 100_000])
def test_hostile_text_is_read_in_linear_time(text: str) -> None:
    start = time.perf_counter()
    assert extract_answer(text) is None
    assert time.perf_counter() - start < 1.0


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("42", "42"),
        ("042", "42"),
        ("42.0", "42"),
        ("1,234", "1234"),
        ("1{,}234", "1,234"),
        ("$42$", "42"),
        ("+5", "5"),
        ("−5", "-5"),
        ("0.5", r"\frac{1}{2}"),
        ("2/4", r"\frac12"),
        ("-.5", r"-\dfrac{1}{2}"),
        (r"\dfrac{3}{4}", r"\frac{3}{4}"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
        (r"12^\circ", "12"),
        (r"50\%", "50"),
        (r"5 \text{ cm}", "5"),
        (r"x = 7", "7"),
        (r"\text{Evelyn}", "Evelyn"),
        (r"\sqrt3", r"\sqrt{3}"),
        (r"\frac1{72}", r"\frac{1}{72}"),
        ("(A)", "(A)"),
    ],
)
def test_equal_answers(answer: str, gold: str) -> None:
    assert is_equal(answer, gold)
    assert is_equal(gold, answer)


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("41", "42"),
        ("4.2", "42"),
        ("-5", "5"),
        ("0.333", r"\frac{1}{3}"),
        ("1/0", "0"),
        ("", "0"),
        ("12", "21"),
        (r"\frac{2}{1}", r"\frac{1}{2}"),
        (r"\sqrt{12}", r"2\sqrt{3}"),  # equal, but no algebra in this rule
        ("(1,2)", "(2,1)"),
        ("1.41", r"\sqrt{2}"),
    ],
)
def test_different_answers(answer: str, gold: str) -> None:
    assert not is_equal(answer, gold)
    assert not is_equal(gold, answer)


def test_aisbench_rule_keeps_its_known_verdicts() -> None:
    # Published figures contain these; see the AISBench part of the notes.
    assert is_equal_aisbench("1,2", "12")
    assert is_equal_aisbench(r"3 \cdot 4", "34")
    assert not is_equal_aisbench("0.5", r"\frac12")
    assert not is_equal_aisbench(r"\sqrt{12}", r"2\sqrt3")


def test_parse_number_is_exact_and_refuses_what_is_no_number() -> None:
    assert parse_number("0.1") == Fraction(1, 10)
    assert parse_number("1,234,567.5") == Fraction(2469135, 2)
    assert parse_number(r"-\frac{2}{6}") == Fraction(-1, 3)
    assert [parse_number(text) for text in ("1,2", "1/0", "9^9", "x", "", ".", "1e5", "9" * 5000)] == [None] * 8


@pytest.mark.parametrize(
    ("response", "finish_reason", "verdict"),
    [
        ("Answer: 7", "stop", "right"),
        ("Answer: 8", "stop", "wrong"),
        ("seven, I think", "stop", "no_answer"),
        ("Answer: 7\nbut let me check", "length", "truncated"),
        ("still thinking", "length", "truncated"),
        (None, None, "request_failed"),
    ],
)
def test_verdicts(response: str | None, finish_reason: str | None, verdict: str) -> None:
    assert grade(response, finish_reason, "7").verdict == verdict
