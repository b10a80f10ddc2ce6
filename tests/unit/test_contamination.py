"""Training problems that are also in an evaluation set: which match, and what happens to them."""

import json
import os
import re
from pathlib import Path

import pytest

from dapo_core.demo.arithmetic import generate_problems
from dapo_core.errors import DataError
from eval.problems.files import iterate_problems, read_problems
from eval.problems.items import Problem
from eval.problems.recognition import recognize
from eval.problems.rows import CHAT
from flows.config import resolve_config
from tasks.data import contamination
from tasks.data.benchmarks import benchmark_of
from tasks.data.contamination import Hit, find_hits, rows_to_drop, shared_sentences
from tasks.data.prepare import build_dataset

DATA = os.environ.get("DAPO_TEST_DATA")
BEADS = (
    "A bag holds two red beads and two green beads. You draw a bead $3$ times, replacing it each "
    "time by a red one. Find the probability $p$."
)


def found(train: list[str], held_out: list[str]) -> list[tuple[int, str, float]]:
    problems = [Problem(str(number), text, "1") for number, text in enumerate(held_out)]
    return [
        (hit.row, hit.item, hit.overlap)
        for hit in find_hits("train", lambda: iter(train), {"set": problems})
    ]


@pytest.mark.parametrize(
    ("train", "held_out"),
    [
        # dollars, braces, full stops, \dfrac
        (r"Compute $\dfrac{1}{2} + x^{2}$.", r"Compute \(\frac12+x^2\)"),
        # layout, case, a minus sign of Unicode
        (r"Solve $\left( x-1 \right) = 2$", "solve (x − 1)=2"),
        ("Ｓｏｌｖｅ　ｘ＋１＝２", "Solve x+1=2"),  # full width
        ("已知 $x>0$，求 $x+1$ 的最小值。", "已知x>0,求x+1的最小值"),  # no spaces between words
        (
            r"\begin{align*} x &= 1 \end{align*} [asy] draw((0,0)--(9,9)); [/asy] Find $x$",
            "x=1. Find $x$.",
        ),
    ],
)
def test_equal_texts_match_whatever_their_layout(train: str, held_out: str) -> None:
    assert found(["What is 5 * 5?", train], [held_out, "What is 6 * 6?"]) == [(1, "0", 1.0)]


@pytest.mark.parametrize(
    ("train", "held_out"),
    [
        (r"Solve $x^4 - x^2 + 1 = 0$", r"Solve $x^4 + x^2 + 1 = 0$"),  # short, another sign
        # short, within a longer one
        (r"Compute $\sin 60^\circ + \cos 30^\circ$", r"Compute $\sin 60^\circ$"),
        (BEADS.replace("3", "4"), BEADS),  # another number
        (BEADS.replace("$p$", "$p - 1$"), BEADS.replace("$p$", "$p + 1$")),  # another sign
        # nothing but drawings
        ("[asy] draw((0,0)--(1,1)); [/asy]", "[asy] draw((0,0)--(2,2)); [/asy]"),
    ],
)
def test_variants_do_not_match(train: str, held_out: str) -> None:
    assert found([train], [held_out]) == []


def test_reworded_problems_match_by_runs_of_words() -> None:
    # "... by a red one." is 24 words, of which the training problem has all 24 in a row: 24 of 28.
    train = BEADS.replace(
        "Find the probability $p$.", "What is p? Give it in the form k/m, and calculate k + m."
    )
    num_words = len(contamination._words(contamination.tokens_of(BEADS)))
    num_equal = len(contamination._words(contamination.tokens_of(BEADS.partition(" Find")[0])))
    assert found([train], [BEADS]) == [(0, "0", round(num_equal / num_words, 3))]
    # The first sentence alone is 10 words, no run of 13; with half of the second it is a run of
    # less than 60 %.
    assert (
        found(
            ["A bag holds two red beads and two green beads. You draw a bead $3$ balls."], [BEADS]
        )
        == []
    )


def test_a_run_that_a_text_repeats_thousands_of_times_takes_no_longer() -> None:
    long = "very long " * 3000
    held_out = [f"{long} What is 1 + 1?"]
    train = [f"{long} What is {number} + 1?" for number in range(30)]
    assert found(train, held_out) == [(1, "0", 1.0)]  # the others lack a number of the problem


def test_shared_instructions_do_not_count() -> None:
    before = (
        "Solve the following math problem step by step, and give the answer on the last line of "
        "your response."
    )
    after = 'Remember to put your answer on its own line after "Answer:".'
    rows = [f"{before}\n\nWhat is {number} + 1?\n\n{after}" for number in range(6)]
    assert shared_sentences(rows) == ({before, after}, {before, after})
    held_out = [f"{before} What is {number} + 1? {after}" for number in range(5, 9)]
    assert found(rows, held_out) == [(5, "0", 1.0)]
    assert found(rows, ["What is 4 + 1?"]) == [(4, "0", 1.0)]  # instructions on one side only
    assert found(["What is 4 + 1?"], [held_out[0].replace("5", "4"), *held_out[1:]]) == [
        (0, "0", 1.0)
    ]


def test_templated_problems_with_other_numbers_do_not_match() -> None:
    # Each sentence is in many rows, so only the other one is compared as text: numbers count all
    # the same.
    text = "Each box holds {a} apples. How many apples in {b} boxes?"
    rows = [text.format(a=a, b=b) for a in range(10, 20) for b in range(2, 9)]
    train, held_out = rows[::2], rows[1::2]
    often, widely = shared_sentences(train)
    assert (len(often), widely) == (17, frozenset())  # all 10 first and 7 second sentences
    assert found(train, held_out) == []
    assert found(train, [*held_out, train[3]]) == [(3, str(len(held_out)), 1.0)]
    # What a fifth of the held-out problems have in common is an instruction, whatever numbers it
    # has.
    asked = [f"{row} Answer with an integer from 0 to 999." for row in held_out]
    assert found([*train, held_out[2]], asked) == [(len(train), "2", 1.0)]


def test_templated_problems_with_other_words_do_not_match() -> None:
    # Names and verbs are in lines that many rows share; the first line is in one row of each set.
    text = "Shop {shop}:\n{name} has {a} owls,\n{name} {verb} {b}.\nHow many?"
    words = [(name, verb) for name in ("Ana", "Bob", "Eve") for verb in ("buys", "sells", "finds")]
    train, held_out = (
        [
            text.format(shop=shop, name=name, a=8, verb=verb, b=3)
            for shop in range(54)
            for name, verb in [words[(shop + later) % 9]]
        ]
        for later in (0, 1)
    )
    often, widely = shared_sentences(held_out)
    assert "Ana buys 3." in often - widely
    assert found(train, held_out) == []
    assert found(train, [*held_out, train[3]]) == [(3, "54", 1.0)]


def test_generated_problems_do_not_match() -> None:
    train, held_out = (
        [row["prompt"][0]["content"] for row in rows]
        for rows in generate_problems(3000, 300, 3, seed=0)
    )
    assert found(train, held_out) == []


def test_row_numbers_and_sets_are_kept_across_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contamination, "BATCH_ROWS", 2)
    sets = {"one": [Problem("7", "What is 3 + 1?", "4")], "two": [Problem("9", "what is 3+1", "4")]}
    rows = [f"What is {number} + 1?" for number in range(5)]
    hits = [
        (hit.row, hit.evaluation_set, hit.item)
        for hit in find_hits("train", lambda: iter(rows), sets)
    ]
    assert hits == [(3, "one", "7"), (3, "two", "9")]
    assert (
        find_hits("train", lambda: iter(()), sets)
        == find_hits("train", lambda: iter(rows), {})
        == []
    )


def test_matches_are_removed_kept_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    hits = [
        Hit("x.parquet", 4, "aime24", "2", True, 1.0, "t", "e"),
        Hit("x.parquet", 4, "math500", "a", False, 0.7, "t", "e"),
        Hit("x.parquet", 5, "math500", "a", False, 0.9, "t", "e"),
    ]
    counted = (
        r"2 of 9 training problems of x\.parquet are also in aime24 \(1 of its items\), "
        r"math500 \(1 of its items\)"
    )
    assert rows_to_drop([], 9, "error") == (set(), "")
    removed, kept = rows_to_drop(hits, 9, "remove"), rows_to_drop(hits, 9, "warn")
    assert (removed[0], kept[0]) == ({4, 5}, set())
    assert re.search(rf"{counted}; they are left out", removed[1])
    assert re.search(rf"{counted}; they are kept", kept[1])
    with pytest.raises(
        DataError, match=rf"{counted} \(row 4 is aime24 2; .*data\.contamination=remove"
    ):
        rows_to_drop(hits, 9, "error")
    with pytest.raises(
        DataError, match=r"2 of 2 .*leaves none to train on.*data\.contamination=warn"
    ):
        rows_to_drop(hits, 2, "remove")


@pytest.mark.parametrize("mode", ["remove", "warn", "error"])
def test_preparation_follows_data_contamination(mode: str, tmp_path: Path) -> None:
    def write(name: str, problems: list[str]) -> str:
        rows = [
            {"problem": problem, "answer": str(number)} for number, problem in enumerate(problems)
        ]
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    first = write("first.jsonl", ["What is 1 + 1?", "What is 2 + 2?", "What is 3 + 3?"])
    second = write("second.jsonl", ["What is 4 + 4?", "What is 5 + 5?", "What is 4 + 4?"])
    held_out = write("held_out.jsonl", ["what is $5+5$", "What is 2+2 ?"])
    data = {"train": [first, second], "eval": held_out, "contamination": mode}
    config = resolve_config({"data": data, "model": {"source": "recipe"}})
    if mode == "error":
        with pytest.raises(
            DataError, match=r"1 of 3 training problems of first\.jsonl are also in held_out"
        ):
            build_dataset(config, tmp_path)
        return
    metrics = build_dataset(config, tmp_path)
    texts = [problem.text for problem in read_problems(tmp_path / "train.parquet", (CHAT,))]
    card = json.loads((tmp_path / "data_card.json").read_text(encoding="utf-8"))
    left_out = {"What is 2 + 2?", "What is 5 + 5?"} if mode == "remove" else set()
    # second.jsonl answers its first problem once as 0 and once as 2: both rows go.
    assert set(texts) | left_out == {
        "What is 1 + 1?",
        "What is 2 + 2?",
        "What is 3 + 3?",
        "What is 5 + 5?",
    }
    assert not left_out & set(texts)
    assert (metrics["train_rows"], metrics["contaminated_rows"]) == (len(texts), 2)
    for entry in card["sets"]:
        removed = sum(found["rows"] for found in entry["removed"].values())
        assert entry["read"] == entry["kept"] + removed
        assert sum(entry["answers"].values()) == entry["kept"]
    assert [hit["train_set"] for hit in card["contamination"]["hits"]] == [
        "first.jsonl",
        "second.jsonl",
    ]


def test_training_on_a_file_of_a_benchmark_is_recognized_by_its_problems() -> None:
    gsm8k = [  # of its test split, MIT licence
        "Grace weighs 125 pounds. Alex weighs 2 pounds less than 4 times what Grace weighs. What "
        "are their combined weights in pounds?",
        "Rosie can run 10 miles per hour for 3 hours. After that, she runs 5 miles per hour. How "
        "many miles can she run in 7 hours?",
    ]
    own = [f"What is {n} plus {n}?" for n in range(1319)]
    assert benchmark_of("own.csv", [*gsm8k, *own[:50]]) == "gsm8k"
    asked = [*gsm8k, *own[:9]]
    wrapped = [f"Question: {text.upper()}\nThink step by step!" for text in asked]
    assert benchmark_of("own.csv", wrapped) == "gsm8k"
    assert benchmark_of("own.csv", [*gsm8k, *own]) is None  # two of many, by chance
    assert benchmark_of("own.csv", [gsm8k[0], *own[:50]]) is None
    assert benchmark_of("gsm8k.csv", own) is None
    assert benchmark_of("my_gpqa_diamond.csv", own[:198]) == "gpqa-diamond"
    assert benchmark_of("my_gpqa_diamond.csv", own[:197]) is None
    assert benchmark_of("empty.csv", []) is None


@pytest.mark.skipif(DATA is None, reason="DAPO_TEST_DATA names no folder of published data sets")
@pytest.mark.parametrize(
    ("path", "benchmark"),
    [
        ("gsm8k/test.jsonl", "gsm8k"),
        ("gsm8k/train.jsonl", None),
        ("math500/test.jsonl", "math500"),
        ("math/test.jsonl", "math"),
        ("aime24/test.jsonl", "aime24"),
        ("aime25/test.jsonl", "aime25"),
        ("amc23/test.jsonl", "amc23"),
        ("olympiadbench/test.jsonl", "olympiadbench"),
        ("minerva_math/test.jsonl", "minerva"),
        ("cflue/knowledge.json", "cflue"),
        ("dapo_math_17k/dapo_math_17k.parquet", None),
    ],
)
def test_published_files_are_recognized(path: str, benchmark: str | None) -> None:
    file = Path(str(DATA)) / path
    rows = iterate_problems(file, recognize(file).schemas, "test")
    texts = dict.fromkeys(one.text for *_, one in rows if isinstance(one, Problem))
    assert benchmark_of("own.csv", list(texts)) == benchmark


@pytest.mark.slow
@pytest.mark.skipif(DATA is None, reason="DAPO_TEST_DATA names no folder of published data sets")
def test_matches_in_published_sets() -> None:
    """DAPO-Math-17k has 24 rows that are problems of MATH-500 and 33 of AMC 2023's, but none of
    AIME 2024's.
    """
    import pyarrow.parquet as pq

    folder = Path(str(DATA))

    def problems(name: str) -> list[Problem]:
        lines = (folder / name / "test.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        return [
            Problem(str(number), row.get("problem") or row["question"], "")
            for number, row in enumerate(rows)
        ]

    table = pq.read_table(folder / "dapo_math_17k" / "dapo_math_17k.parquet", columns=["prompt"])
    texts = list(dict.fromkeys(prompt[-1]["content"] for prompt in table["prompt"].to_pylist()))
    hits = find_hits(
        "dapo-math-17k",
        lambda: iter(texts),
        {name: problems(name) for name in ("math500", "aime24", "aime25", "amc23")},
    )
    rows = {
        name: {hit.row for hit in hits if hit.evaluation_set == name}
        for name in ("math500", "aime24", "aime25", "amc23")
    }
    assert {name: len(found) for name, found in rows.items()} == {
        "math500": 24,
        "aime24": 0,
        "aime25": 0,
        "amc23": 33,
    }
