"""DAPO-Math-17k as published: about 17,400 problems with whole numbers as answers, each on a hundred rows."""

from __future__ import annotations

from eval.problems.items import Problem
from eval.problems.problem_set import ProblemSet
from eval.problems.rows import CHAT, Row, Schema, read_chat

BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'


def bare(prompt: str) -> str:
    """The problem without the instruction around it."""
    return prompt.removeprefix(BEFORE).removesuffix(AFTER)


def read(row: Row) -> Problem:
    """A row in DAPO-Math-17k's schema. The instruction stays in the prompt; the problem is what it encloses."""
    return read_chat(row, bare)


SET = ProblemSet(
    name="dapo-math-17k",
    about="1.79 million rows, a hundred of each problem, asked to end in `Answer:` (arXiv:2503.14476)",
    licence="Apache-2.0",
    schemas=(Schema(CHAT.columns, read, CHAT.others),),
    train={
        "huggingface": "hf:BytedTsinghua-SIA/DAPO-Math-17k@main/data/dapo-math-17k.parquet",
        "modelscope": "modelscope:AI-ModelScope/DAPO-Math-17k@master/data/dapo-math-17k.parquet",
    },
    scorer="math_dapo",
    template="given",
)
