"""Questions of the user's own with options A to G."""

from __future__ import annotations

from dataclasses import replace

from eval.answers.choice import option_letters
from eval.problems.items import Problem
from eval.problems.problem_set import ProblemSet
from eval.problems.rows import CHAT, Row, Schema, needed, read_chat
from eval.problems.sets.cflue import INSTRUCTION, NO_LETTERS, QUESTION


def read(row: Row) -> Problem:
    """A row in DAPO-Math-17k's schema whose ground truth names options, such as `C, A`."""
    problem = read_chat(row)
    return replace(problem, gold=needed(option_letters(problem.gold), NO_LETTERS))


SET = ProblemSet(
    name="choice",
    about="your own questions with options A to G, in the form of CFLUE, DianJin-R1 or DAPO-Math-17k",
    licence="yours",
    schemas=(INSTRUCTION, QUESTION, Schema(CHAT.columns, read, CHAT.others)),
    scorer="choice",
    template="given",
    grader="choice",
)
