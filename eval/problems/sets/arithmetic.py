"""Arithmetic problems made by code: the data of the default recipe."""

from eval.problems.problem_set import ProblemSet
from eval.problems.rows import CHAT

SET = ProblemSet(
    name="arithmetic",
    about="generated sums, differences and products (data.arithmetic); nothing is fetched",
    licence="Apache-2.0",
    schemas=(CHAT,),
    scorer="math_boxed",
    template="given",
)
