"""Multiple choice: what counts as naming an option, and what does not."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_core.errors import DataError
from dapo_core.reward.choice import find_options, last_row_of_boxes, option_letters, score_choice


@pytest.mark.parametrize(
    ("response", "options"),
    [
        ("\\boxed{A}", "A"),
        ("\\boxed{C}\\boxed{A}、\\boxed{B}。", "ABC"),
        ("\\boxed{A, C}", "AC"),
        ("\\boxed{CA}", "AC"),
        ("\\boxed{AAC}", "AC"),
        ("\\boxed{\\text{A 和 C}}", "AC"),
        ("$\\boxed{B}$", "B"),
        ("\\boxed{A. 货币市场}", "A"),
        ("\\boxed{Option B}", "B"),
        ("\\boxed{A} is tempting, but \\boxed{B}", "B"),  # another row
        ("不是\\boxed{A}而是\\boxed{B}", "B"),
        ("\\boxed{A} or \\boxed{B}", "AB"),  # hedging names both
        ("\\boxed{A} and \\boxed{B}", "AB"),
        ("\\boxed{A" + " " * 30 + "}\\boxed{B}", "AB"),
        ("<think>\\boxed{A}</think>\\boxed{B}", "B"),
        ("\\boxed{A}</think>\\boxed{B}</think>\\boxed{C}", "C"),
        ("<answer>A</answer> no, <answer>B</answer>", "B"),
        ("\\boxed{A}<answer>\\boxed{B}</answer>\\boxed{C}", "B"),
        ("Answer: A", "A"),
        ("answer is A, C", "AC"),
        ("**Answer:** **D**", "D"),
        ("Answer: B. Bonds", "B"),
        ("Answer: (B) Bonds", "B"),
        ("Answer: C\nI am sure the answer is good", "C"),
        ("Answer: C\nAnswer: D", "D"),
        ("正确答案：ＡＣ", "AC"),  # full width
        ("答案是A和C两项", "AC"),
        ("答案选项为A、B、D。", "ABD"),
        ("Answer: \\boxed{B}", "B"),
        ("G", "G"),
        ("A, C", "AC"),
    ],
)
def test_options_that_are_named(response: str, options: str) -> None:
    assert find_options(response) == options


@pytest.mark.parametrize(
    "response",
    [
        "",
        "I choose A",
        "Answer: Banana",
        "Answer: A bank",
        "Answer: A-level",
        "答案：A股",
        "Answer: b",
        "\\boxed{b}",
        "\\boxed{H}",
        "\\boxed{AH}",
        "\\boxed{A1}",
        "\\boxed{}",
        "\\boxed{A}\\boxed{none}",
        "\\boxed{A",
        "A\n\nB",
        "<think>\\boxed{A}",
        "\\boxed{A}<answer></answer>",
        "{{}}}\\}{",
    ],
)
def test_no_option_is_named(response: str) -> None:
    assert find_options(response) == ""
    assert score_choice(response, "A").verdict == "no_answer"


@pytest.mark.parametrize(
    ("truth", "verdict"), [("AC", "right"), ("C, A", "right"), ("A", "wrong"), ("ABC", "wrong"), ("B", "wrong")]
)
def test_the_set_must_be_exact(truth: str, verdict: str) -> None:
    score = score_choice("\\boxed{A}\\boxed{C}", truth)
    assert (score.verdict, score.answer) == (verdict, "AC")
    assert (score.value, score.acc) == ((1.0, 1.0) if verdict == "right" else (-1.0, 0.0))


@pytest.mark.parametrize("truth", ["", "H", "the first", "a"])
def test_a_ground_truth_without_options_is_an_error(truth: str) -> None:
    with pytest.raises(DataError, match=r"ground_truth .* names no options A to G"):
        score_choice("\\boxed{A}", truth)


def test_rows_of_boxes() -> None:
    assert last_row_of_boxes("\\boxed{A} then \\boxed{B}, \\boxed{\\frac{1}{2}}") == ["B", "\\frac{1}{2}"]
    assert last_row_of_boxes("\\boxed{A} \\boxed{B") == ["A"]
    assert last_row_of_boxes("{\\boxed{A}") == ["A"]


@given(st.text(alphabet="A C,\\boxed{}answer:答案<>/think\n", max_size=80))
def test_hostile_text_never_raises(text: str) -> None:
    assert score_choice(text, "A").verdict in ("right", "wrong", "no_answer")


@pytest.mark.parametrize(
    "piece", ["\\boxed{", "{", "}", "\\boxed{A}", "answer", "answer:", "A, ", " ", "<answer>"]
)
def test_a_long_hostile_response_takes_linear_time(piece: str) -> None:
    started = time.process_time()
    score_choice(piece * (80_000 // len(piece)), "A")
    assert time.process_time() - started < 2.0


if "DAPO_TEST_DATA" in os.environ:
    CFLUE = Path(os.environ["DAPO_TEST_DATA"]) / "cflue"

    def test_every_answer_of_cflue_names_its_options() -> None:
        answers = [row["answer"] for row in json.loads((CFLUE / "knowledge.json").read_text("utf-8"))]
        assert len(answers) == 3864
        assert [option_letters(answer) for answer in answers] == answers

    def test_every_reference_response_of_cflue_is_right_for_its_own_options_only() -> None:
        rows = json.loads((CFLUE / "cflue_mcq_dianjin_shape.json").read_text("utf-8"))
        assert len(rows) == 600
        for row in rows:
            truth = "".join(re.findall(r"\\boxed\{([A-G])\}", row["output"].partition("<answer>")[2]))
            assert score_choice(row["output"], truth).verdict == "right"
            assert score_choice(row["output"], "G" if truth != "G" else "A").verdict == "wrong"
