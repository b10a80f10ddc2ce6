"""AIME 2025."""

from eval.problems.problem_set import ProblemSet
from eval.problems.sets.aime24 import FORMS

SET = ProblemSet(
    name="aime25",
    about="30 problems of the American Invitational Mathematics Examination 2025",
    licence="the problems are the Mathematical Association of America's",
    schemas=FORMS,
    test={"huggingface": "hf:math-ai/aime25@main/test.jsonl"},
    num_items=30,
)
