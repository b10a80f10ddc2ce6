"""Multiple choice: training reward, a user's reward file and the evaluation read every form alike."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_core.errors import DataError
from dapo_core.reward.scorers import score_choice
from eval.answers.choice import find_options, option_letters
from eval.answers.grading import ChoiceGrader

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FORMS = {
    "\\boxed{A}": "A",
    "$\\boxed{A}$": "A",
    "\\boxed {A}": "A",
    "\\boxed{ A }": "A",
    "\\boxed{\\text{A}}": "A",
    "\\boxed{\\textbf{A}}": "A",
    "\\boxed{\\mathrm{\\textbf{A}}}": "A",
    "\\fbox{A}": "A",
    "\\boxed{(A)}": "A",
    "\\boxed{**A**}": "A",
    "\\boxed{Option A}": "A",
    "\\boxed{选项A}": "A",
    "\\boxed{A. 货币市场}": "A",
    "\\boxed{A: Bonds}": "A",
    "\\boxed{A.}": "A",
    "\\boxed{Ａ}": "A",  # full width
    "\\boxed{AC}": "AC",
    "\\boxed{CA}": "AC",
    "\\boxed{AAC}": "AC",
    "\\boxed{A,C}": "AC",
    "\\boxed{A, C}": "AC",
    "\\boxed{A、C}": "AC",
    "\\boxed{A和C}": "AC",
    "\\boxed{A and C}": "AC",
    "\\boxed{\\text{A 和 C}}": "AC",
    "\\boxed{A}\\boxed{C}": "AC",
    "\\boxed{C}\\boxed{A}、\\boxed{B}。": "ABC",
    "\\boxed{A} or \\boxed{B}": "AB",  # hedging names both
    "\\boxed{A" + " " * 30 + "}\\boxed{B}": "AB",
    "\\boxed{A} is tempting, but \\boxed{B}": "B",
    "不是\\boxed{A}而是\\boxed{B}": "B",
    "\\boxed{A}\n再想一想，应为 \\boxed{B}": "B",
    "\\boxed{A}" + "x" * 400: "A",
    "<think>\\boxed{A}</think>\\boxed{B}": "B",
    "\\boxed{A}</think>\\boxed{B}</think>\\boxed{C}": "C",
    "<answer>A</answer> no, <answer>B</answer>": "B",
    "\\boxed{A}<answer>\\boxed{B}</answer>\\boxed{C}": "B",
    "<think>x</think><answer>答案选项为\\boxed{A}、\\boxed{D}。</answer>": "AD",
    "Answer: A": "A",
    "answer is A, C": "AC",
    "**Answer:** **D**": "D",
    "**Answer: A and C**": "AC",
    "Answer: B. Bonds": "B",
    "Answer: (B) Bonds": "B",
    "The answer is (C)": "C",
    "Answer: C\nI am sure the answer is good": "C",
    "Answer: C\nAnswer: D": "D",
    "Answer: \\boxed{B}": "B",
    "答案：A": "A",
    "正确答案：ＡＣ": "AC",
    "答案是A和C两项": "AC",
    "答案选项为A、B、D。": "ABD",
    "<think>\\boxed{A}</think>答案：BD": "BD",
    "G": "G",
    "**A**": "A",
    "(A)": "A",
    "A, C": "AC",
    "": "",
    "no idea\nat all": "",
    "I choose A": "",
    "\\boxed{A股}": "",
    "答案：A股": "",
    "A股上涨": "",
    "\\boxed{A bank}": "",
    "Answer: A bank lends.": "",
    "Answer: A-level": "",
    "Answer: Banana": "",
    "\\boxed{a}": "",  # options are capitals
    "Answer: b": "",
    "\\boxed{H}": "",
    "\\boxed{AH}": "",
    "\\boxed{A1}": "",
    "\\boxed{4}": "",
    "\\boxed{}": "",
    "\\boxed{A}\\boxed{none}": "",
    "\\boxed{A": "",
    "\\boxed{A} \\boxed{B": "",  # cut off
    "A\n\nB": "",
    "<think>\\boxed{A}": "",
    "\\boxed{A}<answer></answer>": "",
    "{{}}}\\}{": "",
}


@pytest.fixture(scope="module")
def finance_reward() -> Callable[..., dict[str, Any]]:
    spec = importlib.util.spec_from_file_location("finance_choice", CONFIGS / "rewards" / "finance_choice.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[..., dict[str, Any]] = module.compute_score
    return function


@pytest.mark.parametrize(("response", "options"), FORMS.items())
def test_a_model_is_trained_and_graded_by_one_rule(
    response: str, options: str, finance_reward: Callable[..., dict[str, Any]]
) -> None:
    assert find_options(response) == options
    for gold in ("A", "AC", options or "B"):
        is_right = options == gold
        graded = ChoiceGrader().grade(response, "stop", gold)
        score = score_choice(response, gold)
        own = finance_reward("cflue", response, gold)
        verdict = "right" if is_right else "wrong" if options else "no_answer"
        assert (graded.verdict, graded.answer or "") == (score.verdict, score.answer or "") == (verdict, options)
        assert score.value == own["score"] == (1.0 if is_right else -1.0)
        assert (score.acc, own["pred"]) == (own["acc"], options)


def test_gold_letters_are_a_set_and_a_cut_off_choice_is_never_right() -> None:
    assert score_choice("\\boxed{CA}", "C, A").verdict == "right"
    grader = ChoiceGrader()
    assert grader.grade("\\boxed{AC} and", "length", "AC").verdict == "truncated"
    assert grader.grade(None, None, "AC").verdict == "request_failed"


@pytest.mark.parametrize("truth", ["", "H", "the first", "a"])
def test_a_ground_truth_without_options_is_an_error(truth: str) -> None:
    with pytest.raises(DataError, match=r"ground_truth .* names no options A to G"):
        score_choice("\\boxed{A}", truth)


@given(st.text(alphabet="A C,\\boxed{}answer:答案<>/think\n", max_size=80))
def test_hostile_text_never_raises(text: str) -> None:
    assert score_choice(text, "A").verdict in ("right", "wrong", "no_answer")


@pytest.mark.parametrize(
    "piece",
    [
        "\\boxed{",
        "\\text{",
        "{",
        "}",
        "\\boxed{A}",
        "\\boxed ",
        "answer",
        "answer:",
        "A, ",
        " ",
        "<answer>",
        "<think>",
    ],
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
