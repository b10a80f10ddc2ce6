"""Multiple choice by log-probs: what is sent, what is likeliest, what problems and servers do not suit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eval import RequestsRefused
from eval.compare import compare
from eval.endpoint import Endpoint, Sampling
from eval.problems import ProblemsError
from eval.problems.registry import load_set
from eval.regrade import regrade
from eval.report import make_report, render_markdown
from eval.results import read_rows
from eval.run import evaluate
from flows.config import load_config_or_defaults
from tests.integration.arithmetic_server import ArithmeticServer, running

SAMPLING = Sampling(max_tokens=64, extra_body={"add_special_tokens": False})
LISTED = "Which is a colour?\n\nA. red\nB. seven\n(C) Monday"
CHOICES = ["red", "very very blue", "seven"]


@pytest.fixture
def server() -> Iterator[ArithmeticServer]:
    with running() as server:
        server.words = {"A": -0.5, "B": -2.0, "C": -3.0, "red": -2.0, "very": -0.75, "blue": -1.0, "seven": -5.0}
        yield server


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_likeliest_option_is_the_answer_as_lm_eval_finds_it(server: ArithmeticServer, tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {"problem": LISTED, "answer": "A"},
        {"problem": f"{LISTED}\n\nReason, and put the letter within \\boxed{{}}.", "answer": "C"},
        {"problem": "The sky is", "choices": CHOICES, "answer": "very very blue"},
        {"problem": "The ruby is", "choices": CHOICES, "answer": "0"},  # a number, as in HellaSwag
        {"problem": "Grass is", "choices": CHOICES, "answer": "B"},
    )
    asked = load_set(path, mode="loglikelihood")
    for side in ("before", "after"):
        summary = evaluate(asked, [Endpoint(server.url, "m")], SAMPLING, tmp_path / side)
    rows = list(read_rows(tmp_path / "before").values())
    # Sums: red -2, blue -0.75 - 0.75 - 1 = -2.5, seven -5. By character: red -2/3, blue -2.5/14, seven -1.
    assert rows[2].details == {"options": CHOICES, "log_probs": [-2.0, -2.5, -5.0]}
    assert [row.answer for row in rows] == ["A", "A", "red", "red", "red"]
    assert [row.gold for row in rows] == ["A", "C", "very very blue", "red", "very very blue"]
    assert [row.verdict for row in rows] == ["right", "wrong", "wrong", "right", "wrong"]
    assert (summary.accuracy, summary.acc_norm) == (0.4, 0.6)  # acc_norm: A right, C wrong, blue, not red, blue
    path_of, _, body = server.requests[0]
    assert path_of == "/v1/completions"
    assert {key: value for key, value in body.items() if key not in ("model", "prompt")} == {
        "max_tokens": 1, "temperature": 0.0, "echo": True, "logprobs": 1, "add_special_tokens": False,
    }  # fmt: skip
    prompts = {tuple(body["prompt"]) for _, _, body in server.requests}
    start = f"{LISTED}\nAnswer:"
    assert (start, f"{start} A", f"{start} B", f"{start} C") in prompts
    settings = json.loads((tmp_path / "before" / "settings.json").read_text())
    assert (settings["api"], settings["grader"]) == ("completions, log-probs of options", "loglikelihood/1")
    markdown = render_markdown(make_report(compare(tmp_path / "before", tmp_path / "after"), []))
    assert any(line.split()[1:5] == ["acc_norm", "|", "60.0", "%"] for line in markdown.splitlines())
    assert regrade(tmp_path / "before").summary.acc_norm == 0.6  # what was weighed stays


def test_a_template_of_the_user_s_own_and_a_system_prompt_come_before_the_options(tmp_path: Path) -> None:
    (tmp_path / "shots.txt").write_text("Q: 1 + 1?\nA: 2\n\nQ: {problem}\nA:")
    path = written(
        tmp_path, {"problem": "The sky is", "choices": {"text": CHOICES, "label": [1, 2, 3]}, "answer": 3}
    )
    asked = load_set(path, None, str(tmp_path / "shots.txt"), "chat", "Be right.", "loglikelihood")
    [item] = asked.items
    assert item.prompt == "Be right.\n\nQ: 1 + 1?\nA: 2\n\nQ: The sky is\nA:"
    assert (item.options, item.gold) == (tuple(CHOICES), "seven")  # ARC's labels may be numbers


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"problem": "1 + 1?", "answer": "2"}, "has 0 options and the answer '2'; list them as lines A., B."),
        ({"problem": "A. one\nC. two", "answer": "A"}, "has 0 options"),
        ({"problem": LISTED, "answer": "D"}, "has 3 options and the answer 'D'"),
        ({"problem": LISTED, "answer": "A, C"}, "needs one right option of several"),
    ],
)
def test_problems_without_one_right_option_are_refused(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    with pytest.raises(ProblemsError) as caught:
        load_set(written(tmp_path, row), mode="loglikelihood")
    assert said in str(caught.value)


def test_a_server_without_log_probs_of_prompts_is_refused(server: ArithmeticServer, tmp_path: Path) -> None:
    server.words = {}  # of what it generated alone, as some servers do
    asked = load_set(written(tmp_path, {"problem": LISTED, "answer": "A"}), mode="loglikelihood")
    with pytest.raises(
        RequestsRefused, match=r"gives no log-probs of prompts .*evaluate\.mode=loglikelihood needs"
    ):
        evaluate(asked, [Endpoint(server.url, "m")], SAMPLING, tmp_path / "out")


def test_a_scorer_beside_it_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"evaluate\.scorer=geo3k would be ignored by evaluate\.mode=loglikelihood"
    ):
        load_config_or_defaults(None, ["evaluate.mode=loglikelihood", "evaluate.scorer=geo3k"])
