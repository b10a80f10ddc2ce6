"""DAPO-Math-17k without its repeats and its instruction text."""

from __future__ import annotations

from dataclasses import replace

from eval.problems.items import Problem
from eval.problems.problem_set import ProblemSet
from eval.problems.rows import CHAT, Row, Schema, needed, problem_of, read_chat, text_of
from eval.problems.sets.dapo_math_17k import bare


def read_chat_row(row: Row) -> Problem:
    """A row in DAPO-Math-17k's schema, whose messages are replaced by the bare problem."""
    return replace(read_chat(row, bare), messages=None, data_source=None)


def read_processed(row: Row) -> Problem:
    """A row of {prompt, solution}: the bare problem, and its answer alone."""
    text = needed(text_of(row, "prompt"), "no prompt")
    return replace(problem_of(row, text, needed(text_of(row, "solution"), "no solution")), data_source=None)


SET = ProblemSet(
    name="dapo-math-17k-clean",
    about="the problems of DAPO-Math-17k once each, asked to end in a box",
    licence="Apache-2.0",
    schemas=(
        Schema(("prompt", "solution"), read_processed),
        Schema(CHAT.columns, read_chat_row, CHAT.others),
    ),
    train={
        "huggingface": "hf:open-r1/DAPO-Math-17k-Processed@main/all/train-00000-of-00001.parquet",
        "url": "https://raw.githubusercontent.com/MasterVito/SvS/9fd8f35375b31b8632b52e715296c264a3ad4176/"
        "data/dapo_math_17k.parquet#sha256=246ae23df97c9eae8126cb4da780e9a0a31d10110e16eed144bcecbf2132d535",
    },
)
