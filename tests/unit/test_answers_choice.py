"""Multiple choice: training reward, a user's reward file and evaluation read every format alike."""

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_core.errors import DataError
from dapo_core.reward.scorers import score_choice
from eval.answers.choice import find_options
from eval.answers.grading import ChoiceGrader
from tests.labelled import rows

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.fixture(scope="module")
def finance_reward() -> Callable[..., dict[str, Any]]:
    spec = importlib.util.spec_from_file_location(
        "finance_choice", CONFIGS / "rewards" / "finance_choice.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[..., dict[str, Any]] = module.compute_score
    return function


@pytest.mark.parametrize(
    ("options", "response"), [(row["options"], row["response"]) for row in rows("choices")]
)
def test_training_and_evaluation_use_the_same_rule(
    options: str, response: str, finance_reward: Callable[..., dict[str, Any]]
) -> None:
    assert find_options(response) == options
    for gold in ("A", "AC", options or "B"):
        is_right = options == gold
        graded = ChoiceGrader().grade(response, "stop", gold)
        score = score_choice(response, gold)
        own = finance_reward("cflue", response, gold)
        verdict = "right" if is_right else "wrong" if options else "no_answer"
        assert (
            (graded.verdict, graded.answer or "")
            == (score.verdict, score.answer or "")
            == (verdict, options)
        )
        assert score.value == own["score"] == (1.0 if is_right else -1.0)
        assert (score.acc, own["pred"]) == (own["acc"], options)


def test_gold_letters_are_a_set_and_a_truncated_choice_is_never_right() -> None:
    assert score_choice("\\boxed{CA}", "C, A").verdict == "right"
    grader = ChoiceGrader()
    assert grader.grade("\\boxed{AC} and", "length", "AC").verdict == "truncated"
    assert grader.grade(None, None, "AC").verdict == "request_failed"
    for truth in ("", "K", "the first", "a bank"):
        with pytest.raises(DataError, match=r"ground_truth .* names no options A to J"):
            score_choice("\\boxed{A}", truth)


@given(st.text(alphabet="A C,\\boxed{}answer:答案<>/think\n", max_size=80))
def test_hostile_text_never_raises(text: str) -> None:
    assert score_choice(text, "A").verdict in ("right", "wrong", "no_answer")


@pytest.mark.slow
def test_a_long_hostile_response_takes_linear_time() -> None:
    for piece in (
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
    ):
        started = time.process_time()
        score_choice(piece * (80_000 // len(piece)), "A")
        assert time.process_time() - started < 2.0, piece
