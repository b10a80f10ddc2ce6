"""MATH-500: 500 problems of MATH's test split, chosen by OpenAI for PRM800K."""

from eval.problems.problem_set import ProblemSet
from eval.problems.rows import SOLVED

SET = ProblemSet(
    name="math500",
    about="500 problems of MATH's test split (arXiv:2305.20050), levels 1 to 5",
    licence="MIT",
    schemas=(SOLVED,),
    test={
        # Byte for byte openai/prm800k's prm800k/math_splits/test.jsonl.
        "url": "https://raw.githubusercontent.com/hkust-nlp/simpleRL-reason/cf1c7858bfc145a27aa733e75d930d34f0d318a6/"
        "examples/simplelr_math_eval/data/math500/test.jsonl"
        "#sha256=35dc41080a3680858b27fa7e0533d2d547825316fc5dafe5d316f4ccc5a06132",
        "huggingface": "hf:HuggingFaceH4/MATH-500@main/test.jsonl",
        "modelscope": "modelscope:AI-ModelScope/MATH-500@master/test.jsonl",
    },
    num_items=500,
    scorer="math_verify",
)
