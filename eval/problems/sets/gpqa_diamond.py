"""GPQA diamond: graduate questions in science with four options."""

from __future__ import annotations

import random

from eval.problems.items import Problem
from eval.problems.problem_set import ProblemSet
from eval.problems.rows import Row, Schema, Unusable, needed, problem_of, text_of

SEED = 0  # of the order of the options
_OPTIONS = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


def read(row: Row) -> Problem:
    """A row of {Question, Correct Answer, Incorrect Answer 1 to 3}.

    The options are shuffled by SEED and the question, so their order does not depend on other rows.
    """
    question = needed(text_of(row, "Question"), "no Question").strip()
    options = [needed(text_of(row, name), f"no {name}").strip() for name in _OPTIONS]
    right = options[0]
    if options.count(right) > 1:
        raise Unusable("a wrong option that equals the right one")
    random.Random(f"{SEED} {question}").shuffle(options)
    listed = "\n".join(f"{letter}. {text}" for letter, text in zip("ABCD", options, strict=True))
    return problem_of(
        {"id": row.get("Record ID")},
        f"{question}\n\n{listed}\n\nPlease reason step by step, and put the letter of the right option within "
        "\\boxed{}, such as \\boxed{A}.",
        "ABCD"[options.index(right)],
        subject=text_of(row, "High-level domain"),
        level=None,
    )


SET = ProblemSet(
    name="gpqa-diamond",
    about="198 graduate questions in biology, physics and chemistry with four options (arXiv:2311.12022)",
    licence="CC BY 4.0; its page asks not to publish the questions; access must be requested",
    schemas=(Schema(("Question", *_OPTIONS), read, ("Record ID", "High-level domain")),),
    test={"huggingface": "hf:Idavidrein/gpqa@main/gpqa_diamond.csv"},
    num_items=198,
    scorer="choice",
    template="given",
    grader="choice",
)
