"""Scoring rules on realistic responses, their routing, and the overlong penalty."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_core.config.training import CustomRewardConfig, OverlongConfig, RewardConfig
from dapo_core.errors import ConfigError, DataError
from dapo_core.reward.routing import require_scorers, routes
from dapo_core.reward.scorers import (
    DATA_SOURCES,
    SCORERS,
    VERL_SCORERS,
    has_geo3k_format,
    overlong_penalty,
    score_exact,
    score_geo3k,
    score_gsm8k,
    score_math,
    score_math_as_verl,
)
from eval.answers.grading import grade
from eval.answers.math_dapo import unwrap
from eval.problems.registry import SETS
from tests.labelled import rows

# (response, verdict of this project's rule, verdict of verl's, which reads only the last answer
# line)
PLACES = [
    ("Answer: 18\nNo, again.\nAnswer: 19", "right", "right"),  # the last one counts
    ("Answer: 19\nNo, again.\nAnswer: 18", "wrong", "wrong"),
    ("ANSWER : 19", "right", "right"),
    ("answer:\n19", "right", "right"),
    ("Answer:\n\\boxed{19}", "right", "right"),
    ("So \\boxed{18}, no, \\boxed{19}.", "right", "no_answer"),  # boxed counts without `Answer:`
    ("\\boxed{19} but Answer: 18", "wrong", "wrong"),  # `Answer:` takes precedence over boxed
    ("Answer: 19\nand then \\boxed{18}", "right", "right"),
    ("Answer: 19" + " " * 290, "right", "right"),  # the 300 characters start at the `A`
    ("Answer: 19" + " " * 291, "no_answer", "no_answer"),  # and here after it
    ("Answer: 19" + "." * 400 + "Answer: 18", "wrong", "wrong"),
    ("I do not know", "no_answer", "no_answer"),
    ("", "no_answer", "no_answer"),
    ("Answer:", "no_answer", "no_answer"),
    ("Answer:   ", "no_answer", "no_answer"),
    ("\\boxed{}", "no_answer", "no_answer"),
    ("\\boxed{19", "no_answer", "no_answer"),
]


@pytest.mark.parametrize(("response", "verdict", "verdict_in_verl"), PLACES)
def test_which_answer_in_the_response_counts(
    response: str, verdict: str, verdict_in_verl: str
) -> None:
    for score, expected in (
        (score_math(response, "19"), verdict),
        (score_math_as_verl(response, "19"), verdict_in_verl),
    ):
        value = 1.0 if expected == "right" else -1.0
        assert (score.verdict, score.value, score.acc) == (expected, value, value > 0)
        assert score.answer == {"right": "19", "wrong": "18", "no_answer": None}[expected]


def test_math_dapo_matches_verls_rule_exactly_in_compat_mode() -> None:
    for row in rows("math_dapo"):  # each derived by hand
        response = f"So it is.\nAnswer: {row['answer']}"
        assert VERL_SCORERS["math_dapo"](response, row["gold"]).acc == float(row["verl"]), row
        assert SCORERS["math_dapo"](response, row["gold"]).acc == float(row["ours"]), row


@pytest.mark.parametrize(
    ("num_tokens", "penalty", "in_verl"),
    [
        # limit 100, buffer 20, factor 2: 0 up to 80, then -2 * (tokens - 80) / 20
        (0, 0.0, 0.0),
        (80, 0.0, 0.0),
        (81, -0.1, -0.1),
        (90, -1.0, -1.0),
        (100, -2.0, -2.0),
        (110, -2.0, -3.0),  # clamped; verl continues: -2 * (110 - 80) / 20
        (10_000, -2.0, -992.0),
    ],
)
def test_overlong_penalty(num_tokens: int, penalty: float, in_verl: float) -> None:
    overlong = OverlongConfig(buffer_tokens=20, penalty_factor=2.0)
    assert overlong_penalty(num_tokens, 100, overlong) == pytest.approx(penalty, abs=1e-12)
    unclamped = overlong_penalty(num_tokens, 100, overlong, is_clamped=False)
    assert unclamped == pytest.approx(in_verl, abs=1e-12)
    assert overlong_penalty(num_tokens, 100, overlong.model_copy(update={"enabled": False})) == 0.0


def test_text_commands_are_unwrapped_however_deep_and_unmatched_braces_stay() -> None:
    for text, plain in {
        "\\boxed{\\text{\\mathrm{\\textbf{x}}}} b": "x b",
        "\\text{\\frac{\\sqrt{\\frac{1}{2}}}{2}}": "\\frac{\\sqrt{\\frac{1}{2}}}{2}",
        "\\text{a": "\\text{a",
        "}\\text{{a}": "}\\text{{a}",
        "\\text{\\}a}}": "\\}a}",
        "\\context{a}": "\\context{a}",
    }.items():
        assert unwrap(text) == plain


@pytest.mark.parametrize("name", ["math_dapo", "gsm8k"])
def test_hostile_input_is_scored_in_linear_time(name: str) -> None:
    # these rules run without a time limit
    assert SCORERS[name].window_characters == 300
    for tail in (
        "\\text{" * 50,
        "{" * 150 + "}" * 150,
        "Answer:" + "$" * 293,
        "Answer: " + "\\text{a{b{c" * 25,
        "answer:" + "\n" * 293,
        "Answer: " + "1," * 146,
        "Answer: -" + "1" * 3 + ",111" * 72 + "x",
        "#### " * 60,
        "#### -" + "," * 294,
    ):
        started = time.process_time()
        SCORERS[name](tail[:300], "1")
        VERL_SCORERS[name](tail[:300], "1")
        assert time.process_time() - started < 0.1, tail[:20]


@pytest.mark.slow
@settings(deadline=None)
@given(
    response=st.text(alphabet="answer: \\textboxdfrac{}$#19,.-=\n", max_size=300),
    truth=st.text(max_size=20),
)
def test_rules_without_a_time_limit_never_raise(response: str, truth: str) -> None:
    for scorer in (*SCORERS.values(), VERL_SCORERS["math_dapo"]):
        quick = scorer.quickly(response, truth)
        assert quick is None or quick == scorer(response, truth)
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
        ("#### 18.", "wrong", "18."),  # compared as a string, like verl
        ("#### 18.0", "wrong", "18.0"),
        ("#### $18", "no_answer", None),
        ("####18", "no_answer", None),
        ("the answer is 18", "no_answer", None),
        ("#### 18" + " " * 293, "right", "18"),  # the 300 characters start at the first #
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
        # for the format, the box must follow the thinking
        ("<think>\\boxed{13.5}</think>", 0.9, "right"),
        (" <think></think>\\boxed{13.5}", 0.9, "right"),  # and <think> must start the response
        ("<think></think>\\boxed{13} \\boxed{13.5}", 1.0, "right"),
        # the last box counts, but is never closed
        ("<think></think>\\boxed{a} \\boxed{13.5", 0.1, "no_answer"),
        ("<think></think>\\boxed{\\frac{27}{2}}", 1.0, "right"),  # the same value
        ("<think></think>\\boxed{ }", 0.1, "no_answer"),
        ("<think></think>\\boxed{9^{9^{9^9}}}", 0.1, "wrong"),  # not evaluated
        ("", 0.0, "no_answer"),
    ],
)
def test_geo3k(response: str, value: float, verdict: str) -> None:
    score = score_geo3k(response, "13.5")
    assert (score.value, score.verdict) == (pytest.approx(value), verdict)
    assert score.acc == float(verdict == "right")


@pytest.mark.parametrize(
    ("response", "truth", "verdict", "is_in_place"),
    [
        (r"So $\boxed{\frac{1}{2}}$.", "0.5", "right", False),
        (r"$\boxed{x^2+2x+1}$", "(x+1)^2", "right", False),
        (r"\boxed{3} is wrong, it is \boxed{4}", "4", "right", True),
        ("Answer: 1,000", "1000", "right", True),
        ("Answer: 2\\sqrt{3}", r"\sqrt{12}", "right", False),
        (r"$\boxed{0.51}$", r"\frac12", "wrong", False),
        (r"$\boxed{4.5 \times 10^{33}}$", "4.5e33", "right", False),
        (r"$\boxed{17 \cdot 2}$", "34", "right", False),  # not computed
        (r"$\boxed{x=0}$", "y=0", "wrong", False),
        (r"$\boxed{4=3x}$", "9=3x", "wrong", False),
        ("\\boxed{4}\nAnswer: 5", "4", "right", True),  # a box takes precedence over `Answer:`
        ("\\boxed{4}\nAnswer: 5", "5", "wrong", True),
        (r"$\boxed{}$ and no more", "4", "no_answer", True),
        (r"\boxed{9^{9^{9^9}}}", "4", "wrong", False),
    ],
)
def test_a_response_is_rewarded_exactly_if_the_evaluation_counts_it_as_right(
    response: str, truth: str, verdict: str, is_in_place: bool
) -> None:
    score = score_exact(response, truth)
    is_right = verdict == "right"
    assert (score.verdict, score.value, score.acc) == (verdict, 2.0 * is_right - 1.0, is_right)
    assert grade(response, "stop", truth).verdict == verdict
    assert SCORERS["exact"].quickly(response, truth) == (score if is_in_place else None)


def test_geo3k_compares_latex_values_and_checks_the_format_in_linear_time() -> None:
    root = "5 \\sqrt { 2 }"
    answers = ("5\\sqrt{2}", "\\sqrt{50}", "\\sqrt{51}", "{{{")
    found = [score_geo3k(f"\\boxed{{{answer}}}", root).acc for answer in answers]
    assert found == [1.0, 1.0, 0.0, 0.0]
    started = time.process_time()
    assert not has_geo3k_format("<think>" + "</think>\\boxed{" * 10_000)
    assert time.process_time() - started < 0.5


def test_rules_ignore_the_thinking_and_verls_rules_read_it() -> None:
    answers = {"math_dapo": "Answer: 34", "exact": "\\boxed{34}", "gsm8k": "#### 34"}
    starts = ("<think>{}", "{}</think>It is hard.", "<think>a</think>b<think>{}")
    for name, answer in answers.items():
        for response in (start.format(answer) for start in starts):
            assert SCORERS[name](response, "34").verdict == "no_answer", (name, response)
        assert SCORERS[name](f"<think>Answer: 35 #### 35</think>{answer}", "34").verdict == "right"
    for name in ("math_dapo", "gsm8k"):
        assert VERL_SCORERS[name](f"<think>{answers[name]}", "34").verdict == "right"


def test_every_data_source_has_a_scorer_and_configuration_overrides_the_table() -> None:
    assert set(routes().values()) == set(SCORERS) == set(VERL_SCORERS)
    known = {"arithmetic": "exact", "openai/gsm8k": "gsm8k", "cflue": "choice", "math": "exact"}
    assert known.items() <= routes().items()
    assert not DATA_SOURCES.keys() & SETS.keys()
    table = routes(("DAPO-17k=math_dapo", "a=b=choice", " cflue = gsm8k "))
    added = {"DAPO-17k": "math_dapo", "a=b": "choice", "cflue": "gsm8k"}
    assert {**known, **added}.items() <= table.items()


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (("mine",), "'mine', which is not DATA_SOURCE=SCORER .* choice, exact, geo3k, gsm8k"),
        (("=gsm8k",), "'=gsm8k', which is not DATA_SOURCE=SCORER"),
        (("mine=gsm9k",), "'mine=gsm9k', which is not DATA_SOURCE=SCORER with a known scorer"),
        (("mine=math_verify",), r"use exact instead of math_verify; docs/data\.md"),
        (("mine=gsm8k", "mine=choice"), "'mine' to two scorers, gsm8k and choice"),
    ],
)
def test_a_bad_entry_of_reward_scorers_is_named(entries: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        require_scorers((), RewardConfig(scorers=entries), CustomRewardConfig())


def test_an_unknown_data_source_lists_the_known_ones() -> None:
    with pytest.raises(DataError, match="data_source 'gsm9k' has no scorer; known are"):
        require_scorers({"arithmetic", "gsm9k"}, RewardConfig(), CustomRewardConfig())
    with pytest.raises(DataError, match=r"'math_boxed' has no scorer; use exact instead"):
        require_scorers({"math_boxed"}, RewardConfig(), CustomRewardConfig())
    require_scorers(
        {"arithmetic", "gsm9k"}, RewardConfig(scorers=("gsm9k=gsm8k",)), CustomRewardConfig()
    )


if "DAPO_TEST_DATA" in os.environ:
    DATA = Path(os.environ["DAPO_TEST_DATA"])

    def read_rows(*names: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in DATA.joinpath(*names).read_text("utf-8").splitlines()]

    def test_all_real_gsm8k_solutions_score_one() -> None:
        rows = read_rows("gsm8k", "test.jsonl")
        truths = [row["answer"].rpartition("#### ")[2].replace(",", "") for row in rows]
        for wrong, expected in (("", 1.0), ("1", 0.0)):
            scores = [
                score_gsm8k(row["answer"], truth + wrong)
                for row, truth in zip(rows, truths, strict=True)
            ]
            assert [score.value for score in scores] == [expected] * 1319

    def test_only_the_right_choice_of_real_geometry3k_problems_scores_one() -> None:
        rows = read_rows("geometry3k", "sample.jsonl")
        assert len(rows) == 42
        for row in rows:
            for choice in {row["answer"], *(row["choices"] or ())}:
                score = score_geo3k(f"<think>.</think>\\boxed{{{choice}}}", row["answer"])
                assert score.value == pytest.approx(1.0 if choice == row["answer"] else 0.1)
