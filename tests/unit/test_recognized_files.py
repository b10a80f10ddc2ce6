"""Own files as people have them: no column that holds a part of the problem is lost silently."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eval.logs.foreign import import_log
from eval.problems import ProblemsError
from eval.problems.columns import Layout
from eval.problems.evaluation_sets import load_set
from eval.problems.items import Item
from eval.problems.recognition import recognize
from flows.config import load_config_or_defaults
from tasks.data.prepare import build_dataset
from tasks.data.sources import all_sources
from tasks.evaluation.settings import load_sets
from tasks.preflight.finding import FAIL, WARN, Finding, Findings
from tasks.preflight.inputs import inputs_here
from tasks.preflight.prompts import check_columns, check_golds, check_overlap

Rows = Sequence[dict[str, Any]]
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
LETTER = (
    "\n\nPlease reason step by step, and put the letter of the right option within \\boxed{}, such "
    "as \\boxed{A}."
)
ABC = "Which?\n\nA. red\nB. 2 cm\nC. none"
TEXTS = ["red", "2 cm", "none"]
LISTED = "Which?\nA. red\nB. 2 cm\nC. none"


def written(path: Path, rows: Rows) -> Path:
    """Write the rows in the format of the suffix."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def asked(path: Path, rows: Rows) -> tuple[str, str, str]:
    """The first prompt's text, its gold answer and the grader."""
    loaded = load_set(written(path, rows))
    return loaded.items[0].problem, loaded.items[0].gold, loaded.grader


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"question": "Which?", "choices": TEXTS, "answer": 1}, "B"),  # MMLU
    ({"question": "Which?", "A": "red", "B": "2 cm", "C": "none", "answer": "C"}, "C"),  # C-Eval
    ({"question": "Which?", "options": ["(A)red", "(B)2 cm", "(C)none"], "label": "B"}, "B"),
    ({"Question": "Which?", "Options": TEXTS, "Answer": "none"}, "C"),
    (
        {
            "question": "Which?",
            "choices": {"text": TEXTS, "label": ["1", "2", "3"]},  # ARC
            "answerKey": "3",
        },
        "C",
    ),
    (
        {
            "question": {  # CommonsenseQA
                "stem": "Which?",
                "choices": [
                    {"label": label, "text": text} for label, text in zip("ABC", TEXTS, strict=True)
                ],
            },
            "answerKey": "A",
        },
        "A",
    ),
    ({"question": "Which?", "options": dict(zip("ABC", TEXTS, strict=True)), "answer": "b"}, "B"),
    ({"ctx": "Which?", "endings": TEXTS, "label": "0"}, "A"),  # HellaSwag
    ({"question": "Which?", "options": "a ) red , b ) 2 cm , c ) none", "correct": "c"}, "C"),
    ({"question": "Which?", "choices": "['red' '2 cm'\n 'none']", "answer": 2}, "C"),  # numpy's
    ({"question": "Which?", "choices": json.dumps(TEXTS), "answer": "B. 2 cm"}, "B"),
    (
        {
            "sentence": "Which?",
            "option1": "red",
            "option2": "2 cm",
            "option3": "none",
            "label": "3",
        },
        "C",
    ),
    ({"question": "Which?", "opa": "red", "opb": "2 cm", "opc": "none", "cop": 1}, "B"),  # MedMCQA
    (  # CosmosQA
        {"question": "Which?", "answer0": "red", "answer1": "2 cm", "answer2": "none", "label": 1},
        "B",
    ),
    ({"question": "Which?", "answers": TEXTS, "label": 2}, "C"),  # ReClor
    ({"题目": "Which?", "选项A": "red", "选项B": "2 cm", "选项C": "none", "答案": "B"}, "B"),
    ({"question": "Which?", "choices": TEXTS, "answer": ["A", "C"]}, "AC"),
    ({"question": "Which?", "choices": TEXTS, "answer": 3}, "C"),  # counted from 1
    ({"question": "Which?", "choices": TEXTS, "answer": "2 cm", "answer_idx": "B"}, "B"),
]


@pytest.mark.parametrize(("row", "gold"), OPTIONS, ids=[", ".join(row) for row, _ in OPTIONS])
def test_options_are_in_the_prompt_and_their_letter_is_the_gold_answer(
    tmp_path: Path, row: dict[str, Any], gold: str
) -> None:
    for name in ("my.jsonl", "my.parquet"):
        problem, found, grader = asked(tmp_path / name, [row])
        assert (problem.split("\n\nPlease")[0], found, grader) == (ABC, gold, "choice")
    several = LETTER.replace("letter of the right option", "letters of all right options")
    assert problem.endswith(several.replace("{A}", "{AC}") if len(gold) > 1 else LETTER)
    if len(gold) == 1:
        [item] = load_set(tmp_path / "my.jsonl", mode="loglikelihood").items
        assert (item.prompt, item.options) == ("Which?\nAnswer:", tuple(TEXTS))
        assert item.gold == TEXTS["ABC".index(gold)]


def test_prepared_options_are_evaluated_like_the_file_itself(tmp_path: Path) -> None:
    rows = [
        {
            "question": f"{n}?",
            "choices": TEXTS,
            "answer": n % 3,
            "subject": "ab"[n % 2],
            "id": f"i{n}",
        }
        for n in range(6)
    ]
    path = written(tmp_path / "my.jsonl", rows)
    config = recipe(path, path, "data.contamination=warn")
    (folder := tmp_path / "data").mkdir()
    build_dataset(config, folder)
    for mode in ("generate", "loglikelihood"):
        expected = load_set(path, mode=mode)
        assert load_set(folder / "eval.parquet", mode=mode) == expected
        assert {item.subject for item in expected.items} == {"a", "b"}


def test_options_with_a_chat_or_listed_in_the_question_are_shown_once(tmp_path: Path) -> None:
    chat = {"prompt": [{"role": "user", "content": "Which?"}], "choices": TEXTS, "answer": 1}
    assert asked(tmp_path / "chat.jsonl", [chat]) == (ABC, "B", "choice")
    listed = {"question": LISTED, "choices": TEXTS, "answer": 1}
    assert asked(tmp_path / "listed.jsonl", [listed]) == (LISTED + LETTER, "B", "choice")


@pytest.mark.parametrize(
    ("answers", "fault"),
    [
        (
            ["3", "1"],
            r"as an option's index from 0 and as an option's text, .* data\.columns\.answer_as",
        ),
        (["x", "9"], r"of 2 answers .*, 0 name an option's letter, .*data\.columns\.answer"),
    ],
)
def test_answers_that_do_not_tell_the_option_are_refused(
    tmp_path: Path, answers: list[str], fault: str
) -> None:
    rows = [
        {"question": f"{n}?", "choices": ["1", "2", "3", "4"], "answer": answer}
        for n, answer in enumerate(answers)
    ]
    path = written(tmp_path / "my.jsonl", rows)
    with pytest.raises(ProblemsError, match=fault):
        load_set(path)
    known = recognize(path, given=Layout(answer_as="text"))
    assert known.grader == ("choice" if answers[0] == "3" else "mathematics")


def test_the_reading_of_answers_can_be_set_alone(tmp_path: Path) -> None:
    rows = [{"q": {"stem": "?"}, "choices": ["1", "2", "3"], "answer": "2"}]
    path = written(tmp_path / "my.jsonl", rows)
    for meaning, gold in (("index", "C"), ("text", "B")):
        columns = f"data.columns={{problem: q.stem, answer_as: {meaning}}}"
        config = load_config_or_defaults(None, [columns])
        assert load_sets(config, tmp_path, str(path))[""].items[0].gold == gold


def test_an_answer_beside_the_options_makes_only_its_row_unusable(tmp_path: Path) -> None:
    rows = [{"question": f"{n}?", "choices": TEXTS, "answer": "ABC"[n % 3]} for n in range(20)]
    path = written(
        tmp_path / "my.jsonl", [*rows, {**rows[0], "answer": "E"}, {**rows[0], "choices": []}]
    )
    with pytest.raises(
        ProblemsError, match=r"1 with no answer that is .*rows 20\) and 1 with 0 read"
    ):
        load_set(path)


CONTEXTS: list[tuple[dict[str, Any], str, str]] = [
    (
        {"Body": "There are 3.", "Question": "How many?", "Answer": 3.0},
        "There are 3.\n\nHow many?",
        "3",
    ),
    (
        {
            "context": "In 1.",
            "question": "When?",
            "answers": {"text": ["1", "1"], "answer_start": [3, 3]},
        },
        "In 1.\n\nWhen?",
        "1",
    ),
    ({"instruction": "Add.", "input": "1, 2", "output": "3"}, "Add.\n\n1, 2", "3"),
    ({"passage": "P.", "question": "Is it?", "answer": True}, "P.\n\nIs it?", "True"),
    ({"question": "How many?", "answer": "So it is \\boxed{3}."}, "How many?", "3"),
    ({"question": "How many?", "answer": "So\n#### 3"}, "How many?", "3"),  # as in gsm8k
    ({"problem": "How many?", "solution": "No, 4.\n#### 3\nDone."}, "How many?", "3"),
]


@pytest.mark.parametrize(
    ("row", "text", "gold"), CONTEXTS, ids=[", ".join(row) for row, *_ in CONTEXTS]
)
def test_the_context_of_a_question_is_in_the_prompt(
    tmp_path: Path, row: dict[str, Any], text: str, gold: str
) -> None:
    for name in ("my.jsonl", "my.parquet"):
        assert asked(tmp_path / name, [row]) == (text + BOXED, gold, "mathematics")


def test_a_context_may_be_missing_but_not_the_question(tmp_path: Path) -> None:
    rows: Rows = [
        {"context": "In 1.", "question": "When?", "answer": 1},
        {"context": None, "question": "1 + 1?", "answer": 2},
        {"context": "In 1.", "question": " ", "answer": 2},
    ]
    assert load_set(written(tmp_path / "my.jsonl", rows[:2])).items[1].problem == "1 + 1?" + BOXED
    with pytest.raises(ProblemsError, match=r"1 with no question \(rows 2\)"):
        load_set(written(tmp_path / "all.jsonl", rows))


USER = {"role": "user", "content": "1 + 1?"}
CHATS: list[dict[str, Any]] = [
    {"messages": [USER, {"role": "assistant", "content": "It is \\boxed{2}."}]},
    {"conversations": [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}]},
    {"prompt": [USER], "completion": [{"role": "assistant", "content": "2"}]},
    {"prompt": json.dumps([USER]), "answer": ["2"]},
    {"prompt": [USER], "reward_model": {"ground_truth": '["2"]', "style": "rule"}},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "1 + 1?"}]}], "gold": 2.0},
    {"messages": [USER, {"role": "assistant", "content": ""}], "gold": 2},
    {"text": "all of it", "messages": [USER, {"role": "assistant", "content": "2"}]},
    {"data_source": "x", "prompt": [USER], "reward_model": {"ground_truth": ["2"]}},
]


@pytest.mark.parametrize("row", CHATS, ids=[", ".join(row) for row in CHATS])
def test_an_answer_at_the_end_of_a_chat_is_not_in_the_prompt(
    tmp_path: Path, row: dict[str, Any]
) -> None:
    for name in ("my.jsonl", "my.parquet"):
        [item] = load_set(written(tmp_path / name, [row])).items
        assert (item.prompt, item.gold) == ((USER,), "2")
    answered = {
        "data_source": "x",
        "prompt": CHATS[0]["messages"],
        "reward_model": {"ground_truth": 2},
    }
    with pytest.raises(ProblemsError, match="ends with an answer of the assistant"):
        load_set(written(tmp_path / "answered.jsonl", [answered]))


@pytest.mark.parametrize(
    ("value", "gold"),
    [
        (5.0, "5"),
        (1e17, "100000000000000000"),
        (10**20, str(10**20)),
        (0.5, "0.5"),
        (1e-7, "0.0000001"),
        (["5"], "5"),
        ([5.0], "5"),
        ("['5']", "5"),
        ("[5]", "[5]"),
        (False, "False"),
        ("0027", "0027"),
        (float("nan"), "no answer"),
        ([], "no answer"),
        (["5", "6"], "a list of 2 different values as answer"),
        ({"value": "5", "id": None}, "5"),
        ({"ground_truth": ["5"], "style": "rule"}, "5"),
        ('{"answer": 5}', "5"),
        ('{"x":[1,2]}', '{"x":[1,2]}'),
        ({"x": 5}, "an object with x as answer"),
        ({"value": "5", "unit": "m"}, "an object with value, unit as answer"),
        ({"answer": 5, "unit": "m"}, "an object with answer, unit as answer"),
        ('{"value": "5", "unit": "m"}', "an object with value, unit as answer"),
        ([{"value": 5, "unit": "m"}], "an object with value, unit as answer"),
        ({"value": {"number": 5}}, "an object with value as answer"),
        ({"value": [5, "m"]}, "a list of 2 different values as answer"),
        ([5, "m"], "a list of 2 different values as answer"),
        ([["5"]], "5"),
    ],
)
def test_answers_of_any_type_are_texts_or_refused_by_row(
    tmp_path: Path, value: Any, gold: str
) -> None:
    rows = [{"question": "1?", "answer": "x"}, {"question": "2?", "answer": value}]
    path = written(tmp_path / "my.jsonl", rows)
    if " " in gold:
        with pytest.raises(ProblemsError, match=rf"of 2 rows, 1 with {gold} \(rows 1\)"):
            load_set(path)
    else:
        assert load_set(path).items[1].gold == gold


def test_decimals_and_floats_of_parquet_are_texts(tmp_path: Path) -> None:
    columns = {"question": ["1?", "2?", "3?"], "answer": pa.array([5.0, 2.5, None], pa.float64())}
    pq.write_table(pa.table(columns).slice(0, 2), tmp_path / "my.parquet")
    assert [item.gold for item in load_set(tmp_path / "my.parquet").items] == ["5", "2.5"]


GOLD = {"reward_model": {"ground_truth": "1"}}
PICTURES: list[dict[str, Any]] = [
    {"question": "What?", "Image": "a.png", "answer": "1"},
    {"problem": "<image>What?", "images": [{"bytes": "x", "path": None}], "answer": "1"},
    {"messages": [{"role": "user", "content": [{"type": "image", "image": "a"}]}], "answer": "1"},
    {"data_source": "x", "prompt": [USER], "images": ["a"], **GOLD},
]
PLACES: list[dict[str, Any]] = [
    {"problem": "<image>What?", "answer": "1"},
    {"messages": [{"role": "user", "content": [{"type": "image_url"}]}], "answer": "1"},
    {"data_source": "x", "prompt": [{**USER, "content": "<image> ?"}], **GOLD},
]
VIDEOS: list[dict[str, Any]] = [
    {"question": "What?", "Video": "a.mp4", "answer": "1"},
    {"problem": "<video>What?", "answer": "1"},
    {"messages": [{"role": "user", "content": [{"type": "audio"}]}], "answer": "1"},
    {"data_source": "x", "prompt": [USER], "videos": ["a"], **GOLD},
]


@pytest.mark.parametrize(
    ("rows", "refusal"),
    [
        (PICTURES, "has pictures: prepare it with dapo prepare-data"),
        (PLACES, r"3 with 1 <image> in its text, but 0 pictures \(rows 0, 1, 2\)"),
        (VIDEOS, r"of the first 3 rows, 3 have a video or a sound.*\(rows 0, 1, 2\)"),
    ],
    ids=["pictures", "places", "videos"],
)
def test_rows_with_media_are_refused_with_their_number(
    tmp_path: Path, rows: list[dict[str, Any]], refusal: str
) -> None:
    for number, row in enumerate(rows):
        with pytest.raises(ProblemsError, match=refusal):
            load_set(written(tmp_path / f"{number}.jsonl", [row] * 3))


LETTERED = [
    {"problem": f"{n}: {LISTED}", "answer": answer} for n, answer in enumerate(["C", "AB", "B, C"])
]


def test_files_of_letters_are_graded_as_choices_in_training_and_evaluation(tmp_path: Path) -> None:
    path = written(tmp_path / "letters.jsonl", LETTERED)
    assert load_set(path).grader == "choice"
    config = load_config_or_defaults(
        None, [f"data.train={path}", f"data.eval={path}", "data.contamination=warn"]
    )
    (folder := tmp_path / "data").mkdir()
    build_dataset(config, folder)
    rows = pq.read_table(folder / "train.parquet").to_pylist()
    assert {row["data_source"] for row in rows} == {"choice"}
    assert load_set(folder / "eval.parquet") == load_set(path)
    log = [
        {
            "id": n,
            "origin_prompt": row["problem"],
            "prediction": "Answer: C and B",
            "gold": row["answer"],
        }
        for n, row in enumerate(LETTERED)
    ]
    summary = import_log(written(tmp_path / "log.jsonl", log), tmp_path / "out")
    assert summary.accuracy == pytest.approx(1 / 3)
    small = [{"problem": f"{n}\na) x\nb) y", "answer": "ab"[n]} for n in range(2)]
    assert load_set(written(tmp_path / "small.jsonl", small)).grader == "choice"
    few = [*LETTERED, {"problem": "1 + 1?", "answer": "2"}]
    assert load_set(written(tmp_path / "few.jsonl", few)).grader == "mathematics"


def recipe(train: Path, held_out: Path, *more: str) -> Any:
    return load_config_or_defaults(None, [f"data.train={train}", f"data.eval={held_out}", *more])


def found(config: Any) -> list[Finding]:
    """The findings about columns, answers and overlap."""
    findings = Findings()
    check_columns(all_sources(config), findings)
    with inputs_here(config, findings) as inputs:
        check_golds(inputs, findings)
        check_overlap(config, inputs, findings)
    return findings


def test_the_plan_says_what_columns_are_taken_for_and_what_is_left_out(tmp_path: Path) -> None:
    row = {"prompt": "Be brief.", "question": "{}?", "choices": TEXTS, "answer": 1, "note": "x"}
    paths = [
        written(tmp_path / name, [{**row, "question": f"{name} {n}?"} for n in range(3)])
        for name in ("train.jsonl", "eval.jsonl")
    ]
    first, second = found(recipe(paths[0], paths[1]))
    assert (first.status, second.status) == (WARN, WARN)
    assert first.found == (
        "train.jsonl: the problem is in question, its options in choices and the answer in answer "
        "(an option's index from 0); not used: prompt, note; prompt may belong to the problem, but "
        "is not used (data.columns.problem, data.columns.options or data.columns.system would use "
        "it)"
    )
    assert "data.columns.problem" in first.advice
    (folder := tmp_path / "data").mkdir()
    build_dataset(recipe(paths[0], paths[1]), folder)
    card = (folder / "data_card.md").read_text()
    assert "not used: prompt, note; prompt may belong to the problem" in card


def test_the_plan_questions_answers_of_several_lines_and_repeated_problems(tmp_path: Path) -> None:
    rows = [{"question": f"What is {n} + {n}?", "answer": f"Add.\n\nIt is {n}."} for n in range(9)]
    same = written(tmp_path / "same.jsonl", rows)
    findings = {finding.check: finding for finding in found(recipe(same, same))}
    assert findings["answers"].status == WARN
    assert (
        "9 of 9 gold answers of data.eval have several lines, such as row-0: 'Add."
        in findings["answers"].found
    )
    assert findings["contamination"].status == FAIL
    assert "leaves none to train on" in findings["contamination"].found
    math = [{"problem": f"Find {n} + 1.", "solution": f"\\boxed{{{n + 1}}}"} for n in range(3)]
    train = f"data.train={{set: math500, path: {written(tmp_path / 'math.jsonl', math)}}}"
    findings = {finding.check: finding for finding in found(recipe(same, same, train))}
    assert "the benchmark math500" in findings["benchmark"].found


def test_messages_name_the_user_s_file_and_row(tmp_path: Path) -> None:
    rows = [{"question": "Same?", "answer": n} for n in range(2)]
    path = written(tmp_path / "my.jsonl", rows)
    (finding,) = [one for one in found(recipe(path, path)) if one.status == FAIL]
    assert finding.found.startswith(
        f"{path}: different gold answers for the same prompt (row 0: '0', row 1"
    )


@pytest.mark.parametrize(
    ("more", "doubt"),
    [
        ({"opts": TEXTS, "answer": "B"}, "opts may belong"),
        ({"opts": TEXTS, "answer": 2}, "opts may belong"),
        ({"answer": "B"}, "the answers are letters of options, but the problems list none"),
        ({"distractor1": "x", "answer": "y"}, "distractor1 may belong"),
        ({"system": "Be brief.", "answer": "y"}, "system may belong"),
        ({"post_text": ["x", "z"], "answer": "y"}, "post_text may belong"),
        ({"a": 1, "b": 2, "answer": 3}, ""),
        ({"answer1": "x", "answer2": "y", "answer": "z"}, ""),
        ({"image": {"bytes": None, "path": None}, "answer": "z"}, ""),
    ],
)
def test_a_part_of_the_problem_that_is_not_recognised_is_questioned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, more: dict[str, Any], doubt: str
) -> None:
    rows = [{"question": f"{n}?", **more} for n in range(4)]
    known = recognize(written(tmp_path / "my.jsonl", rows))
    assert known.doubt.startswith(doubt)
    has_warned = any(record.levelname == "WARNING" for record in caplog.records)
    assert bool(known.doubt) == bool(doubt) == has_warned


def test_options_that_cannot_be_read_are_refused_by_row(tmp_path: Path) -> None:
    rows = [{"question": f"{n}?", "options": list("abcdefghijk"), "answer": "a"} for n in range(3)]
    path = written(tmp_path / "my.jsonl", rows)
    with pytest.raises(
        ProblemsError, match=r"3 with 11 .*data\.columns\.options=\[\].*\(rows 0, 1"
    ):
        load_set(path)
    without = recognize(path, given=Layout(options=()))
    assert (without.grader, without.doubt) == ("mathematics", "")


def test_ids_stay_those_of_the_file(tmp_path: Path) -> None:
    rows = [{"id": "a", "subject": ["x", "y"], "question": "1?", "answer": 1}]
    assert load_set(written(tmp_path / "my.jsonl", rows)).items[0] == Item(
        "a", ({"role": "user", "content": "1?" + BOXED},), "1"
    )
