"""CFLUE: Chinese finance examinations with options; DianJin-R1's form of them to train on."""

from __future__ import annotations

import ast

from eval.answers.choice import find_options, option_letters
from eval.problems.items import Problem
from eval.problems.problem_set import ProblemSet
from eval.problems.rows import Row, Schema, Unusable, needed, problem_of, text_of

NO_LETTERS = "no options A to G as the answer"
# The kinds of question in the words of DianJin-R1 (arXiv:2504.15716).
_KINDS = {
    "单项选择题": "题目是单选题，只需要返回一个最合适的选项，若有多个合适的答案，只返回最准确的即可。",
    "多项选择题": "题目是多选题，可能存在多个正确的答案。",
    "判断题": "题目是判断题，只需要返回一个选项。",
}


def read_question(row: Row) -> Problem:
    """A row of CFLUE, {question, choices, answer, task}, asked as DianJin-R1 does."""
    choices = row["choices"]
    if isinstance(choices, str):
        try:
            choices = ast.literal_eval(choices)
        except (ValueError, SyntaxError):
            raise Unusable("no question with options") from None
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
    """A row of DianJin-R1, {instruction, output}: gold is what the output answers."""
    text = needed(text_of(row, "instruction"), "no instruction")
    return problem_of(row, text, needed(find_options(text_of(row, "output") or ""), NO_LETTERS))


INSTRUCTION = Schema(("instruction", "output"), read_instruction)
QUESTION = Schema(("question", "choices", "answer", "task"), read_question, (*Schema.others, "名称"))
SET = ProblemSet(
    name="cflue",
    about="Chinese finance examination questions with options A to G (arXiv:2405.10542), as DianJin-R1 asks them",
    licence="CC BY-NC-SA 4.0 (CFLUE); DianJin-R1-Data's on its page",
    schemas=(INSTRUCTION, QUESTION),
    train={"modelscope": "modelscope:tongyi_dianjin/DianJin-R1-Data@master/data/train/cflue_mcq.json"},
    test={
        "url": "https://raw.githubusercontent.com/aliyun/cflue/ff28c38f9618b51b6747f275b09d24c14fe58509/"
        "data/knowledge/knowledge.json#sha256=e8473fc0d34973a3250532d9705a5432ddfb5481418bce70073d36b34f47fc79",
    },
    num_items=3864,
    scorer="choice",
    template="given",
    grader="choice",
)
