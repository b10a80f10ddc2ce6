r"""Multiple-choice questions with options A to G: how they are put, and letters as a set instead of mathematics.

Prompts such as CFLUE's ask for \boxed{A}; models write \boxed{A}\boxed{C}, \boxed{AC}, `Answer: A, C`, `答案：AC`.
"""

from __future__ import annotations

import ast
import re
import unicodedata
from collections.abc import Mapping
from typing import Any

from eval.answers.grading import Grade

CHOICE_GRADER = "choice-letters/1"

_BOX = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_JOINED = r"(?:[\s,;/&+、()\[\]$*\"'“”.]|and|or|和|与|及|或)*"
_BETWEEN_BOXES = re.compile(_JOINED)
_ANSWER_LINE = re.compile(
    r"(?:answer|答案)[*\s]*(?:is|:|应?为|应?是|选项为|选项是|应?选)[*\s:]*([^\n]*)", re.IGNORECASE
)
_MACRO = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")
_OPENING = re.compile(r"[\s$*(\[\"'“【]*(?:options?|choices?|选项?)?[\s:(\[]*", re.IGNORECASE)
_LETTERS = re.compile(r"([A-G]+)(?![A-Za-z0-9])" + _JOINED)
# What makes a letter part of an English word or sentence (`A bank`, `A-level`), or of a Chinese word (`A股`).
_GOES_ON = re.compile(r"[-’]?[A-Za-z0-9]|(?!选项|[两三四五]?项|正确|对)[^\W_]")

# CFLUE's kinds of question in the words of DianJin-R1 (arXiv:2504.15716).
_KINDS = {
    "单项选择题": "题目是单选题，只需要返回一个最合适的选项，若有多个合适的答案，只返回最准确的即可。",
    "多项选择题": "题目是多选题，可能存在多个正确的答案。",
    "判断题": "题目是判断题，只需要返回一个选项。",
}


def grade_choice(response: str | None, finish_reason: str | None, gold: str) -> Grade:
    """Right when the response names exactly the options of `gold`, in any order; a cut-off one never is.

    AISBench has no string rule for such sets: its columns hold the same comparison, made whether or not the
    response was finished.
    """
    if response is None:
        return Grade(None, "request_failed", None, False, False)
    answer = find_options(response)
    is_equal = answer == gold
    if finish_reason == "length":
        return Grade(answer, "truncated", answer, is_equal, False)
    return Grade(answer, "right" if is_equal else "wrong" if answer else "no_answer", answer, is_equal, False)


def find_options(response: str) -> str | None:
    """The options that a response answers with, sorted, such as "ACD"; None when there is no answer.

    Thought (before the last `</think>`) does not count. Within the last <answer>, if there is one, the answer is
    the last row of boxes, else the last line `Answer:` or `答案：` that names options, else all of it when it is
    one line.
    """
    text = unicodedata.normalize("NFKC", response.rpartition("</think>")[2]).partition("<think>")[0]
    _, tag, inside = text.rpartition("<answer>")
    if tag:
        text = inside.partition("</answer>")[0]
    boxes = last_row_of_boxes(text)
    if boxes:
        named = [option_letters(box) for box in boxes]
        return "".join(sorted(set("".join(named)))) if all(named) else None
    for line in reversed(_ANSWER_LINE.findall(text)):
        if letters := option_letters(line):
            return letters
    return option_letters(text) or None if "\n" not in text.strip() else None


def option_letters(text: str) -> str:
    """The options at the beginning of the text, sorted and each once: "CA, A" gives "AC".

    "" where the letters are part of something else, as in "Banana", "A bank" or "A股"; "B. Bonds" names B.
    """
    text = _MACRO.sub(r"\1", unicodedata.normalize("NFKC", text))
    opening = _OPENING.match(text)
    position = end = opening.end() if opening else 0
    found: set[str] = set()
    while match := _LETTERS.match(text, position):
        found.update(match.group(1))
        position, end = match.end(), match.end(1)
    is_labelled = text[end : end + 1] in (".", ":", ")")  # "B. Bonds": an option with its text
    return "" if not is_labelled and _GOES_ON.match(text, position) else "".join(sorted(found))


def last_row_of_boxes(text: str) -> list[str]:
    r"""Contents of the last \boxed{} and of those that stand before it with only commas and the like between."""
    row: list[str] = []
    start = len(text)
    for box in reversed(list(_BOX.finditer(text))):
        if row and not _BETWEEN_BOXES.fullmatch(text, box.end(), start):
            break
        row.append(box.group(1))
        start = box.start()
    return row[::-1]


def question_text(row: Mapping[str, Any]) -> str | None:
    """A CFLUE row (question, choices, task) as DianJin-R1 asks it; None when a part is missing."""
    choices = row["choices"]
    if isinstance(choices, str):
        try:
            choices = ast.literal_eval(choices)
        except (ValueError, SyntaxError):
            return None
    question, kind = str(row["question"] or "").strip(), _KINDS.get(str(row["task"]))
    if not question or kind is None or not isinstance(choices, dict) or not choices:
        return None
    options = "\n".join(f"{letter}. {text}" for letter, text in choices.items())
    return (
        f"假设你是一位金融行业专家，请回答下列问题。\n注意：{kind}\n\n{question}\n{options}\n\n"
        "请一步步思考，并把答案选项放到\\boxed{}中，如\\boxed{A}。"
    )
