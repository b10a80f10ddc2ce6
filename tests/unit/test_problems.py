"""Problem files: read alike by training, validation and evaluation, or refused."""

import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dapo_core.reward.routing import routes
from dapo_core.reward.scorers import SCORERS, VERL_SCORERS
from dapo_core.validation import held_out_prompts
from eval.problems import ProblemsError, formats
from eval.problems.evaluation_sets import load_set
from eval.problems.files import columns_of, files_of, find_schema, iterate_rows, read_problems
from eval.problems.items import Item
from eval.problems.registry import SETS
from eval.problems.rows import CHAT, Split
from tasks.data.prepare import build_dataset
from tests.configs import make_config
from tests.tiny_models import tiny_tokenizer


def parquet_row(index: int, **changes: Any) -> dict[str, Any]:
    row = {
        "data_source": "arith",
        "prompt": [{"role": "user", "content": f"{index} + 1 = ?"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(index + 1), "style": "rule"},
        "extra_info": {"index": index, "subject": "add", "level": 2},
    }
    return row | changes


def math_row(index: int, **changes: Any) -> dict[str, Any]:
    row = {
        "problem": f"What is {{{index}}} + 1?",
        "solution": f"It is $\\boxed{{{index + 1}}}$.",
        "answer": str(index + 1),
        "subject": "Algebra",
        "level": 3,
        "unique_id": f"test/{index}.json",
    }
    return row | changes


def write(path: Path, content: Any) -> Path:
    """Write rows in the format of the suffix, or text or bytes as they are."""
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, str):
        path.write_text(content, encoding="utf-8")
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(content), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in content))
    else:
        path.write_text(json.dumps(content))
    return path


def load_items(path: Path, benchmark: str | None = None) -> list[Item]:
    return list(load_set(path, benchmark).items)


def test_unusable_training_rows_are_listed_by_number(tmp_path: Path) -> None:
    good = parquet_row(0, extra_info=None)
    blank = ([{"role": "user", "content": content}] for content in (None, " "))
    for prompt in ("1 + 1?", [], None, "", *blank):
        path = write(tmp_path / "rows.json", [good, parquet_row(1, prompt=prompt)])
        with pytest.raises(ProblemsError, match=r"1 with an empty prompt or .* \(rows 1\)"):
            read_problems(path, (CHAT,))
    golds = [
        parquet_row(n, reward_model={"ground_truth": gold})
        for n, gold in enumerate(["0", " ", None] * 3)
    ]
    with pytest.raises(ProblemsError, match=r"6 with no .*ground_truth \(rows 1, 2, 4, 5, 7, \."):
        read_problems(write(tmp_path / "train.parquet", golds), (CHAT,))
    for extra_info in ({"when": datetime(2026, 1, 1)}, {"image": b"x"}, "text", [1]):
        path = write(tmp_path / "train.parquet", [good, parquet_row(1, extra_info=extra_info)])
        with pytest.raises(ProblemsError, match="1 with an extra_info that is not a JSON object"):
            read_problems(path, (CHAT,))


def test_training_rows_keep_source_and_extra_info_and_may_repeat(tmp_path: Path) -> None:
    info = {"index": 7, "answers": [1.5, None], "more": {"level": 3}}
    row = parquet_row(0, extra_info=info, reward_model={"ground_truth": 0})
    first, second = read_problems(write(tmp_path / "train.parquet", [row, row]), (CHAT,))
    assert first == second
    assert (first.data_source, first.gold, first.extra_info) == ("arith", "0", info)


def test_a_training_file_without_the_columns_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "train.parquet", [{"prompt": "x", "answer": "1"}])
    with pytest.raises(ProblemsError, match="lacks the columns data_source, reward_model"):
        find_schema(path, columns_of(path), (CHAT,))


def test_a_training_parquet_can_be_evaluated_with_its_own_messages(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2 + 1 = ?"},
    ]
    path = write(tmp_path / "eval.parquet", [parquet_row(7), parquet_row(2, prompt=messages)])
    assert load_items(path) == [
        Item("7", ({"role": "user", "content": "7 + 1 = ?"},), "8", "add", "2"),
        Item("2", tuple(messages), "3", "add", "2"),
    ]
    needed = [
        {name: parquet_row(n)[name] for name in ("data_source", "prompt", "reward_model")}
        for n in (0, 1)
    ]
    items = load_items(write(tmp_path / "eval.parquet", needed))
    assert [(item.id, item.gold) for item in items] == [("row-0", "1"), ("row-1", "2")]


def test_json_lines_lists_and_objects_by_index_are_read_alike(tmp_path: Path) -> None:
    rows = [math_row(1), math_row(4)]
    prompt = (
        "What is {4} + 1?\nPlease reason step by step, and put your final answer within \\boxed{}."
    )
    items = load_items(write(tmp_path / "math.jsonl", rows))
    assert items[1] == Item(
        "test/4.json", ({"role": "user", "content": prompt},), "5", "Algebra", "3"
    )
    assert load_items(write(tmp_path / "list.json", rows)) == items
    assert load_items(write(tmp_path / "aisbench.json", {"0": rows[0], "1": rows[1]})) == items
    row = math_row(1, problem="1\u2028+ 1\x85?")  # Unicode line separators do not end a line
    [item] = load_items(write(tmp_path / "math.jsonl", json.dumps(row, ensure_ascii=False)))
    assert "1\u2028+ 1\x85?" in item.prompt[0]["content"]  # type: ignore[index]


def test_a_named_benchmark_must_be_complete(tmp_path: Path) -> None:
    rows = [math_row(index) for index in range(500)]
    assert len(load_items(write(tmp_path / "math.jsonl", rows), "math500")) == 500
    with pytest.raises(ProblemsError, match=r"499 problems, but math500 has exactly 500"):
        load_items(write(tmp_path / "math.jsonl", rows[1:]), "math500")


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_the_delimiter_of_a_table_is_found(tmp_path: Path, delimiter: str) -> None:
    cells = [["question", "answer", "note"], ['Is "a, b" 1; 2 | 3?', "007", "x"], ["Next?", "NA"]]
    quoted = [[f'"{cell.replace(chr(34), 2 * chr(34))}"' for cell in row] for row in cells]
    path = tmp_path / ("my.tsv" if delimiter == "\t" else "my.csv")
    path.write_text("\ufeff" + "".join(delimiter.join(row) + "\r\n" for row in quoted))
    assert list(iterate_rows(path)) == [
        {"question": cells[1][0], "answer": "007", "note": "x"},
        {"question": "Next?", "answer": "NA", "note": None},
    ]


def test_json_values_are_read_as_they_are_written(tmp_path: Path) -> None:
    values = [10**23 + 1, "2024-01-01", None, 0.1, ["x"], {"a": 1}, True, "7"]
    rows = [{"answer": value} for value in values] + [{"answer": "é", "more": 1}]
    missing: dict[str, Any] = {"answer": None, "more": None}
    alike = [missing | row for row in rows]
    assert list(iterate_rows(write(tmp_path / "lines.jsonl", rows))) == alike
    for name, content in (
        ("list.json", json.dumps(rows, indent=2)),
        ("wrapped.json", json.dumps({"version": "1.1", "data": rows})),
        ("several.jsonl", "".join(json.dumps(row, indent=2) for row in rows)),
    ):
        assert list(iterate_rows(write(tmp_path / name, content))) == alike


@pytest.mark.parametrize("by_index", [False, True])
def test_columns_in_json_are_rows(tmp_path: Path, by_index: bool) -> None:
    columns: dict[str, Any] = {"question": ["1?", "2?"], "choices": [["x"], ["y", "z"]]}
    if by_index:
        columns = {name: dict(enumerate(cells)) for name, cells in columns.items()}
    assert list(iterate_rows(write(tmp_path / "my.json", columns))) == [
        {"question": "1?", "choices": ["x"]},
        {"question": "2?", "choices": ["y", "z"]},
    ]


def test_json_is_read_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"problem": '\\frac{1}{2} é "?' * n, "answer": n} for n in range(40)]
    path = write(tmp_path / "rows.jsonl", rows)
    for size in (1, 7, 64):
        monkeypatch.setattr(formats, "CHUNK_CHARACTERS", size)
        assert list(iterate_rows(path)) == rows


@pytest.mark.parametrize(
    ("split", "files"),
    [
        ("train", ["data/train.jsonl"]),
        ("train", ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]),
        ("test", ["all/test.csv"]),
        ("test", ["a.jsonl", "b.jsonl"]),
        ("train", ["train/algebra/1.json", "train/geometry/1.json"]),
    ],
)
def test_a_folder_is_read_by_the_names_of_its_splits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, split: Split, files: list[str]
) -> None:
    other = "test" if split == "train" else "train"
    others = [files[0].replace(split, other) if split in files[0] else "val.jsonl", "dev.csv"]
    for name in (*files, *others, "README.md", "dataset_info.json", ".cache/train.parquet"):
        (path := tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    with caplog.at_level("INFO", "eval.problems.files"):
        assert [str(file.relative_to(tmp_path)) for file in files_of(tmp_path, split)] == files
    assert f"from {', '.join(files)}; not from" in caplog.text


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        (["main/train.csv", "socratic/train.csv"], r"in 2 folders \(main, socratic\): name one"),
        (["test.csv", "val.csv"], r"no rows to train on: name .* it has test\.csv, val\.csv"),
        (["a.csv", "b.jsonl"], "files of several formats"),
    ],
)
def test_an_ambiguous_folder_is_refused_with_its_names(
    tmp_path: Path, files: list[str], fault: str
) -> None:
    for name in files:
        (path := tmp_path / name).parent.mkdir(exist_ok=True)
        path.write_text("problem,answer\n1 + 1?,2\n")
    with pytest.raises(ProblemsError, match=fault):
        list(iterate_rows(tmp_path, split="train"))


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        *((f"rows{suffix}", POINTER, r"^[^:]* is a Git LFS pointer") for suffix in formats.FORMATS),
        ("a.csv", "question,answer\n1,2\n1, 2,3\n", "as csv: line 3 has 3 cells"),
        ("a.csv", "answer,answer\n1,2\n", "as csv: several columns are named 'answer'"),
        ("a.csv", 'question,answer\n"1,2\n', "as csv: unexpected end of data in line 2"),
        ("a.csv", '"a"b,answer\n1,2\n', "as csv: ',' expected after '\"' in line 1"),
        ("a.jsonl", "[1, 2]", "as jsonl: row 0 is 1, not a JSON object"),
        ("none.parquet", None, "is not a file, nor a folder of problem files"),
        ("data.txt", "problem\n", r"ends in '.txt'"),
        (
            "data.csv",
            "question\n1+1\n",
            r"columns question, .* holds the answer; set data.columns.answer=",
        ),
        ("math.jsonl", [], "has no rows"),
        ("ids.jsonl", [math_row(n, unique_id=n % 2) for n in range(5)], "2 ids are used for"),
        ("math.jsonl", [math_row(1), math_row(1, answer="7")], r"different gold .*\(row 0"),
        (
            "math.jsonl",
            json.dumps(math_row(1)) + "\n{torn\n",
            "cannot be read as jsonl: JSON parse",
        ),
        ("math.jsonl", [math_row(1), math_row(2, problem="\ud800?")], "as jsonl: .*surrogate"),
        ("data.parquet", b"{\xff}", "data.parquet cannot be read as parquet: "),
        ("data.json", b"{\xff}", r"data.json is not UTF-8: byte 1 is 0xff"),
    ],
)
def test_an_unusable_evaluation_file_is_refused_with_the_fault(
    name: str, content: Any, fault: str, tmp_path: Path
) -> None:
    path = tmp_path / name if content is None else write(tmp_path / name, content)
    with pytest.raises(ProblemsError, match=fault):
        load_items(path)


def aime_row(problem: int, row: int) -> dict[str, Any]:
    """A row of the published file: every problem on 32 rows, with DAPO's instruction."""
    asked = [{"role": "user", "content": f"Solve. {problem} + 1 = ? End with Answer: $Answer."}]
    gold = {"ground_truth": f"{problem + 1:03}", "style": "rule"}
    return parquet_row(row, data_source="math_dapo", prompt=asked, reward_model=gold)


@pytest.mark.parametrize("benchmark", ["aime24", None])
def test_rows_with_the_same_prompt_are_samples_of_one_item(
    benchmark: str | None, tmp_path: Path
) -> None:
    rows = [aime_row(number % 30, number) for number in range(960)]
    loaded = load_set(write(tmp_path / "aime.parquet", rows), benchmark)
    assert (len(loaded.items), loaded.num_repeats, loaded.template.name) == (30, 32, "given")
    assert [item.id for item in loaded.items] == [str(number) for number in range(30)]
    assert loaded.items[7].gold == ("8" if benchmark else "008")
    # The same id on all rows of a problem is its id.
    rows = [aime_row(number // 32, number // 32) for number in range(960)]
    assert load_set(write(tmp_path / "same_ids.parquet", rows), benchmark).num_repeats == 32
    with pytest.raises(ProblemsError, match="29 problems, but aime24 has exactly 30"):
        load_set(write(tmp_path / "short.parquet", rows[:-32]), "aime24")


def test_uneven_repeats_are_single_items_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load_set(write(tmp_path / "math.jsonl", [math_row(n) for n in (1, 2, 1, 3)]))
    assert ([item.id for item in loaded.items], loaded.num_repeats) == (
        [f"test/{n}.json" for n in (1, 2, 3)],
        1,
    )
    assert "1 of 3 problems are on several rows (up to 2)" in caplog.text


CHOICE_ROW = {
    "question": "?",
    "choices": "{'A': '对', 'B': '错'}",
    "answer": "BA",
    "task": "判断题",
}
GOLDS: list[tuple[str, dict[str, Any], str]] = [
    ("aime24", {"id": 75, "problem": "?", "answer": "073"}, "73"),
    ("aime25", {"problem": "?", "answer": "336^\\circ"}, "336"),
    ("amc23", {"question": "?", "answer": -1.0}, "-1"),
    ("gsm8k", {"question": "?", "answer": "He has 1,000 + 80.\n#### 1,080"}, "1080"),
    ("olympiadbench", {"question": "?", "final_answer": ["$x$", "2"]}, "x, 2"),
    ("minerva", {"problem": "?", "solution": "So \\boxed{1.6} cm", "type": "Astronomy"}, "1.6"),
    (
        "choice",
        {"instruction": "?", "output": "<think>\\boxed{C}</think><answer>\\boxed{BA}</answer>"},
        "AB",
    ),
    ("choice", CHOICE_ROW, "AB"),
    ("choice", parquet_row(1, reward_model={"ground_truth": "C, A"}), "AC"),
]


EVERY_FORMAT: list[tuple[str | None, dict[str, Any], str]] = [
    *GOLDS,
    ("arithmetic", parquet_row(3), "4"),
    ("math500", math_row(4, answer="not read when the solution has a box"), "5"),
    (None, math_row(4), "5"),
    (None, math_row(4, solution="five", answer="5"), "5"),
]


@pytest.mark.parametrize("compat", ["none", "verl"])
@pytest.mark.parametrize(("name", "row", "gold"), EVERY_FORMAT)
def test_preparation_validation_and_evaluation_agree_on_every_format(
    name: str | None,
    row: dict[str, Any],
    gold: str,
    compat: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if name is not None:
        monkeypatch.setitem(SETS, name, replace(SETS[name], num_items=None))
    held_out = write(tmp_path / "held_out.json", {"0": row})  # as AISBench keeps MATH-500
    config = make_config(
        data={
            "train": str(
                write(tmp_path / "train.parquet", [parquet_row(0, data_source="math_dapo")])
            ),
            "eval": str(held_out) if name is None else {"set": name, "path": str(held_out)},
        },
        algorithm={"compat": compat},
        reward={"scorers": ("arith=math_dapo",)},
    )
    folder = tmp_path / "data"
    folder.mkdir()
    counts = build_dataset(config, folder)
    assert (counts["train_rows"], counts["eval_rows"]) == (1, 1)
    assert load_set(folder / "eval.parquet") == load_set(held_out, name)
    [item] = load_set(folder / "eval.parquet", name).items
    tokenizer = tiny_tokenizer()
    [prompt] = held_out_prompts(folder / "eval.parquet", folder, tokenizer, config)
    assert prompt.ground_truth == item.gold == gold
    asked = tokenizer.apply_chat_template(
        [dict(m) for m in item.prompt], add_generation_prompt=True, tokenize=False
    )
    assert list(prompt.input.token_ids) == tokenizer(str(asked), add_special_tokens=False).input_ids
    scorers = VERL_SCORERS if compat == "verl" else SCORERS
    if prompt.data_source != "arith":
        scorer = scorers[routes()[prompt.data_source]]
        assert scorer(f"So \\boxed{{{gold}}}", gold).verdict == "right"  # also under verl


@pytest.mark.parametrize(
    ("name", "row", "fault"),
    [
        ("aime24", {"problem": "?", "answer": "7.5"}, "1 with no whole number as the answer"),
        ("gsm8k", {"question": "?", "answer": "18"}, "1 with no answer after ####"),
        ("olympiadbench", {"question": None, "final_answer": []}, r"1 with no question "),
        ("choice", {**CHOICE_ROW, "choices": "{'A'", "answer": "H"}, "1 with no question w"),
        ("math500", {"question": "?"}, "lacks the columns problem"),
        ("math50", math_row(1), r"no set math50 \(did you mean math500"),
    ],
)
def test_a_row_in_another_format_is_refused(
    name: str, row: dict[str, Any], fault: str, tmp_path: Path
) -> None:
    with pytest.raises(ProblemsError, match=fault):
        load_items(write(tmp_path / "rows.json", [row]), name)


def test_a_cflue_question_is_worded_as_in_dianjin_r1(tmp_path: Path) -> None:
    row = {
        "question": "我国金融市场体系包括（）。",
        "choices": {"A": "货币市场", "B": "商品市场"},
        "answer": "A",
        "task": "多项选择题",
        "名称": "证券从业资格",
    }
    loaded = load_set(write(tmp_path / "rows.json", [row]), "choice")
    item = loaded.items[0]
    assert item.prompt[-1] == {
        "role": "user",
        "content": "假设你是一位金融行业专家，请回答下列问题。\n"
        "注意：题目是多选题，可能存在多个正确的答案。\n\n"
        "我国金融市场体系包括（）。\nA. 货币市场\nB. 商品市场\n\n"
        "请一步步思考，并把答案选项放到\\boxed{}中，如\\boxed{A}。",
    }
    assert (item.subject, item.level, loaded.grader) == ("证券从业资格", "多项选择题", "choice")
