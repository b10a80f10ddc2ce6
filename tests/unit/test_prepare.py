"""Data preparation: formats and schemas, mixtures, repeated and unusable rows."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dapo_core.config.training import PromptsConfig
from dapo_core.draw.account import Draw, TokenAccount
from dapo_core.draw.prompts import PromptStream
from dapo_core.draw.tokenizing import tokenized_prompts
from dapo_core.errors import DataError
from dapo_core.metrics.step import draw_metrics
from dapo_core.validation import held_out_prompts
from eval.problems import ProblemsError
from eval.problems.evaluation_sets import load_set
from flows.config import Config
from tasks.artifacts.stage_key import PROJECT_ROOT
from tasks.data.prepare import build_dataset
from tasks.links import link_of
from tests.batches import make_group
from tests.configs import make_config
from tests.tiny_models import tiny_tokenizer

ROWS = [
    {"problem": f"What is {n} + 1?", "answer": f"{n + 1:03}", "hint": f"h{n}"} for n in range(6)
]


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows in the format of the suffix."""
    table = pa.Table.from_pylist([dict(row) for row in rows])
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    elif path.suffix == ".arrow":
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    elif path.suffix == ".csv":
        import csv

        with path.open("w", encoding="utf-8", newline="") as file:
            writer_ = csv.DictWriter(file, rows[0].keys())
            writer_.writeheader()
            writer_.writerows(rows)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        path.write_text(json.dumps(rows), encoding="utf-8")
    return str(path)


def recipe(folder: Path, train: Any, held_out: Any = None, **data: Any) -> Config:
    held_out = held_out or write(
        folder / "held_out.json", [{"problem": "Find 9 + 9.", "answer": "18"}]
    )
    sections = data.pop("sections", {})
    return make_config(data={"train": train, "eval": held_out, **data}, **sections)


def prepare(config: Config, folder: Path) -> tuple[Mapping[str, Any], list[dict[str, Any]]]:
    """The counts, and the rows of train.parquet."""
    (output := folder / "prepared").mkdir()
    return build_dataset(config, output), pq.read_table(output / "train.parquet").to_pylist()


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json", ".csv", ".arrow"])
def test_every_format_gives_the_same_rows_to_training_and_evaluation(
    tmp_path: Path, suffix: str
) -> None:
    path = write(tmp_path / f"mine{suffix}", ROWS)
    held_out = write(
        tmp_path / f"other{suffix}", [{"problem": "Find 9 + 9.", "answer": "018", "hint": 0}]
    )
    _, rows = prepare(
        recipe(tmp_path, path, held_out, prompt_template="{problem} ({hint}) In \\boxed{hint}."),
        tmp_path,
    )
    assert [row["prompt"] for row in rows] == [
        [{"role": "user", "content": f"What is {n} + 1? (h{n}) In \\boxed{{hint}}."}]
        for n in range(6)
    ]
    assert [row["reward_model"]["ground_truth"] for row in rows] == [row["answer"] for row in ROWS]
    assert {row["data_source"] for row in rows} == {"exact"}
    [item] = load_set(tmp_path / "prepared" / "eval.parquet").items
    assert (item.gold, item.prompt[0]["content"]) == ("018", "Find 9 + 9. (0) In \\boxed{hint}.")  # type: ignore[index]


def test_any_schema_is_mapped_and_a_folder_of_files_is_one_set(tmp_path: Path) -> None:
    (parts := tmp_path / "parts").mkdir()
    for part in range(2):
        chats = [
            {
                "turns": [{"role": "user", "content": f"Q{part}{n}?"}],
                "gold": n,
                "name": f"{part}-{n}",
                "who": f"Be {n}.",
            }
            for n in range(2)
        ]
        write(parts / f"part{part}.jsonl", chats)
    columns = {"messages": "turns", "answer": "gold", "id": "name", "system": "who"}
    counts, rows = prepare(recipe(tmp_path, {"set": str(parts), "columns": columns}), tmp_path)
    assert counts["train_rows"] == 4
    assert rows[2]["prompt"] == [
        {"role": "system", "content": "Be 0."},
        {"role": "user", "content": "Q10?"},
    ]
    assert (rows[2]["extra_info"]["index"], rows[2]["reward_model"]["ground_truth"]) == ("1-0", "0")


def test_unusable_rows_are_counted_by_reason_up_to_a_limit(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mine.jsonl",
        [*ROWS, {"problem": " ", "answer": "1"}, {"problem": "P?", "answer": ""}],
    )
    with pytest.raises(
        DataError,
        match=r"mine\.jsonl: 2 of 8 rows cannot be used \(1 with no problem; 1 with no answer",
    ):
        prepare(recipe(tmp_path, path), tmp_path)
    (tmp_path / "prepared").rmdir()
    assert prepare(recipe(tmp_path, path, max_refused_ratio=0.3), tmp_path)[0]["train_rows"] == 6
    with pytest.raises(ProblemsError, match=r"has no column hnt, which data\.prompt_template uses"):
        build_dataset(recipe(tmp_path, path, prompt_template="{problem} {hnt}"), tmp_path)


def test_repeated_problems_are_used_once_and_contradicted_ones_dropped(tmp_path: Path) -> None:
    contradicted = {**ROWS[5], "answer": "no"}
    path = write(tmp_path / "mine.jsonl", [*ROWS, *ROWS[:3], contradicted])
    counts, rows = prepare(recipe(tmp_path, path), tmp_path)
    assert [row["problem"] for row in rows] == [row["problem"] for row in ROWS[:5]]
    assert counts["sets"] == {"mine.jsonl": {"read": 10, "kept": 5}}
    card = json.loads((tmp_path / "prepared" / "data_card.json").read_text())
    assert "answer otherwise" in json.dumps(card)


def test_a_mixture_reaches_the_prompt_stream_and_metrics(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    gsm8k = write(
        tmp_path / "g.jsonl",
        [{"question": f"Ann has {n}. How many?", "answer": f"#### {n}"} for n in range(4)],
    )
    mine = write(tmp_path / "mine.jsonl", ROWS)
    sets = [
        {"set": "gsm8k", "path": gsm8k, "weight": 1},
        {"set": mine, "weight": 3, "system_prompt": "Think."},
    ]
    held_out = [
        write(tmp_path / f"{name}.json", [{"problem": f"{name}?", "answer": "1"}]) for name in "xy"
    ]
    config = recipe(tmp_path, sets, held_out)
    _, rows = prepare(config, tmp_path)
    assert [(row["dataset"], row["data_source"]) for row in rows[3:5]] == [
        ("gsm8k", "gsm8k"),
        ("mine.jsonl", "exact"),
    ]
    assert [[m["role"] for m in row["prompt"]] for row in rows[3:5]] == [
        ["user"],
        ["system", "user"],
    ]
    folder = tmp_path / "prepared"
    data = PromptsConfig(max_prompt_tokens=500)
    prompts = tokenized_prompts(
        folder / "train.parquet", tmp_path / "model", tokenizer, tmp_path / "t", data
    )
    stream = PromptStream(prompts, 0, True, sets=prompts.sets)
    taken = [prompt for _, prompt in stream.take(80)]
    assert Counter(prompt.dataset for prompt in taken) == {"gsm8k": 20, "mine.jsonl": 60}
    account = TokenAccount()
    for rewards, prompt in (
        ([1.0, 1.0], taken[0]),
        ([1.0, -1.0], next(p for p in taken if p.dataset == "gsm8k")),
    ):
        group = make_group(rewards, prompt.index)
        object.__setattr__(group, "prompt", prompt)
        account.add_finished(group)
    metrics = draw_metrics(Draw(groups=[], num_drawn=2, account=account), 2, 0)
    assert metrics["train-core/mine.jsonl/acc/mean"] == 1.0
    assert (metrics["train-core/gsm8k/acc/mean"], metrics["train-core/gsm8k/score/mean"]) == (
        0.5,
        0.0,
    )
    asked = held_out_prompts(folder / "eval.parquet", folder, tokenizer, config)
    assert [prompt.dataset for prompt in asked] == ["x.json", "y.json"]
    items = load_set(folder / "eval.parquet").items
    assert [(item.id, item.subject) for item in items] == [
        ("x.json/row-0", "x.json"),
        ("y.json/row-0", "y.json"),
    ]


def test_sets_with_different_types_for_a_detail_can_be_mixed(tmp_path: Path) -> None:
    words = [{"question": "Ann has 3. How many?", "answer": "#### 3", "level": "easy"}]
    gsm8k = write(tmp_path / "g.jsonl", words)
    chat = [{"role": "user", "content": "1 + 1?"}]
    rows = [{"data_source": "math_dapo", "prompt": chat, "reward_model": {"ground_truth": "2"}}]
    own = write(
        tmp_path / "own.parquet",
        [{**rows[0], "extra_info": {"index": 7, "level": 2, "weights": [1.5]}}],
    )
    sets = ["arithmetic", {"set": "gsm8k", "path": gsm8k}, own]
    _, prepared = prepare(recipe(tmp_path, sets, arithmetic={"num_train": 16}), tmp_path)
    assert [row["extra_info"]["index"] for row in prepared[15:]] == ["15", "row-0", "7"]
    assert (prepared[-1]["extra_info"]["level"], prepared[-1]["extra_info"]["weights"]) == (
        "2",
        [1.5],
    )


def test_different_graders_and_unknown_sets_are_refused(tmp_path: Path) -> None:
    mine = write(tmp_path / "mine.jsonl", ROWS)
    for train, held_out, said in (
        (mine, ["cflue", "math500"], "data.eval have different graders"),
        ("gsm9k", mine, "did you mean gsm8k"),
        ("math500", mine, "math500 has no rows to train on"),
        ({"set": mine, "path": mine}, mine, "applies to registered sets only"),
    ):
        with pytest.raises(ProblemsError, match=said):
            link_of(recipe(tmp_path, train, held_out), "prepare_data").key()


def test_everything_that_affects_prepared_rows_is_in_the_key(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", ROWS)
    moved = (
        write(tmp_path / "other" / "mine.jsonl", ROWS)
        if (tmp_path / "other").mkdir() is None
        else ""
    )
    first = link_of(recipe(tmp_path, path), "prepare_data").key().key
    assert link_of(recipe(tmp_path, moved), "prepare_data").key().key == first
    changes: list[dict[str, Any]] = [
        {"prompt_template": "{problem}!"},
        {"system_prompt": "Think."},
        {"columns": {"problem": "hint", "answer": "answer"}},
        {"train": [path, write(tmp_path / "more.jsonl", ROWS)]},
        {"train": {"set": path, "weight": 2}},
    ]
    keys = {
        link_of(recipe(tmp_path, **{"train": path, **change}), "prepare_data").key().key
        for change in changes
    }
    assert len({first, *keys}) == 6


@pytest.mark.slow
def test_reading_leaves_nothing_in_the_users_cache(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.csv", ROWS)
    code = (
        f"from eval.problems.evaluation_sets import load_set; print(len(load_set({path!r}).items))"
    )
    (home := tmp_path / "home").mkdir()
    places = {"HOME": str(home), "PYTHONPATH": str(PROJECT_ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_"))
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env={**environment, **places}, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("6\n", "")
    assert [path for path in home.rglob("*") if path.is_file()] == []
