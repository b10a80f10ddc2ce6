"""The registry: every entry reads rows as published, synthetic ones and real ones if DAPO_TEST_DATA
is set.
"""

import hashlib
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from dapo_core.reward.routing import routes
from dapo_core.reward.scorers import SCORERS
from downloads import is_remote
from downloads.snapshot import parse_reference
from eval.answers.grading import ChoiceGrader
from eval.problems.evaluation_sets import load_set
from eval.problems.files import iterate_problems
from eval.problems.prompts import TEMPLATES
from eval.problems.registry import SETS
from eval.problems.rows import ProblemSet, Unusable
from eval.problems.sets.mathematics import AFTER, BEFORE

REAL = os.environ.get("DAPO_TEST_DATA")
real_rows = pytest.mark.skipif(REAL is None, reason="needs DAPO_TEST_DATA")

CHAT = {
    "data_source": "math_dapo",
    "reward_model": {"ground_truth": "34"},
    "extra_info": {"index": "a"},
}
ASKED = f"{BEFORE}P?{AFTER}"
GPQA = {
    "Question": "Which?",
    "Correct Answer": "right",
    "Record ID": "r1",
    "High-level domain": "Physics",
}
GPQA |= {f"Incorrect Answer {n}": f"wrong {n}" for n in (1, 2, 3)}
MADE: list[
    tuple[str, dict[str, Any], tuple[str, str, str | None, str | None]]
] = [  # text, gold, subject, level
    (
        "dapo-math-17k",
        {**CHAT, "prompt": [{"role": "user", "content": ASKED}]},
        ("P?", "34", None, None),
    ),
    (
        "dapo-math-17k-clean",
        {**CHAT, "prompt": [{"role": "user", "content": "P?"}]},
        ("P?", "34", None, None),
    ),
    ("dapo-math-17k-clean", {"prompt": "P?", "solution": "34"}, ("P?", "34", None, None)),
    (
        "deepmath-103k",
        {
            "question": "P?",
            "final_answer": r"$\frac{1}{2}$",
            "difficulty": 6.5,
            "topic": "Calculus",
        },
        ("P?", r"\frac{1}{2}", "Calculus", "6.5"),
    ),
    (
        "math",
        {"problem": "P?", "solution": r"So \boxed{x^2}.", "level": "Level 3", "type": "Algebra"},
        ("P?", "x^2", "Algebra", "Level 3"),
    ),
    (
        "geometry3k",
        {"images": [b"x"], "problem": "<image>Find x.", "answer": "2 \\sqrt { 221 }"},
        ("<image>Find x.", "2 \\sqrt { 221 }", None, None),
    ),
    (
        "cflue",
        {"instruction": "P?", "output": r"<think>A</think><answer>\boxed{B}\boxed{D}</answer>"},
        ("P?", "BD", None, None),
    ),
    (
        "olympiadbench",
        {"question": "P?", "context": "C.", "final_answer": ["$2$"], "subfield": "Algebra"},
        ("C.\n\nP?", "2", "Algebra", None),
    ),
]


def read(known: ProblemSet, row: dict[str, Any]) -> Any:
    schema = next(schema for schema in known.schemas if row.keys() >= set(schema.columns))
    return schema.read(row)


@pytest.mark.parametrize(
    ("name", "row", "expected"), MADE, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_published_row_is_read(name: str, row: dict[str, Any], expected: tuple[str, ...]) -> None:
    problem = read(SETS[name], row)
    assert (problem.text, problem.gold, problem.subject, problem.level) == expected
    scorer = SCORERS[routes()[name]]
    assert scorer(f"So it is \\boxed{{{problem.gold}}}.", problem.gold).verdict == "right"


def test_gpqa_options_are_shuffled_by_the_question_only() -> None:
    problems = [
        read(SETS["gpqa-diamond"], {**GPQA, "Question": f"Question {n}?"}) for n in range(200)
    ]
    places = Counter(problem.gold for problem in problems)
    assert set(places) == set("ABCD")
    assert max(places.values()) < 80
    for problem in problems:
        assert f"{problem.gold}. right" in problem.text
    again = read(SETS["gpqa-diamond"], {**GPQA, "Question": "Question 7?"})
    assert again == problems[7]
    with pytest.raises(Unusable, match="a wrong option that equals the right one"):
        read(SETS["gpqa-diamond"], {**GPQA, "Incorrect Answer 2": "right "})


def test_every_entry_is_complete() -> None:
    for name, known in SETS.items():
        assert name == known.name
        assert known.scorer in SCORERS
        assert known.template in TEMPLATES
        assert known.about
        assert known.licence
        references = [*known.train.values(), *known.test.values()]
        assert references or name in ("arithmetic", "shapes", "choice")
        for reference in references:
            assert is_remote(reference)
            if not reference.startswith("https://"):
                assert parse_reference(reference).revision, "a default revision"


@real_rows
@pytest.mark.parametrize(
    ("name", "file", "num_rows"),
    [
        ("dapo-math-17k", "dapo_math_17k/sample_original_schema.parquet", 1100),
        ("dapo-math-17k-clean", "dapo_math_17k/dapo_math_17k.parquet", 17917),
        ("gsm8k", "gsm8k/train.jsonl", 7473),
        ("gsm8k", "gsm8k/test.jsonl", 1319),
        ("math", "math/test.jsonl", 5000),
        ("math500", "math500/test_prm800k_500.json", 500),
        ("math500", "math500/test.jsonl", 500),
        ("aime24", "aime24/test.jsonl", 30),
        ("aime25", "aime25/test.jsonl", 30),
        ("amc23", "amc23/test.jsonl", 40),
        ("minerva", "minerva_math/test.jsonl", 272),
        ("olympiadbench", "olympiadbench/test.jsonl", 675),
        ("cflue", "cflue/knowledge.json", 3864),
        ("cflue", "cflue/cflue_mcq_dianjin_shape.json", 600),
        ("geometry3k", "geometry3k/sample.jsonl", 42),
    ],
)
def test_real_files_are_read_completely_and_have_the_pinned_digest(
    name: str, file: str, num_rows: int
) -> None:
    known, path = SETS[name], Path(str(REAL)) / file
    problems = [problem for *_, problem in iterate_problems(path, known.schemas)]
    assert len(problems) == num_rows
    used = [problem for problem in problems if not isinstance(problem, Unusable)]
    assert len(used) == num_rows
    assert all(problem.text.strip() and problem.gold == problem.gold.strip() for problem in used)
    assert all(problem.text.count("<image>") == len(problem.images) for problem in used)
    assert not any("Remember to put" in problem.text for problem in used)
    scorer = SCORERS[known.scorer]
    wrong = [
        p.gold for p in used[::50] if scorer(f"\\boxed{{{p.gold}}}", p.gold).verdict != "right"
    ]
    assert wrong == []
    if num_rows == known.num_items and path.name == "test.jsonl":
        assert len(load_set(path, name).items) == num_rows
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert "url" not in known.test or known.test["url"].endswith(f"#sha256={digest}")


@real_rows
def test_real_choice_questions_and_both_formats_of_math500() -> None:
    folder = Path(str(REAL))
    cflue, dianjin = (
        folder / "cflue" / "knowledge.json",
        folder / "cflue" / "cflue_mcq_dianjin_shape.json",
    )
    rows = json.loads(cflue.read_text(encoding="utf-8"))
    loaded = load_set(cflue, "choice").items
    assert [item.gold for item in loaded] == ["".join(sorted(row["answer"])) for row in rows]
    outputs = [row["output"] for row in json.loads(dianjin.read_text(encoding="utf-8"))]
    items = load_set(dianjin, "choice").items
    grades = [
        ChoiceGrader().grade(text, "stop", item.gold)
        for text, item in zip(outputs, items, strict=True)
    ]
    assert [grade.verdict for grade in grades] == ["right"] * 600
    math500 = folder / "math500"
    assert load_set(math500 / "test.jsonl", "math500") == load_set(
        math500 / "test_prm800k_500.json", "math500"
    )


@real_rows
def test_published_and_clean_dapo_math_are_the_same_problems() -> None:
    folder = Path(str(REAL)) / "dapo_math_17k"
    published, clean = (
        [p for *_, p in iterate_problems(folder / file, SETS[name].schemas)][:1000]
        for name, file in (
            ("dapo-math-17k", "sample_original_schema.parquet"),
            ("dapo-math-17k-clean", "dapo_math_17k.parquet"),
        )
    )
    assert [(p.text, p.gold) for p in published] == [(p.text, p.gold) for p in clean]  # type: ignore[union-attr]
    rows = pq.read_table(folder / "sample_original_schema.parquet").to_pylist()[:1000]
    assert [p.messages[0]["content"] for p in published] == [
        r["prompt"][0]["content"] for r in rows
    ]  # type: ignore
    json.dumps([p.extra_info for p in published])  # type: ignore[union-attr]
