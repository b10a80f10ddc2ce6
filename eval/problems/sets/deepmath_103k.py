"""DeepMath-103K: hard problems, decontaminated by their authors against common benchmarks."""

from __future__ import annotations

from eval.problems.items import Problem
from eval.problems.problem_set import ProblemSet
from eval.problems.rows import Row, Schema, needed, problem_of, text_of


def read(row: Row) -> Problem:
    """A row of {question, final_answer, difficulty, topic}; its three solutions by DeepSeek-R1 are not read."""
    text = needed(text_of(row, "question"), "no question")
    gold = (text_of(row, "final_answer") or "").strip().strip("$").strip()
    return problem_of(row, text, needed(gold, "no final_answer"))


SET = ProblemSet(
    name="deepmath-103k",
    about="103,110 problems of levels 3 to 10 with expressions as answers (arXiv:2504.11456)",
    licence="MIT",
    schemas=(Schema(("question", "final_answer", "difficulty"), read, ("topic",)),),
    train={"huggingface": "hf:zwhe99/DeepMath-103K@main"},
    scorer="math_verify",
)
