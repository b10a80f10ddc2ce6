"""Geometry3K: geometry with diagrams, of which the text is read."""

from __future__ import annotations

from eval.problems.items import Problem
from eval.problems.problem_set import ProblemSet
from eval.problems.rows import Row, Schema, needed, problem_of, text_of


def read(row: Row) -> Problem:
    """A row of {images, problem, answer}. The place of the diagram, `<image>`, is left out of the text."""
    text = needed((text_of(row, "problem") or "").replace("<image>", "").strip(), "no problem")
    return problem_of(row, text, needed(text_of(row, "answer"), "no answer"))


_FILE = "hf:hiyouga/geometry3k@main/data/{}-00000-of-00001.parquet"
SET = ProblemSet(
    name="geometry3k",
    about="2,101 training and 601 test problems of geometry (arXiv:2105.04165), without their diagrams",
    licence="MIT",
    schemas=(Schema(("problem", "answer"), read),),
    train={"huggingface": _FILE.format("train")},
    test={"huggingface": _FILE.format("test")},
    num_items=601,
    scorer="math_verify",
)
