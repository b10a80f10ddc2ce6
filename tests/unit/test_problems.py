"""Files of problems: read alike by training, validation and evaluation, and refused with which message."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dapo_core.reward.routing import routes
from dapo_core.reward.scorers import SCORERS, VERL_SCORERS, score_math
from dapo_core.validation import held_out_prompts
from eval.answers.grading import ChoiceGrader, grade
from eval.problems import ProblemsError
from eval.problems.benchmarks import BENCHMARKS, TRAINING, load_set
from eval.problems.files import read_problems, require_columns
from eval.problems.items import Item
from eval.problems.sources import file_sha256
from flows.cli.evaluation import DATASETS
from tasks.config import EvaluateConfig
from tasks.dataset import build_dataset
from tests.configs import make_config
from tests.tiny_models import tiny_tokenizer


def load_items(path: Path, benchmark: str | None = None) -> list[Item]:
    return list(load_set(path, benchmark).items)


def parquet_row(index: int, **changes: Any) -> dict[str, Any]:
    row = {
        "data_source": "arith",
        "prompt": [{"role": "user", "content": f"{index} + 1 = ?"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(index + 1), "style": "rule"},
        "extra_info": {"index": index, "subject": "add", "level": 2},
    }
    return row | changes


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def math_row(index: int) -> dict[str, Any]:
    return {
        "problem": f"What is {{{index}}} + 1?",
        "solution": f"It is $\\boxed{{{index + 1}}}$.",
        "answer": "not read when the solution has a box",
        "subject": "Algebra",
        "level": 3,
        "unique_id": f"test/{index}.json",
    }


def test_rows_that_training_cannot_use_are_counted_with_their_numbers(tmp_path: Path) -> None:
    good = parquet_row(0, extra_info=None)
    prompts = ["1 + 1?", [], None, [{"role": "user", "content": None}], [{"role": "user", "content": " "}], ""]
    for prompt in prompts:
        (tmp_path / "rows.json").write_text(json.dumps([good, parquet_row(1, prompt=prompt)]))
        with pytest.raises(
            ProblemsError, match=r"1 with an empty prompt or one that is not chat messages \(rows 1\)"
        ):
            read_problems(tmp_path / "rows.json", (TRAINING,))
    golds = [parquet_row(n, reward_model={"ground_truth": gold}) for n, gold in enumerate(["0", " ", None] * 3)]
    with pytest.raises(ProblemsError, match=r"6 with no reward_model.ground_truth \(rows 1, 2, 4, 5, 7, \.\.\.\)"):
        read_problems(write_parquet(tmp_path / "train.parquet", golds), (TRAINING,))
    for extra_info in ({"when": datetime(2026, 1, 1)}, {"image": b"x"}, "text", [1]):
        path = write_parquet(tmp_path / "train.parquet", [good, parquet_row(1, extra_info=extra_info)])
        with pytest.raises(ProblemsError, match=r"1 with an extra_info that is not a struct .* \(rows 1\)"):
            read_problems(path, (TRAINING,))


def test_training_rows_keep_their_source_and_their_extra_info_and_may_repeat(tmp_path: Path) -> None:
    info = {"index": 7, "answers": [1.5, None], "more": {"level": 3}}
    row = parquet_row(0, extra_info=info, reward_model={"ground_truth": 0})
    first, second = read_problems(write_parquet(tmp_path / "train.parquet", [row, row]), (TRAINING,))
    assert first == second
    assert (first.data_source, first.gold, first.extra_info) == ("arith", "0", info)


def test_a_training_file_without_the_columns_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "train.parquet", [{"prompt": "x", "answer": "1"}])
    with pytest.raises(
        ProblemsError, match=r"lacks the columns data_source, reward_model \(it has answer, prompt\)"
    ):
        require_columns(path, TRAINING)
    path.write_bytes(b"not parquet at all")
    for broken in (path, tmp_path / "absent.parquet", tmp_path):
        with pytest.raises(ProblemsError, match=rf"^{broken} cannot be read as parquet: "):
            require_columns(broken, TRAINING)


def test_a_parquet_needs_what_training_needs_and_no_more(tmp_path: Path) -> None:
    rows = [
        {name: parquet_row(index)[name] for name in ("data_source", "prompt", "reward_model")}
        for index in range(2)
    ]
    items = load_items(write_parquet(tmp_path / "eval.parquet", rows))
    assert [(item.id, item.gold) for item in items] == [("row-0", "1"), ("row-1", "2")]


def test_parquet_messages_are_kept_as_they_are(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 1 = ?"}]
    path = write_parquet(tmp_path / "eval.parquet", [parquet_row(7), parquet_row(2, prompt=messages)])
    assert load_items(path) == [
        Item("7", ({"role": "user", "content": "7 + 1 = ?"},), "8", "add", "2"),
        Item("2", tuple(messages), "3", "add", "2"),
    ]


def test_jsonl_gets_the_aisbench_prompt_and_the_boxed_gold(tmp_path: Path) -> None:
    items = load_items(write_jsonl(tmp_path / "math.jsonl", [math_row(4)]))
    prompt = "What is {4} + 1?\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert items == [Item("test/4.json", ({"role": "user", "content": prompt},), "5", "Algebra", "3")]


def test_answer_is_the_gold_where_the_solution_has_no_box(tmp_path: Path) -> None:
    row = math_row(4) | {"solution": "five", "answer": "5"}
    assert load_items(write_jsonl(tmp_path / "math.jsonl", [row]))[0].gold == "5"


def test_empty_prompts_and_golds_are_counted_not_dropped(tmp_path: Path) -> None:
    rows = [
        parquet_row(0),
        parquet_row(1, prompt=[]),
        parquet_row(2, prompt=[{"role": "user", "content": "  "}]),
        parquet_row(3, reward_model={"ground_truth": "", "style": "rule"}),
    ]
    with pytest.raises(
        ProblemsError,
        match=r"of 4 rows, 2 with an empty prompt .*rows 1, 2\) and 1 with no reward_model.ground_truth \(rows 3",
    ):
        load_items(write_parquet(tmp_path / "eval.parquet", rows))


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProblemsError, match="has no rows"):
        load_items(write_jsonl(tmp_path / "math.jsonl", []))


def test_repeated_ids_are_counted(tmp_path: Path) -> None:
    rows = [math_row(1), math_row(2), math_row(1), math_row(2), math_row(3)]
    with pytest.raises(ProblemsError, match=r"2 ids are used more than once \(first: 'test/1.json'\)"):
        load_items(write_jsonl(tmp_path / "math.jsonl", rows))


def test_math500_asserts_500_rows(tmp_path: Path) -> None:
    assert (
        len(load_items(write_jsonl(tmp_path / "full.jsonl", [math_row(i) for i in range(500)]), "math500")) == 500
    )
    with pytest.raises(ProblemsError, match=r"499 rows, but math500 has exactly 500"):
        load_items(write_jsonl(tmp_path / "short.jsonl", [math_row(i) for i in range(499)]), "math500")


def test_unknown_benchmark_suggests_the_known_one(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "math.jsonl", [math_row(1)])
    with pytest.raises(ProblemsError, match=r"'math50' is not a benchmark; did you mean 'math500'\?"):
        load_items(path, "math50")


def test_broken_json_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "math.jsonl"
    path.write_text(json.dumps(math_row(1)) + "\n{torn\n")
    with pytest.raises(ProblemsError, match=r"math.jsonl, line 2: not JSON"):
        load_items(path)


def test_missing_file_and_unknown_suffix(tmp_path: Path) -> None:
    with pytest.raises(
        ProblemsError,
        match=r"none.parquet is not a file; .* a file that ends in .parquet, .jsonl, .json, or",
    ):
        load_items(tmp_path / "none.parquet")
    (tmp_path / "data.csv").write_text("problem\n")
    with pytest.raises(ProblemsError, match=r"ends in '.csv'.*\.parquet, \.jsonl, \.json"):
        load_items(tmp_path / "data.csv")


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("data.parquet", "data.parquet cannot be read as parquet: "),
        ("data.jsonl", r"data.jsonl is not UTF-8: byte 1 is 0xff; save it as UTF-8 text"),
        ("data.json", r"data.json is not UTF-8: byte 1 is 0xff"),
    ],
)
def test_bytes_that_are_no_set_are_refused(name: str, fault: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"{\xff}")
    with pytest.raises(ProblemsError, match=fault):
        load_items(tmp_path / name)


def test_an_object_of_rows_by_index_is_read_as_the_lines_are(tmp_path: Path) -> None:
    rows = [math_row(1), math_row(2)]
    lines = write_jsonl(tmp_path / "math.jsonl", rows)
    by_index, as_list = tmp_path / "aisbench.json", tmp_path / "list.json"
    by_index.write_text(json.dumps({"0": rows[0], "1": rows[1]}))
    as_list.write_text(json.dumps(rows))
    assert load_items(lines) == load_items(by_index) == load_items(as_list)
    as_list.write_text('["text"]')
    with pytest.raises(ProblemsError, match=r"list.json: a list of JSON objects is needed"):
        load_items(as_list)


def test_a_lone_surrogate_is_refused_before_anything_is_asked(tmp_path: Path) -> None:
    rows = [math_row(1), math_row(2) | {"problem": "\ud800?"}]
    with pytest.raises(ProblemsError, match="of 2 rows, 1 with a lone surrogate"):
        load_items(write_jsonl(tmp_path / "math.jsonl", rows))


def test_a_line_separator_within_a_text_ends_no_line(tmp_path: Path) -> None:
    path = tmp_path / "math.jsonl"
    path.write_text(json.dumps(math_row(1) | {"problem": "1\u2028+ 1\x85?"}, ensure_ascii=False), encoding="utf-8")
    assert "1\u2028+ 1\x85?" in load_items(path)[0].prompt[0]["content"]  # type: ignore[index]


CHOICES = "{'A': '对', 'B': '错'}"
GOLDS: list[tuple[str, dict[str, Any], str]] = [
    ("aime24", {"id": 75, "problem": "?", "answer": "073"}, "73"),
    ("aime25", {"problem": "?", "answer": "336^\\circ"}, "336"),
    ("amc23", {"question": "?", "answer": -1.0}, "-1"),
    ("gsm8k", {"question": "?", "answer": "He has 1,000 + 80.\n#### 1,080"}, "1080"),
    ("olympiadbench", {"question": "?", "final_answer": ["$69$,$84$"]}, "69,84"),
    ("olympiadbench", {"question": "?", "final_answer": ["$x$", "2"]}, "x, 2"),
    ("minerva", {"problem": "?", "solution": "So \\boxed{1.6} cm", "type": "Astronomy", "idx": 0}, "1.6"),
    (
        "choice",
        {"instruction": "?", "output": "<think>\\boxed{C}</think><answer>\\boxed{B}\\boxed{A}</answer>"},
        "AB",
    ),
    ("choice", {"question": "?", "choices": CHOICES, "answer": "BA", "task": "判断题"}, "AB"),
    ("choice", parquet_row(1, reward_model={"ground_truth": "C, A"}), "AC"),
]


EVERY_FORMAT: list[tuple[str | None, dict[str, Any], str]] = [
    *GOLDS,
    ("arithmetic", parquet_row(3), "4"),
    ("math500", math_row(4), "5"),
    (None, math_row(4), "5"),
]


@pytest.mark.parametrize("compat", ["none", "verl"])
@pytest.mark.parametrize(("name", "row", "gold"), EVERY_FORMAT)
def test_every_format_goes_through_preparation_validation_and_evaluation(
    name: str | None, row: dict[str, Any], gold: str, compat: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name is not None:
        monkeypatch.setitem(BENCHMARKS, name, replace(BENCHMARKS[name], num_items=None))
    (tmp_path / "held_out.json").write_text(json.dumps({"0": row}))  # as AISBench keeps MATH-500
    config = make_config(
        data={
            "source": "path",
            "train_path": str(
                write_parquet(tmp_path / "train.parquet", [parquet_row(0, data_source="math_dapo")])
            ),
            "eval_path": str(tmp_path / "held_out.json"),
        },
        evaluate={"benchmark": name},
        algorithm={"compat": compat},
        reward={"scorers": ("arith=math_dapo",)},
    )
    folder = tmp_path / "data"
    folder.mkdir()
    assert build_dataset(config, folder) == {"train_rows": 1, "eval_rows": 1}
    [item] = load_set(folder / "eval.json", name).items
    tokenizer = tiny_tokenizer()
    [prompt] = held_out_prompts(folder / "eval.json", name, tokenizer, config)
    assert prompt.ground_truth == item.gold == gold
    asked = tokenizer.apply_chat_template(
        [dict(m) for m in item.prompt], add_generation_prompt=True, tokenize=False
    )
    assert list(prompt.prompt_ids) == tokenizer(str(asked), add_special_tokens=False).input_ids
    scorers = VERL_SCORERS if compat == "verl" else SCORERS
    if prompt.data_source != "arith":
        scorer = scorers[routes()[prompt.data_source]]
        assert scorer(f"So \\boxed{{{gold}}}", gold).verdict == "right"  # as the prompt asks, also under verl


@pytest.mark.parametrize(
    ("name", "row", "fault"),
    [
        ("aime24", {"problem": "?", "answer": "7.5"}, "1 with no whole number as the answer"),
        ("gsm8k", {"question": "?", "answer": "18"}, "1 with no answer after ####"),
        (
            "olympiadbench",
            {"question": None, "final_answer": []},
            r"1 with no question .*and 1 with no final_answer",
        ),
        (
            "choice",
            {"question": "?", "choices": "{'A'", "answer": "H", "task": "判断题"},
            "1 with no question with opt",
        ),
        ("math500", {"question": "?"}, "lacks the columns problem"),
        (
            "choice",
            {"problem": "?"},
            "what can be read: instruction, output or question, choices, answer, task or",
        ),
    ],
)
def test_a_row_of_another_shape_is_refused(name: str, row: dict[str, Any], fault: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([row]))
    with pytest.raises(ProblemsError, match=fault):
        load_items(path, name)


def test_a_cflue_question_is_put_as_dianjin_does(tmp_path: Path) -> None:
    row = {"question": "我国金融市场体系包括（）。", "choices": {"A": "货币市场", "B": "商品市场"}, "answer": "A",
           "task": "多项选择题", "名称": "证券从业资格"}  # fmt: skip
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([row]))
    loaded = load_set(path, "choice")
    item = loaded.items[0]
    assert item.prompt[-1] == {
        "role": "user",
        "content": "假设你是一位金融行业专家，请回答下列问题。\n注意：题目是多选题，可能存在多个正确的答案。\n\n"
        "我国金融市场体系包括（）。\nA. 货币市场\nB. 商品市场\n\n"
        "请一步步思考，并把答案选项放到\\boxed{}中，如\\boxed{A}。",
    }
    assert (item.subject, item.level, loaded.grader) == ("证券从业资格", "多项选择题", "choice")


def test_the_configuration_offers_every_benchmark() -> None:
    for name in BENCHMARKS:
        assert EvaluateConfig(benchmark=name).benchmark == name  # type: ignore[arg-type]
    assert tuple(BENCHMARKS) == DATASETS


@pytest.mark.skipif("DAPO_TEST_DATA" not in os.environ, reason="the real files are not on every machine")
@pytest.mark.parametrize("name", ["math500", "aime24", "aime25", "amc23", "gsm8k", "olympiadbench", "minerva"])
def test_the_real_file_is_complete_and_the_one_that_is_pinned(name: str) -> None:
    benchmark = BENCHMARKS[name]
    path = Path(os.environ["DAPO_TEST_DATA"]) / {"minerva": "minerva_math"}.get(name, name) / "test.jsonl"
    evaluation_set = load_set(path, name)
    assert len(evaluation_set.items) == benchmark.num_items
    assert all(item.gold and item.gold.strip() == item.gold for item in evaluation_set.items)
    assert benchmark.source is None or benchmark.source.endswith(f"#sha256={file_sha256(path)}")


@pytest.mark.skipif("DAPO_TEST_DATA" not in os.environ, reason="the real files are not on every machine")
def test_real_choice_questions_and_both_forms_of_math500() -> None:
    folder = Path(os.environ["DAPO_TEST_DATA"])
    cflue, dianjin = folder / "cflue" / "knowledge.json", folder / "cflue" / "cflue_mcq_dianjin_shape.json"
    rows = json.loads(cflue.read_text(encoding="utf-8"))
    loaded = load_set(cflue, "choice").items
    assert [item.gold for item in loaded] == ["".join(sorted(row["answer"])) for row in rows]
    outputs = [row["output"] for row in json.loads(dianjin.read_text(encoding="utf-8"))]
    items = load_set(dianjin, "choice").items
    assert [ChoiceGrader().grade(o, "stop", i.gold).verdict for o, i in zip(outputs, items, strict=True)] == [
        "right"
    ] * 600
    math500 = folder / "math500"
    assert load_set(math500 / "test.jsonl", "math500") == load_set(math500 / "test_prm800k_500.json", "math500")


@pytest.mark.skipif("DAPO_TEST_DATA" not in os.environ, reason="the real MATH-500 file is not on every machine")
def test_every_solution_of_the_real_math500_grades_right() -> None:
    path = Path(os.environ["DAPO_TEST_DATA"]) / "math500" / "test.jsonl"
    items = load_items(path, "math500")
    solutions = [json.loads(line)["solution"] for line in path.read_text().splitlines()]
    verdicts = [grade(s, "stop", item.gold).verdict for s, item in zip(solutions, items, strict=True)]
    assert verdicts == ["right"] * 500
    golds = [item.gold for item in items]
    ending = "Therefore, the final answer is: $\\boxed{{{}}}$. I hope it is correct."
    assert [score_math(ending.format(gold), gold).verdict for gold in golds] == ["right"] * 500
    assert [score_math(ending.format(f"{gold}1"), gold).verdict for gold in golds] == ["wrong"] * 500
    scored = Counter(score_math(*pair).verdict for pair in zip(solutions, golds, strict=True))
    # 22 boxes begin more than 300 characters before the end; 2 solutions have another `answer:` after the box
    assert scored == {"right": 476, "no_answer": 22, "wrong": 2}
