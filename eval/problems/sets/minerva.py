"""Minerva MATH: undergraduate questions of MIT OpenCourseWare."""

from eval.problems.problem_set import ProblemSet
from eval.problems.rows import SOLVED

SET = ProblemSet(
    name="minerva",
    about="272 undergraduate questions in science and mathematics from OpenCourseWare (arXiv:2206.14858)",
    licence="MIT (the collection); the questions are MIT OpenCourseWare's, CC BY-NC-SA 4.0",
    schemas=(SOLVED,),
    test={
        "url": "https://raw.githubusercontent.com/hkust-nlp/simpleRL-reason/cf1c7858bfc145a27aa733e75d930d34f0d318a6/"
        "examples/simplelr_math_eval/data/minerva_math/test.jsonl"
        "#sha256=0e656b430d3a0a1dab6aa853f453ba3805e28e2cabe4fc72486a897cc09d8ba2",
    },
    num_items=272,
    scorer="math_verify",
)
