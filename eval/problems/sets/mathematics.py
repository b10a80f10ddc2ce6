"""Mathematics: training sets, competitions and benchmarks with numbers or expressions."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from eval.problems.items import Problem
from eval.problems.rows import (
    CHAT,
    IMAGES,
    SOLVED,
    ProblemSet,
    Row,
    Schema,
    needed,
    problem_of,
    read_chat,
    text_of,
    with_images,
)
from eval.problems.values import images_in

BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'
NO_INTEGER = "no whole number as the answer"
_MAA = "the problems are the Mathematical Association of America's"
_SIMPLERL = (
    "https://raw.githubusercontent.com/hkust-nlp/simpleRL-reason/"
    "cf1c7858bfc145a27aa733e75d930d34f0d318a6/examples/simplelr_math_eval/data"
)
_GRADE_SCHOOL_MATH = (
    "https://raw.githubusercontent.com/openai/grade-school-math/"
    "3101c7d5072418e28b9008a6636bde82a006892c/grade_school_math/data"
)
_MATH_LIGHTEVAL = "hf:DigitalLearningGmbH/MATH-lighteval@main/data/{}-00000-of-00001.parquet"
_GEOMETRY3K = "hf:hiyouga/geometry3k@main/data/{}-00000-of-00001.parquet"


def bare(prompt: str) -> str:
    """Strip DAPO-Math-17k's instruction from a prompt."""
    return prompt.removeprefix(BEFORE).removesuffix(AFTER)


def read_dapo(row: Row) -> Problem:
    """Read a DAPO-Math-17k row. The prompt keeps the instruction, the problem does not."""
    return read_chat(row, bare)


def read_dapo_clean(row: Row) -> Problem:
    """Read a DAPO-Math-17k row, dropping its messages so that the bare problem is asked."""
    return replace(read_chat(row, bare), messages=None, data_source=None)


def read_processed(row: Row) -> Problem:
    """Read {prompt, solution}: the bare problem and its final answer."""
    text = needed(text_of(row, "prompt"), "no prompt")
    return replace(
        problem_of(row, text, needed(text_of(row, "solution"), "no solution")), data_source=None
    )


def _reader(problem: str, answer: str, gold_of: Callable[[str], str]) -> Callable[[Row], Problem]:
    """Return the reader of rows with these columns; `gold_of` takes the gold from the answer."""

    def read(row: Row) -> Problem:
        text = needed(text_of(row, problem), f"no {problem}")
        return problem_of(row, text, needed(gold_of(text_of(row, answer) or ""), f"no {answer}"))

    return read


def without_dollars(answer: str) -> str:
    """Return the formula between dollar signs."""
    return answer.strip().strip("$").strip()


def after_hashes(answer: str) -> str:
    """Return the number of GSM8K's answers, which end in `#### 72`."""
    _, hashes, number = answer.rpartition("####")
    return needed(number.strip().replace(",", "") if hashes else "", "no answer after ####")


_read_geometry_text = _reader("problem", "answer", str.strip)


def read_geometry(row: Row) -> Problem:
    """Read {images, problem, answer}, whose `<image>` are the places of the images."""
    problem = _read_geometry_text(row)
    return with_images(problem, images_in(row, IMAGES))


def read_olympiad(row: Row) -> Problem:
    """Read {context, question, final_answer: [...]}; misplaced dollar signs are dropped."""
    question = needed(text_of(row, "question"), "no question")
    context = text_of(row, "context")
    answers = row["final_answer"]
    answers = answers if isinstance(answers, list) else [answers]
    gold = ", ".join(str(answer).replace("$", "").strip() for answer in answers if answer)
    return problem_of(
        row, f"{context}\n\n{question}" if context else question, needed(gold, "no final_answer")
    )


def integer(text: str) -> str:
    r"""Return a whole number without leading zeros, from 27.0, "073" or AIME 2025's "336^\circ"."""
    match = re.fullmatch(r"\s*(-?\d+)(?:\.0+)?\s*(?:\^\{?\\circ\}?)?\s*", text)
    return str(int(needed(match and match.group(1), NO_INTEGER)))


def read_repeated(row: Row) -> Problem:
    """Read the DAPO authors' AIME file: DAPO-Math-17k's schema, each problem on 32 rows."""
    problem = read_chat(row)
    return replace(problem, gold=integer(problem.gold))


_COMPETITION = (
    Schema(("problem", "answer"), _reader("problem", "answer", integer), is_common=True),
    Schema(("question", "answer"), _reader("question", "answer", integer), is_common=True),
    Schema(CHAT.columns, read_repeated, CHAT.others),
)

TRAINING_SETS = (
    ProblemSet(
        name="dapo-math-17k",
        about="1.79 million rows, a hundred per problem, prompted for `Answer:` (arXiv:2503.14476)",
        licence="Apache-2.0",
        schemas=(Schema(CHAT.columns, read_dapo, CHAT.others),),
        train={
            "huggingface": "hf:BytedTsinghua-SIA/DAPO-Math-17k@main/data/dapo-math-17k.parquet",
            "modelscope": "modelscope:AI-ModelScope/DAPO-Math-17k@master"
            "/data/dapo-math-17k.parquet",
        },
        scorer="math_dapo",
        template="given",
    ),
    ProblemSet(
        name="dapo-math-17k-clean",
        about="the problems of DAPO-Math-17k once each, prompted to end in a box",
        licence="Apache-2.0",
        schemas=(
            Schema(("prompt", "solution"), read_processed),
            Schema(CHAT.columns, read_dapo_clean, CHAT.others),
        ),
        train={
            "huggingface": "hf:open-r1/DAPO-Math-17k-Processed@main"
            "/all/train-00000-of-00001.parquet",
            "url": "https://raw.githubusercontent.com/MasterVito/SvS/"
            "9fd8f35375b31b8632b52e715296c264a3ad4176/"
            "data/dapo_math_17k.parquet#sha256="
            "246ae23df97c9eae8126cb4da780e9a0a31d10110e16eed144bcecbf2132d535",
        },
    ),
    ProblemSet(
        name="deepmath-103k",
        about="103,110 problems of levels 3 to 10 with expressions as answers (arXiv:2504.11456)",
        licence="MIT",
        schemas=(
            Schema(  # without DeepSeek-R1's solutions
                ("question", "final_answer", "difficulty"),
                _reader("question", "final_answer", without_dollars),
            ),
        ),
        train={"huggingface": "hf:zwhe99/DeepMath-103K@main"},
    ),
    ProblemSet(
        name="math",
        about="7,500 training and 5,000 test problems, levels 1 to 5 (arXiv:2103.03874)",
        licence="MIT",
        schemas=(SOLVED,),
        train={"huggingface": _MATH_LIGHTEVAL.format("train")},
        test={
            "url": "https://raw.githubusercontent.com/microsoft/ToRA/"
            "213c1c995038c73fab10343814df7a42f990f026/"
            "src/data/math/test.jsonl#sha256="
            "3371949f33dd702d04b43fddd7d53a028de0aaca0e76abb1b875a050297b3aa4",
            "huggingface": _MATH_LIGHTEVAL.format("test"),
        },
        num_items=5000,
    ),
    ProblemSet(
        name="gsm8k",
        about="7,473 training and 1,319 test word problems with whole numbers (arXiv:2110.14168)",
        licence="MIT",
        schemas=(Schema(("question", "answer"), _reader("question", "answer", after_hashes)),),
        train={
            "huggingface": "hf:openai/gsm8k@main/main/train-00000-of-00001.parquet",
            "modelscope": "modelscope:AI-ModelScope/gsm8k@master/main/train-00000-of-00001.parquet",
            "url": f"{_GRADE_SCHOOL_MATH}/train.jsonl"
            "#sha256=17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
        },
        test={
            "url": f"{_GRADE_SCHOOL_MATH}/test.jsonl"
            "#sha256=3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
            "huggingface": "hf:openai/gsm8k@main/main/test-00000-of-00001.parquet",
            "modelscope": "modelscope:AI-ModelScope/gsm8k@master/main/test-00000-of-00001.parquet",
        },
        num_items=1319,
    ),
    ProblemSet(
        name="geometry3k",
        about="2,101 training and 601 test geometry problems with diagrams (arXiv:2105.04165)",
        licence="MIT",
        schemas=(Schema(("images", "problem", "answer"), read_geometry, is_common=True),),
        train={"huggingface": _GEOMETRY3K.format("train")},
        test={"huggingface": _GEOMETRY3K.format("test")},
        num_items=601,
        scorer="geo3k",
        template="geo3k",
        grader="geometry",
    ),
)
ARITHMETIC = ProblemSet(
    name="arithmetic",
    about="generated sums, differences and products (data.arithmetic); nothing is fetched",
    licence="Apache-2.0",
    schemas=(CHAT,),
    template="given",
)
SHAPES = ProblemSet(
    name="shapes",
    about="generated pictures of shapes to count and to find (data.shapes); nothing is fetched",
    licence="Apache-2.0",
    schemas=(CHAT,),
    template="given",
)
BENCHMARKS = (
    ProblemSet(
        name="math500",
        about="500 problems of MATH's test split (arXiv:2305.20050), levels 1 to 5",
        licence="MIT",
        schemas=(SOLVED,),
        test={
            # Byte for byte openai/prm800k's prm800k/math_splits/test.jsonl.
            "url": f"{_SIMPLERL}/math500/test.jsonl"
            "#sha256=35dc41080a3680858b27fa7e0533d2d547825316fc5dafe5d316f4ccc5a06132",
            "huggingface": "hf:HuggingFaceH4/MATH-500@main/test.jsonl",
            "modelscope": "modelscope:AI-ModelScope/MATH-500@master/test.jsonl",
        },
        num_items=500,
    ),
    ProblemSet(
        name="aime24",
        about="30 problems of the American Invitational Mathematics Examination 2024",
        licence=_MAA,
        schemas=_COMPETITION,
        test={
            "url": f"{_SIMPLERL}/aime24/test.jsonl"
            "#sha256=af2b8bd2aa911b6333ad0df32f3ca05c7ae8ed10f1731f4372c8ae26990bf7ac",
            "huggingface": "hf:HuggingFaceH4/aime_2024@main/data/train-00000-of-00001.parquet",
        },
        num_items=30,
    ),
    ProblemSet(
        name="aime25",
        about="30 problems of the American Invitational Mathematics Examination 2025",
        licence=_MAA,
        schemas=_COMPETITION,
        test={"huggingface": "hf:math-ai/aime25@main/test.jsonl"},
        num_items=30,
    ),
    ProblemSet(
        name="amc23",
        about="40 problems of the American Mathematics Competitions 2023, with whole numbers",
        licence=_MAA,
        schemas=_COMPETITION,
        test={
            "url": f"{_SIMPLERL}/amc23/test.jsonl"
            "#sha256=43707e1ca784602d8479de24ee8ce36609dbebc46dd152b0b12a46611aa898a4",
            "huggingface": "hf:math-ai/amc23@main",
        },
        num_items=40,
    ),
    ProblemSet(
        name="olympiadbench",
        about="675 open questions of olympiads, mathematics in English (arXiv:2402.14008)",
        licence="MIT",
        schemas=(Schema(("question", "final_answer"), read_olympiad, (*Schema.others, "context")),),
        test={
            "url": f"{_SIMPLERL}/olympiadbench/test.jsonl"
            "#sha256=bb8c1e38a16ea9eacb77530315a674d883f267fbff79183effc53681b4fcc416"
        },
        num_items=675,
    ),
    ProblemSet(
        name="minerva",
        about="272 undergraduate questions from OpenCourseWare (arXiv:2206.14858)",
        licence="MIT (the collection); the questions are MIT OpenCourseWare's, CC BY-NC-SA 4.0",
        schemas=(SOLVED,),
        test={
            "url": f"{_SIMPLERL}/minerva_math/test.jsonl"
            "#sha256=0e656b430d3a0a1dab6aa853f453ba3805e28e2cabe4fc72486a897cc09d8ba2"
        },
        num_items=272,
    ),
)
