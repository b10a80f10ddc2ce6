"""The benchmarks: how each is read, its number of rows, its prompt, its grader and its source."""

from __future__ import annotations

import ast
import difflib
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from eval.answers.choice import find_options, option_letters
from eval.answers.extraction import extract_boxed
from eval.answers.grading import GraderName
from eval.problems import ProblemsError
from eval.problems.files import Row, Schema, chat_of, last_of_chat, merge_repeats, read_problems, text_of
from eval.problems.items import EvaluationSet, Item, Problem
from eval.problems.prompts import DEFAULT, Api, Template, find_template, make_prompt
from eval.problems.sources import fetch

logger = logging.getLogger(__name__)


def _boxed_or_answer(row: Row) -> str | None:
    """The last box of the solution, as in AISBench, or the answer where there is no box."""
    return extract_boxed(text_of(row, "solution") or "") or text_of(row, "answer")


def _integer(text: str | None) -> str | None:
    """A whole number without leading zeros: files write 27.0, "073" and, in AIME 2025, "336^\\circ"."""
    match = re.fullmatch(r"\s*(-?\d+)(?:\.0+)?\s*(?:\^\{?\\circ\}?)?\s*", text or "")
    return str(int(match.group(1))) if match else None


def _after_hashes(row: Row) -> str | None:
    _, hashes, answer = (text_of(row, "answer") or "").rpartition("####")
    return answer.strip().replace(",", "") or None if hashes else None


def _final_answers(row: Row) -> str | None:
    """OlympiadBench's list of answers as one text without dollar signs, which it places inconsistently."""
    answers = row["final_answer"]
    answers = answers if isinstance(answers, list) else [answers]
    return ", ".join(str(answer).replace("$", "").strip() for answer in answers if answer) or None


def _with_context(row: Row) -> str | None:
    parts = [text_of(row, "context"), text_of(row, "question")]
    return "\n\n".join(part for part in parts if part) if parts[1] else None


def _ground_truth(row: Row) -> str | None:
    return text_of(row["reward_model"], "ground_truth")


def _cflue_question(row: Row) -> str | None:
    """A CFLUE row (question, choices, task) as DianJin-R1 asks it; None when a part is missing."""
    choices = row["choices"]
    if isinstance(choices, str):
        try:
            choices = ast.literal_eval(choices)
        except (ValueError, SyntaxError):
            return None
    question, kind = str(row["question"] or "").strip(), _CFLUE_KINDS.get(str(row["task"]))
    if not question or kind is None or not isinstance(choices, dict) or not choices:
        return None
    options = "\n".join(f"{letter}. {text}" for letter, text in choices.items())
    return (
        f"假设你是一位金融行业专家，请回答下列问题。\n注意：{kind}\n\n{question}\n{options}\n\n"
        "请一步步思考，并把答案选项放到\\boxed{}中，如\\boxed{A}。"
    )


def _is_no_json(row: Row) -> bool:
    extra_info = row.get("extra_info")
    try:
        json.dumps(extra_info)
    except (TypeError, ValueError):
        return True
    return not isinstance(extra_info, dict | None)


def _letters(text: str | None) -> str | None:
    return option_letters(text or "") or None


# CFLUE's kinds of question in the words of DianJin-R1 (arXiv:2504.15716).
_CFLUE_KINDS = {
    "单项选择题": "题目是单选题，只需要返回一个最合适的选项，若有多个合适的答案，只返回最准确的即可。",
    "多项选择题": "题目是多选题，可能存在多个正确的答案。",
    "判断题": "题目是判断题，只需要返回一个选项。",
}
_NO_LETTERS = "no options A to G as the answer"
MATH = Schema(
    ("problem",),
    lambda row: text_of(row, "problem"),
    _boxed_or_answer,
    "no problem",
    "neither an answer nor a boxed solution",
)
GSM8K = Schema(
    ("question", "answer"),
    lambda row: text_of(row, "question"),
    _after_hashes,
    "no question",
    "no answer after ####",
)
OLYMPIAD = Schema(("question", "final_answer"), _with_context, _final_answers, "no question", "no final_answer")
# The schema of DAPO-Math-17k, which training needs; its extra_info may be left out.
TRAINING = Schema(
    ("data_source", "prompt", "reward_model"),
    last_of_chat,
    _ground_truth,
    "an empty prompt or one that is not chat messages",
    "no reward_model.ground_truth",
    messages=chat_of,
    details=lambda row: row.get("extra_info") or {},
    other_faults={
        "an extra_info that is not a struct of what JSON knows, which checkpoints are written in": _is_no_json
    },
)
_NO_INTEGER = "no whole number as the answer"
# AIME and AMC files name the column either way; those with 32 rows for each problem have DAPO's schema.
WHOLE_NUMBERS = (
    *(
        Schema(
            (column, "answer"),
            lambda row, column=column: text_of(row, column),  # type: ignore[misc]
            lambda row: _integer(text_of(row, "answer")),
            f"no {column}",
            _NO_INTEGER,
        )
        for column in ("problem", "question")
    ),
    replace(TRAINING, gold=lambda row: _integer(_ground_truth(row)), no_gold=_NO_INTEGER),
)
CHOICE_TRAINING = replace(TRAINING, gold=lambda row: _letters(_ground_truth(row)), no_gold=_NO_LETTERS)
CFLUE = Schema(
    ("question", "choices", "answer", "task"),
    _cflue_question,
    lambda row: _letters(text_of(row, "answer")),
    "no question with options",
    _NO_LETTERS,
)
DIANJIN = Schema(
    ("instruction", "output"),
    lambda row: text_of(row, "instruction"),
    lambda row: find_options(text_of(row, "output") or "") or None,
    "no instruction",
    _NO_LETTERS,
)


@dataclass(frozen=True)
class Benchmark:
    """A named evaluation set. `source` is its default file, with its sha256."""

    name: str
    num_items: int | None  # None: any number
    schemas: tuple[Schema, ...]
    template: str = "aisbench"
    grader: GraderName = "mathematics"
    source: str | None = None

    def load(self, path: Path) -> list[Problem]:
        """The distinct problems of a file. Raises ProblemsError when it is not the complete set."""
        problems = merge_repeats(path, read_problems(path, self.schemas))
        if self.num_items not in (None, len(problems)):
            raise ProblemsError(
                f"{path} has {len(problems)} problems, but {self.name} has exactly {self.num_items}: accuracy on "
                f"it would not compare with published figures. Use the complete file, or name no benchmark."
            )
        return problems

    def template_of(self, problems: Sequence[Problem]) -> str:
        """The name of the default template: a file's own messages where it has them."""
        return "given" if any(problem.messages for problem in problems) else self.template

    def prompt(self, problem: Problem, template: Template, api: Api) -> Item:
        """The problem as it is sent to the model."""
        prompt = make_prompt(template, api, problem.text, problem.messages)
        return Item(problem.id, prompt, problem.gold, problem.subject, problem.level)


_SIMPLE_RL_DIGESTS = {
    "math500": "35dc41080a3680858b27fa7e0533d2d547825316fc5dafe5d316f4ccc5a06132",
    "aime24": "af2b8bd2aa911b6333ad0df32f3ca05c7ae8ed10f1731f4372c8ae26990bf7ac",
    "amc23": "43707e1ca784602d8479de24ee8ce36609dbebc46dd152b0b12a46611aa898a4",
    "olympiadbench": "bb8c1e38a16ea9eacb77530315a674d883f267fbff79183effc53681b4fcc416",
    "minerva_math": "0e656b430d3a0a1dab6aa853f453ba3805e28e2cabe4fc72486a897cc09d8ba2",
}


def _simple_rl(folder: str) -> str:
    """A file of hkust-nlp/simpleRL-reason; its MATH-500 is, byte for byte, openai/prm800k's."""
    return (
        "https://raw.githubusercontent.com/hkust-nlp/simpleRL-reason/cf1c7858bfc145a27aa733e75d930d34f0d318a6/"
        f"examples/simplelr_math_eval/data/{folder}/test.jsonl#sha256={_SIMPLE_RL_DIGESTS[folder]}"
    )


_GSM8K_SOURCE = (
    "https://raw.githubusercontent.com/openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c/"
    "grade_school_math/data/test.jsonl#sha256=3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14"
)
BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark("math500", 500, (MATH,), source=_simple_rl("math500")),
        Benchmark("aime24", 30, WHOLE_NUMBERS, source=_simple_rl("aime24")),
        Benchmark("aime25", 30, WHOLE_NUMBERS),
        Benchmark("amc23", 40, WHOLE_NUMBERS, source=_simple_rl("amc23")),
        Benchmark("gsm8k", 1319, (GSM8K,), source=_GSM8K_SOURCE),
        Benchmark("olympiadbench", 675, (OLYMPIAD,), source=_simple_rl("olympiadbench")),
        Benchmark("minerva", 272, (MATH,), source=_simple_rl("minerva_math")),
        Benchmark("arithmetic", None, (TRAINING,), template="given"),
        Benchmark("choice", None, (DIANJIN, CFLUE, CHOICE_TRAINING), template="given", grader="choice"),
    )
}


def load_set(
    source: str | Path | None, benchmark: str | None = None, prompt: str = DEFAULT, api: Api = "chat"
) -> EvaluationSet:
    """The items of an evaluation file, as they are sent to the model.

    `source` is what `fetch` takes; None stands for the benchmark's own. Without a benchmark a parquet is read as
    `arithmetic`, another file in the schema of MATH-500, with any number of rows; `prompt` is what find_template
    takes. Raises ProblemsError.
    """
    source = source or (find_benchmark(benchmark).source if benchmark is not None else None)
    if source is None:
        raise ProblemsError(
            f"{benchmark} has no source of its own; name its file with --data"
            if benchmark
            else "no evaluation set is named; name a known one with --dataset, or a file with --data"
        )
    path = fetch(source)
    known = benchmark_of(path, benchmark)
    problems = known.load(path)
    template = find_template(prompt, known.template_of(problems))
    items = tuple(known.prompt(problem, template, api) for problem in problems)
    return EvaluationSet(items, benchmark, template, known.grader, _num_repeats(path, problems))


def _num_repeats(path: Path, problems: Sequence[Problem]) -> int:
    """Rows of each problem; 1, with a warning, where some have more than others."""
    counts = [problem.num_rows for problem in problems]
    if len(set(counts)) == 1:
        return counts[0]
    logger.warning(
        "%s: %d of %d problems are on several rows, up to %d, and others on fewer: each is one item, asked "
        "evaluate.num_samples times", path, sum(count > 1 for count in counts), len(counts), max(counts),
    )  # fmt: skip
    return 1


def benchmark_of(path: Path, name: str | None) -> Benchmark:
    """The benchmark of that name, or without one how its file is read: a parquet as `arithmetic`, else as MATH."""
    if name is not None:
        return find_benchmark(name)
    return replace(BENCHMARKS["arithmetic" if path.suffix == ".parquet" else "math500"], num_items=None)


def find_benchmark(name: str) -> Benchmark:
    """The benchmark of that name. Raises ProblemsError with the nearest one."""
    if name in BENCHMARKS:
        return BENCHMARKS[name]
    close = difflib.get_close_matches(name, BENCHMARKS, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(BENCHMARKS)}"
    raise ProblemsError(f"{name!r} is not a benchmark; {hint}")
