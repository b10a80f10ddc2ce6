"""Multiple choice: CFLUE, GPQA diamond, and the user's own questions with options A to J."""

from __future__ import annotations

import random
from dataclasses import replace

from eval.answers.choice import find_options, option_letters
from eval.problems.items import Problem
from eval.problems.rows import (
    CHAT,
    ProblemSet,
    Row,
    Schema,
    needed,
    problem_of,
    read_chat,
    text_of,
)
from eval.problems.values import Unusable, parsed

NO_LETTERS = "no options A to J as the answer"
# The instruction for each kind of question, as DianJin-R1 words it (arXiv:2504.15716).
_KINDS = {
    "单项选择题": "题目是单选题，只需要返回一个最合适的选项，"
    "若有多个合适的答案，只返回最准确的即可。",
    "多项选择题": "题目是多选题，可能存在多个正确的答案。",
    "判断题": "题目是判断题，只需要返回一个选项。",
}
_OPTION_ORDER_SEED = 0
_OPTIONS = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


def read_cflue(row: Row) -> Problem:
    """Read {question, choices, answer, task} and ask it as DianJin-R1 does."""
    choices = parsed(row["choices"])
    question, kind = str(row["question"] or "").strip(), _KINDS.get(str(row["task"]))
    if not question or kind is None or not isinstance(choices, dict) or not choices:
        raise Unusable("no question with options")
    options = "\n".join(f"{letter}. {text}" for letter, text in choices.items() if text is not None)
    text = (
        f"假设你是一位金融行业专家，请回答下列问题。\n注意：{kind}\n\n{question}\n{options}\n\n"
        "请一步步思考，并把答案选项放到\\boxed{}中，如\\boxed{A}。"
    )
    return problem_of(row, text, needed(option_letters(text_of(row, "answer") or ""), NO_LETTERS))


def read_instruction(row: Row) -> Problem:
    """Read DianJin-R1's {instruction, output}; gold is the answer that the output gives."""
    text = needed(text_of(row, "instruction"), "no instruction")
    return problem_of(row, text, needed(find_options(text_of(row, "output") or ""), NO_LETTERS))


def read_letters(row: Row) -> Problem:
    """Read a row in DAPO-Math-17k's schema whose ground truth names options, such as `C, A`."""
    problem = read_chat(row)
    return replace(problem, gold=needed(option_letters(problem.gold), NO_LETTERS))


def read_gpqa(row: Row) -> Problem:
    """Read {Question, Correct Answer, Incorrect Answer 1 to 3} and shuffle the options.

    The seed contains the question, so the order does not depend on other rows.
    """
    question = needed(text_of(row, "Question"), "no Question").strip()
    options = [needed(text_of(row, name), f"no {name}").strip() for name in _OPTIONS]
    right = options[0]
    if options.count(right) > 1:
        raise Unusable("a wrong option that equals the right one")
    random.Random(f"{_OPTION_ORDER_SEED} {question}").shuffle(options)
    listed = "\n".join(f"{letter}. {text}" for letter, text in zip("ABCD", options, strict=True))
    return problem_of(
        {"id": row.get("Record ID")},
        f"{question}\n\n{listed}",
        "ABCD"[options.index(right)],
        subject=text_of(row, "High-level domain"),
        level=None,
    )


_CFLUE_SCHEMAS = (
    Schema(("instruction", "output"), read_instruction),
    Schema(("question", "choices", "answer", "task"), read_cflue),
)
CFLUE = ProblemSet(
    name="cflue",
    about="Chinese finance exams, options A to J (arXiv:2405.10542), with DianJin-R1's prompts",
    licence="CC BY-NC-SA 4.0 (CFLUE); DianJin-R1-Data's on its page",
    schemas=_CFLUE_SCHEMAS,
    train={
        "modelscope": "modelscope:tongyi_dianjin/DianJin-R1-Data@master/data/train/cflue_mcq.json"
    },
    test={
        "url": "https://raw.githubusercontent.com/aliyun/cflue/"
        "ff28c38f9618b51b6747f275b09d24c14fe58509/"
        "data/knowledge/knowledge.json#sha256="
        "e8473fc0d34973a3250532d9705a5432ddfb5481418bce70073d36b34f47fc79"
    },
    num_items=3864,
    scorer="choice",
    template="given",
    grader="choice",
)
CHOICE = ProblemSet(
    name="choice",
    about="your own questions with options A to J, as in CFLUE, DianJin-R1 or DAPO-Math-17k",
    licence="yours",
    schemas=(*_CFLUE_SCHEMAS, Schema(CHAT.columns, read_letters, CHAT.others)),
    scorer="choice",
    template="given",
    grader="choice",
)
GPQA_DIAMOND = ProblemSet(
    name="gpqa-diamond",
    about="198 graduate questions in natural sciences with four options (arXiv:2311.12022)",
    licence="CC BY 4.0; its page asks not to publish the questions; access must be requested",
    schemas=(Schema(("Question", *_OPTIONS), read_gpqa, ("Record ID", "High-level domain")),),
    test={"huggingface": "hf:Idavidrein/gpqa@main/gpqa_diamond.csv"},
    num_items=198,
    scorer="choice",
    template="choice",
    grader="choice",
)
