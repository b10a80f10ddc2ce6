"""GSM8K: grade school mathematics in words."""

from __future__ import annotations

from eval.problems.items import Problem
from eval.problems.problem_set import ProblemSet
from eval.problems.rows import Row, Schema, needed, problem_of, text_of


def read(row: Row) -> Problem:
    """A row of {question, answer}, whose answer ends in `#### 72`."""
    text = needed(text_of(row, "question"), "no question")
    _, hashes, answer = (text_of(row, "answer") or "").rpartition("####")
    answer = answer.strip().replace(",", "") if hashes else ""
    return problem_of(row, text, needed(answer, "no answer after ####"))


_FOLDER = (
    "https://raw.githubusercontent.com/openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c/"
    "grade_school_math/data"
)
SET = ProblemSet(
    name="gsm8k",
    about="7,473 training and 1,319 test word problems with whole numbers as answers (arXiv:2110.14168)",
    licence="MIT",
    schemas=(Schema(("question", "answer"), read),),
    train={
        "huggingface": "hf:openai/gsm8k@main/main/train-00000-of-00001.parquet",
        "modelscope": "modelscope:AI-ModelScope/gsm8k@master/main/train-00000-of-00001.parquet",
        "url": f"{_FOLDER}/train.jsonl#sha256=17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
    },
    test={
        "url": f"{_FOLDER}/test.jsonl#sha256=3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
        "huggingface": "hf:openai/gsm8k@main/main/test-00000-of-00001.parquet",
        "modelscope": "modelscope:AI-ModelScope/gsm8k@master/main/test-00000-of-00001.parquet",
    },
    num_items=1319,
)
