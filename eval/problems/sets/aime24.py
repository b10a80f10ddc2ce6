"""AIME 2024, and the form of its siblings: a problem and a whole number."""

from __future__ import annotations

import re
from dataclasses import replace

from eval.problems.items import Problem
from eval.problems.problem_set import ProblemSet
from eval.problems.rows import CHAT, Row, Schema, needed, problem_of, read_chat, text_of

NO_INTEGER = "no whole number as the answer"


def integer(text: str | None) -> str:
    r"""A whole number without leading zeros: files write 27.0, "073" and, in AIME 2025, "336^\circ"."""
    match = re.fullmatch(r"\s*(-?\d+)(?:\.0+)?\s*(?:\^\{?\\circ\}?)?\s*", text or "")
    return str(int(needed(match and match.group(1), NO_INTEGER)))


def read_problem(row: Row) -> Problem:
    """A row of {problem, answer}."""
    return problem_of(row, needed(text_of(row, "problem"), "no problem"), integer(text_of(row, "answer")))


def read_question(row: Row) -> Problem:
    """A row of {question, answer}."""
    return problem_of(row, needed(text_of(row, "question"), "no question"), integer(text_of(row, "answer")))


def read_repeated(row: Row) -> Problem:
    """A row of the published file that has every problem 32 times, in DAPO-Math-17k's schema."""
    problem = read_chat(row)
    return replace(problem, gold=integer(problem.gold))


FORMS = (
    Schema(("problem", "answer"), read_problem),
    Schema(("question", "answer"), read_question),
    Schema(CHAT.columns, read_repeated, CHAT.others),
)
SET = ProblemSet(
    name="aime24",
    about="30 problems of the American Invitational Mathematics Examination 2024",
    licence="the problems are the Mathematical Association of America's",
    schemas=FORMS,
    test={
        "url": "https://raw.githubusercontent.com/hkust-nlp/simpleRL-reason/cf1c7858bfc145a27aa733e75d930d34f0d318a6/"
        "examples/simplelr_math_eval/data/aime24/test.jsonl"
        "#sha256=af2b8bd2aa911b6333ad0df32f3ca05c7ae8ed10f1731f4372c8ae26990bf7ac",
        "huggingface": "hf:HuggingFaceH4/aime_2024@main/data/train-00000-of-00001.parquet",
    },
    num_items=30,
)
