"""OlympiadBench: open questions of olympiads, mathematics in English."""

from __future__ import annotations

from eval.problems.items import Problem
from eval.problems.problem_set import ProblemSet
from eval.problems.rows import Row, Schema, needed, problem_of, text_of


def read(row: Row) -> Problem:
    """A row of {context, question, final_answer: [...]}; dollar signs, placed inconsistently, are left out."""
    question = needed(text_of(row, "question"), "no question")
    context = text_of(row, "context")
    answers = row["final_answer"]
    answers = answers if isinstance(answers, list) else [answers]
    gold = ", ".join(str(answer).replace("$", "").strip() for answer in answers if answer)
    return problem_of(row, f"{context}\n\n{question}" if context else question, needed(gold, "no final_answer"))


SET = ProblemSet(
    name="olympiadbench",
    about="675 open questions of olympiads, mathematics in English (arXiv:2402.14008)",
    licence="MIT",
    schemas=(Schema(("question", "final_answer"), read, (*Schema.others, "context", "subfield")),),
    test={
        "url": "https://raw.githubusercontent.com/hkust-nlp/simpleRL-reason/cf1c7858bfc145a27aa733e75d930d34f0d318a6/"
        "examples/simplelr_math_eval/data/olympiadbench/test.jsonl"
        "#sha256=bb8c1e38a16ea9eacb77530315a674d883f267fbff79183effc53681b4fcc416",
    },
    num_items=675,
    scorer="math_verify",
)
