"""AMC 2023."""

from eval.problems.problem_set import ProblemSet
from eval.problems.sets.aime24 import FORMS

SET = ProblemSet(
    name="amc23",
    about="40 problems of the American Mathematics Competitions 2023, with whole numbers as answers",
    licence="the problems are the Mathematical Association of America's",
    schemas=FORMS,
    test={
        "url": "https://raw.githubusercontent.com/hkust-nlp/simpleRL-reason/cf1c7858bfc145a27aa733e75d930d34f0d318a6/"
        "examples/simplelr_math_eval/data/amc23/test.jsonl"
        "#sha256=43707e1ca784602d8479de24ee8ce36609dbebc46dd152b0b12a46611aa898a4",
        "huggingface": "hf:math-ai/amc23@main",
    },
    num_items=40,
)
