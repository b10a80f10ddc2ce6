"""Multiple choice by log-probs: requests, likeliest options, unsuitable problems and servers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eval import RequestsRefused
from eval.endpoint import Endpoint, Sampling
from eval.logs.regrade import regrade
from eval.problems import ProblemsError
from eval.problems.evaluation_sets import load_set
from eval.problems.pictures import PictureStore
from eval.report.compare import compare
from eval.report.report import make_report, render_markdown
from eval.results.rows import read_rows
from flows.config import load_config_or_defaults
from tasks.data.prepare import write_held_out
from tasks.data.sources import eval_sources
from tests.evaluations import evaluate
from tests.integration.arithmetic_server import ArithmeticServer, running

SAMPLING = Sampling(max_tokens=64, extra_body={"add_special_tokens": False})
LISTED = "Which is a colour?\n\nA. red\nB. seven\n(C) Monday"
CHOICES = ["red", "very very blue", "seven"]


@pytest.fixture
def server() -> Iterator[ArithmeticServer]:
    with running() as server:
        server.words = {"A": -0.5, "B": -2.0, "C": -3.0}
        server.words |= {"red": -2.0, "very": -0.75, "blue": -1.0, "seven": -5.0}
        yield server


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_likeliest_option_is_the_answer_as_in_lm_eval(
    server: ArithmeticServer, tmp_path: Path
) -> None:
    path = written(
        tmp_path,
        {"problem": LISTED, "answer": "A"},
        {"problem": f"{LISTED}\n\nReason, and put the letter within \\boxed{{}}.", "answer": "C"},
        {"problem": "The sky is", "choices": CHOICES, "answer": "B"},
        {"problem": "The ruby is", "choices": CHOICES, "answer": "A"},
        {"problem": "Grass is", "choices": CHOICES, "answer": "B"},
    )
    asked = load_set(path, mode="loglikelihood")
    for side in ("before", "after"):
        summary = evaluate(asked, Endpoint(server.url, "m"), SAMPLING, tmp_path / side)
    rows = list(read_rows(tmp_path / "before").values())
    # Sums: red -2, blue -0.75 - 0.75 - 1 = -2.5, seven -5. By character: red -2/3, blue -2.5/14,
    # seven -1.
    assert rows[2].details == {"options": CHOICES, "log_probs": [-2.0, -2.5, -5.0]}
    assert [row.answer for row in rows] == ["A", "A", "red", "red", "red"]
    assert [row.gold for row in rows] == ["A", "C", "very very blue", "red", "very very blue"]
    assert [row.verdict for row in rows] == ["right", "wrong", "wrong", "right", "wrong"]
    # acc_norm: A right, C wrong, blue, not red, blue
    assert (summary.accuracy, summary.acc_norm) == (0.4, 0.6)
    path_of, _, body = server.requests[0]
    assert path_of == "/v1/completions"
    assert {key: value for key, value in body.items() if key not in ("model", "prompt")} == {
        "max_tokens": 1,
        "temperature": 0.0,
        "echo": True,
        "logprobs": 1,
        "add_special_tokens": False,
    }
    prompts = {tuple(body["prompt"]) for _, _, body in server.requests}
    start = f"{LISTED}\nAnswer:"
    assert (start, f"{start} A", f"{start} B", f"{start} C") in prompts
    settings = json.loads((tmp_path / "before" / "settings.json").read_text())
    assert (settings["api"], settings["grader"]) == (
        "completions, log-probs of options",
        "loglikelihood/1",
    )
    markdown = render_markdown(make_report(compare(tmp_path / "before", tmp_path / "after"), []))
    assert any(
        line.split()[1:5] == ["acc_norm", "|", "60.0", "%"] for line in markdown.splitlines()
    )
    assert regrade(tmp_path / "before").summary.acc_norm == 0.6  # stored log-probs are kept


def test_a_template_file_and_a_system_prompt_come_before_the_options(tmp_path: Path) -> None:
    (tmp_path / "shots.txt").write_text("Q: 1 + 1?\nA: 2\n\nQ: {problem}\nA:")
    path = written(
        tmp_path,
        {"problem": "The sky is", "choices": {"text": CHOICES, "label": [1, 2, 3]}, "answer": 3},
    )
    asked = load_set(path, None, str(tmp_path / "shots.txt"), "chat", "Be right.", "loglikelihood")
    [item] = asked.items
    assert item.prompt == "Be right.\n\nQ: 1 + 1?\nA: 2\n\nQ: The sky is\nA:"
    assert (item.options, item.gold) == (tuple(CHOICES), "seven")  # ARC's labels may be numbers


def golds_of(path: Path) -> list[str]:
    return [item.gold for item in load_set(path, mode="loglikelihood").items]


NUMBERS = ["1", "2", "3", "4"]


@pytest.mark.parametrize(
    ("answers", "golds"),
    [
        ([3, 1], ["4", "2"]),  # integers are indices, as in MMLU
        (["3", "1", "0"], ["4", "2", "1"]),  # 0 is not a text: all are indices, as in HellaSwag
        (["3", "1", "4"], ["3", "1", "4"]),  # 4 is not an index: all are texts
        (["D", "B"], ["4", "2"]),
    ],
)
def test_the_answers_of_a_set_are_read_in_one_way(
    tmp_path: Path, answers: list[int | str], golds: list[str]
) -> None:
    solved = [
        {"problem": f"p{n}", "choices": NUMBERS, "answer": one} for n, one in enumerate(answers)
    ]
    assert golds_of(written(tmp_path, *solved)) == golds
    chats = [
        {
            "data_source": "mine",
            "prompt": [{"role": "user", "content": one["problem"]}],
            "reward_model": {"ground_truth": one["answer"]},
            "extra_info": {"choices": NUMBERS},
        }
        for one in solved
    ]
    path = written(tmp_path, *chats)
    assert golds_of(path) == golds
    config = load_config_or_defaults(None, [f"data.eval={path}"])
    # keeps integers apart from texts
    prepared, pictures = tmp_path / "prepared.parquet", PictureStore(tmp_path)
    write_held_out(config, eval_sources(config), prepared, pictures)
    assert golds_of(prepared) == golds


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"problem": "1 + 1?", "answer": "2"}, "has 0 options and the answer '2'"),
        ({"problem": "A. one\nC. two", "answer": "A"}, "has 0 options"),
        ({"problem": LISTED, "answer": "D"}, "not 'D' of the 3 options"),
        ({"problem": LISTED, "answer": "A, C"}, "needs one right option of several"),
    ],
)
def test_problems_without_one_right_option_are_refused(
    tmp_path: Path, row: dict[str, Any], said: str
) -> None:
    with pytest.raises(ProblemsError, match=said):
        load_set(written(tmp_path, row), mode="loglikelihood")


def test_a_server_without_log_probs_of_prompts_is_refused(
    server: ArithmeticServer, tmp_path: Path
) -> None:
    server.words = {}  # log-probs of generated tokens only, as some servers return
    asked = load_set(written(tmp_path, {"problem": LISTED, "answer": "A"}), mode="loglikelihood")
    with pytest.raises(RequestsRefused, match="returns no log-probs of prompts"):
        evaluate(asked, Endpoint(server.url, "m"), SAMPLING, tmp_path / "out")


def test_a_scorer_with_loglikelihood_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"evaluate\.scorer=geo3k would be ignored by evaluate\.mode=loglikelihood"
    ):
        load_config_or_defaults(None, ["evaluate.mode=loglikelihood", "evaluate.scorer=geo3k"])
