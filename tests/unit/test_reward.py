"""The rules for mathematics on texts as models write them, their routing, and the overlong penalty."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_core.config.training import CustomRewardConfig, OverlongConfig, RewardConfig
from dapo_core.errors import ConfigError, DataError
from dapo_core.reward import SCORERS, overlong_penalty, require_scorers, scorer_for
from dapo_core.reward.geo3k import are_equal, has_format, score_geo3k
from dapo_core.reward.gsm8k import score_gsm8k
from dapo_core.reward.math_dapo import last_boxed, normalize_answer, score_math, unwrap
from dapo_core.reward.routing import DATA_SOURCES, routes


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


def test_overlong_penalty_goes_on_beyond_the_limit_when_not_clamped() -> None:
    overlong = OverlongConfig(buffer_tokens=20, penalty_factor=2.0)
    # -2 * (110 - 80) / 20 = -3, verl's value; up to the limit nothing differs
    assert overlong_penalty(110, 100, overlong, is_clamped=False) == pytest.approx(-3.0)
    for num_tokens in (0, 80, 85, 100):
        clamped = overlong_penalty(num_tokens, 100, overlong)
        assert overlong_penalty(num_tokens, 100, overlong, is_clamped=False) == clamped


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("\\text{a} b", "a b"),
        ("\\boxed{\\text{\\mathrm{\\textbf{x}}}}", "x"),
        ("\\text{\\frac{\\sqrt{\\frac{1}{2}}}{2}}", "\\frac{\\sqrt{\\frac{1}{2}}}{2}"),  # braces three deep
        ("\\text{a", "\\text{a"),
        ("\\text{a}}", "a}"),
        ("}\\text{{a}", "}\\text{{a}"),
        ("\\text{\\}a}", "\\}a"),
        ("\\context{a}", "\\context{a}"),
    ],
)
def test_unwrapping(text: str, plain: str) -> None:
    assert unwrap(text) == plain


@pytest.mark.parametrize(
    "tail",
    [
        "\\text{" * 50,
        "\\boxed{" * 42,
        "\\text{" * 25 + "}" * 125,
        "{" * 150 + "}" * 150,
        "Answer:" + "$" * 293,
        "Answer: " + "\\text{a{b{c" * 25,
        "Answer: " + "\\text{{}" * 35,
        "answer" * 50,
        "answer" + " " * 294,
        "answer:" + "\n" * 293,
        "Answer: " + "1," * 146,
        "Answer: -" + "1" * 3 + ",111" * 72 + "x",
        "Answer: " + "\\frac" * 58,
        "#### " * 60,
        "#### -" + "," * 294,
    ],
)
@pytest.mark.parametrize("name", ["math_dapo", "gsm8k"])
def test_a_hostile_tail_takes_no_time(name: str, tail: str) -> None:
    # These two rules run without a time limit.
    assert SCORERS[name].window_characters == 300
    started = time.process_time()
    SCORERS[name](tail[:300], "1")
    assert time.process_time() - started < 0.05


@settings(deadline=None)
@given(response=st.text(alphabet="answer: \\textboxdfrac{}$#19,.-=\n", max_size=300), truth=st.text(max_size=20))
def test_rules_without_a_time_limit_never_raise(response: str, truth: str) -> None:
    for scorer in SCORERS.values():
        if scorer.window_characters is not None:
            assert scorer(response, truth).verdict in ("right", "wrong", "no_answer")
            padded = "x" * 1000 + response.rjust(scorer.window_characters)
            assert scorer(padded, truth) == scorer(padded[-scorer.window_characters :], truth)


@pytest.mark.parametrize(
    ("response", "verdict", "answer"),
    [
        ("5 + 13 = 18\n#### 18", "right", "18"),
        ("#### 17\n#### 18", "right", "18"),  # the last one
        ("#### 18\n#### 17", "wrong", "17"),
        ("#### 1,8", "right", "18"),
        ("#### -18", "wrong", "-18"),
        ("#### 18.", "wrong", "18."),  # compared as a string, as verl does
        ("#### 18.0", "wrong", "18.0"),
        ("#### $18", "no_answer", None),
        ("####18", "no_answer", None),
        ("the answer is 18", "no_answer", None),
        ("#### 18" + " " * 293, "right", "18"),  # the 300 characters begin with the first #
        ("#### 18" + " " * 294, "no_answer", None),
        ("", "no_answer", None),
    ],
)
def test_gsm8k(response: str, verdict: str, answer: str | None) -> None:
    score = score_gsm8k(response, "18")
    assert (score.verdict, score.answer) == (verdict, answer)
    assert score.value == score.acc == float(verdict == "right")


@pytest.mark.parametrize(
    ("response", "value", "verdict"),
    [
        # 0.9 for the answer, 0.1 for the format
        ("<think>...</think> \\boxed{13.5}", 1.0, "right"),
        ("so \\boxed{13.5}", 0.9, "right"),
        ("<think>...</think> \\boxed{13}", 0.1, "wrong"),
        ("so \\boxed{13}", 0.0, "wrong"),
        ("<think>13.5</think> 13.5", 0.0, "no_answer"),
        ("<think>\\boxed{13.5}</think>", 0.9, "right"),  # the box must follow the thought for the format
        (" <think></think>\\boxed{13.5}", 0.9, "right"),  # which must begin the response
        ("<think></think>\\boxed{13} \\boxed{13.5}", 1.0, "right"),
        ("<think></think>\\boxed{a} \\boxed{13.5", 0.1, "no_answer"),  # the last box counts, and never closes
        ("<think></think>\\boxed{\\frac{27}{2}}", 1.0, "right"),  # the same value
        ("<think></think>\\boxed{ }", 0.1, "no_answer"),
        ("<think></think>\\boxed{9^{9^{9^9}}}", 0.1, "wrong"),  # not computed
        ("", 0.0, "no_answer"),
    ],
)
def test_geo3k(response: str, value: float, verdict: str) -> None:
    score = score_geo3k(response, "13.5")
    assert (score.value, score.verdict) == (pytest.approx(value), verdict)
    assert score.acc == float(verdict == "right")


def test_geo3k_compares_values_as_latex() -> None:
    assert are_equal("5\\sqrt{2}", "5 \\sqrt { 2 }")
    assert are_equal("\\sqrt{50}", "5 \\sqrt { 2 }")
    assert not are_equal("\\sqrt{51}", "5 \\sqrt { 2 }")
    assert not are_equal("{{{", "5")


def test_the_format_of_a_long_hostile_response_is_found_in_linear_time() -> None:
    started = time.process_time()
    assert not has_format("<think>" + "</think>\\boxed{" * 10_000)
    assert time.process_time() - started < 0.5


@pytest.mark.parametrize(
    ("data_source", "scorer"),
    [
        ("arithmetic", "math_dapo"),
        ("math_dapo", "math_dapo"),
        ("openai/gsm8k", "gsm8k"),
        ("hiyouga/geometry3k", "geo3k"),
        ("cflue", "choice"),
    ],
)
def test_routing(data_source: str, scorer: str) -> None:
    assert scorer_for(data_source) is SCORERS[scorer]


def test_every_route_leads_to_a_scorer() -> None:
    assert set(DATA_SOURCES.values()) == set(SCORERS)


def test_entries_of_the_configuration_go_before_the_table() -> None:
    table = routes(("DAPO-17k=math_dapo", "a=b=choice", " cflue = gsm8k "))
    assert (table["DAPO-17k"], table["a=b"], table["cflue"]) == ("math_dapo", "choice", "gsm8k")
    assert table["arithmetic"] == "math_dapo"


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (("mine",), "'mine', which is not DATA_SOURCE=SCORER .* choice, geo3k, gsm8k, math_dapo"),
        (("=gsm8k",), "'=gsm8k', which is not DATA_SOURCE=SCORER"),
        (("mine=gsm9k",), "'mine=gsm9k', which is not DATA_SOURCE=SCORER with a known scorer"),
        (("mine=gsm8k", "mine=choice"), "'mine' two scorers, gsm8k and choice"),
    ],
)
def test_a_bad_entry_is_named(entries: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        require_scorers((), RewardConfig(scorers=entries), CustomRewardConfig())


def test_an_unknown_data_source_names_the_known_ones() -> None:
    with pytest.raises(
        DataError,
        match=r"data_source 'gsm9k' has no scorer; known are .*arithmetic, .*data_source .*reward\.scorers",
    ):
        require_scorers({"arithmetic", "gsm9k"}, RewardConfig(), CustomRewardConfig())
    require_scorers({"arithmetic", "gsm9k"}, RewardConfig(scorers=("gsm9k=gsm8k",)), CustomRewardConfig())


if "DAPO_TEST_DATA" in os.environ:
    DATA = Path(os.environ["DAPO_TEST_DATA"])

    def test_every_solution_of_the_real_gsm8k_scores_one() -> None:
        rows = [json.loads(line) for line in (DATA / "gsm8k" / "test.jsonl").read_text("utf-8").splitlines()]
        truths = [row["answer"].rpartition("#### ")[2].replace(",", "") for row in rows]
        scores = [score_gsm8k(row["answer"], truth).value for row, truth in zip(rows, truths, strict=True)]
        assert scores == [1.0] * 1319
        wrong = [score_gsm8k(row["answer"], f"{truth}1").value for row, truth in zip(rows, truths, strict=True)]
        assert wrong == [0.0] * 1319

    def test_the_right_choice_of_the_real_geometry3k_scores_one_and_others_do_not() -> None:
        rows = [
            json.loads(line) for line in (DATA / "geometry3k" / "sample.jsonl").read_text("utf-8").splitlines()
        ]
        assert len(rows) == 42
        for row in rows:
            for choice in {row["answer"], *(row["choices"] or ())}:
                score = score_geo3k(f"<think>.</think>\\boxed{{{choice}}}", row["answer"])
                assert score.value == pytest.approx(1.0 if choice == row["answer"] else 0.1)
