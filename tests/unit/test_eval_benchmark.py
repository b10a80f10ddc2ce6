"""Evaluation files: what is read, and what is refused with which message."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eval.benchmark import Item, load_items
from eval.errors import BenchmarkError


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


def test_missing_columns_are_named(tmp_path: Path) -> None:
    rows = [{"data_source": "arith", "question": "1 + 1"}]
    with pytest.raises(BenchmarkError, match=r"lacks the columns prompt, ability, reward_model, extra_info"):
        load_items(write_parquet(tmp_path / "eval.parquet", rows))


def test_empty_prompts_and_golds_are_counted_not_dropped(tmp_path: Path) -> None:
    rows = [
        parquet_row(0),
        parquet_row(1, prompt=[]),
        parquet_row(2, prompt=[{"role": "user", "content": "  "}]),
        parquet_row(3, reward_model={"ground_truth": "", "style": "rule"}),
    ]
    with pytest.raises(
        BenchmarkError, match=r"of 4 rows, 2 with an empty prompt and 1 with no reward_model.ground"
    ):
        load_items(write_parquet(tmp_path / "eval.parquet", rows))


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="of 0 rows, the file has no rows"):
        load_items(write_jsonl(tmp_path / "math.jsonl", []))


def test_repeated_ids_are_counted(tmp_path: Path) -> None:
    rows = [math_row(1), math_row(2), math_row(1), math_row(2), math_row(3)]
    with pytest.raises(BenchmarkError, match=r"2 ids are used more than once \(first: 'test/1.json'\)"):
        load_items(write_jsonl(tmp_path / "math.jsonl", rows))


def test_math500_asserts_500_rows(tmp_path: Path) -> None:
    assert (
        len(load_items(write_jsonl(tmp_path / "full.jsonl", [math_row(i) for i in range(500)]), "math500")) == 500
    )
    with pytest.raises(BenchmarkError, match=r"499 rows, but math500 has exactly 500"):
        load_items(write_jsonl(tmp_path / "short.jsonl", [math_row(i) for i in range(499)]), "math500")


def test_unknown_benchmark_suggests_the_known_one(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "math.jsonl", [math_row(1)])
    with pytest.raises(BenchmarkError, match=r"'math50' is not a benchmark; did you mean 'math500'\?"):
        load_items(path, "math50")


def test_broken_json_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "math.jsonl"
    path.write_text(json.dumps(math_row(1)) + "\n{torn\n")
    with pytest.raises(BenchmarkError, match=r"math.jsonl, line 2: not JSON"):
        load_items(path)


def test_missing_file_and_unknown_suffix(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match=r"none.parquet is not a file; an evaluation set must be"):
        load_items(tmp_path / "none.parquet")
    (tmp_path / "data.csv").write_text("problem\n")
    with pytest.raises(BenchmarkError, match=r"ends in '.csv'.*\.parquet, \.jsonl"):
        load_items(tmp_path / "data.csv")


@pytest.mark.skipif("DAPO_TEST_DATA" not in os.environ, reason="the real MATH-500 file is not on every machine")
def test_every_solution_of_the_real_math500_grades_right() -> None:
    from eval.grading import grade

    path = Path(os.environ["DAPO_TEST_DATA"]) / "math500" / "test.jsonl"
    items = load_items(path, "math500")
    solutions = [json.loads(line)["solution"] for line in path.read_text().splitlines()]
    verdicts = [grade(s, "stop", item.gold).verdict for s, item in zip(solutions, items, strict=True)]
    assert verdicts == ["right"] * 500
