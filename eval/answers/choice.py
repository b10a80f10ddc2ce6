r"""Finds the options A to G that a response names.

Prompts such as CFLUE's ask for \boxed{A}; models write \boxed{A}\boxed{C}, \boxed{AC}, `Answer: A,
C`, `答案：AC`.
"""

from __future__ import annotations

import re
import unicodedata

from eval.answers.extraction import MAX_CHARS, after_thinking, boxes_side_by_side, find_boxes
from eval.answers.math_dapo import unwrap

_JOINED = r"(?:[\s,;/&+、()\[\]$*\"'“”.]|and|or|和|与|及|或)*"
_BETWEEN_BOXES = re.compile(_JOINED)
_ANSWER_LINE = re.compile(
    r"(?:answer|答案)[*\s]*(?:is|:|应?为|应?是|选项为|选项是|应?选)[*\s:]*([^\n]*)", re.IGNORECASE
)
_OPENING = re.compile(r"[\s$*(\[\"'“【]*(?:options?|choices?|选项?)?[\s:(\[]*", re.IGNORECASE)
_LETTERS = re.compile(r"([A-G]+)(?![A-Za-z0-9])" + _JOINED)
# The letter belongs to an English word or sentence (`A bank`, `A-level`), or to a Chinese word
# (`A股`).
_IN_A_WORD = re.compile(r"[-’]?[A-Za-z0-9]|(?!选项|[两三四五]?项|正确|对)[^\W_]")


def find_options(response: str) -> str:
    """Return the options that a response answers with, sorted, such as "ACD"; "" without an answer.

    Thinking (before the last `</think>`) is ignored. Within the last <answer>, if any, the answer
    is the last row of boxes, else the last line `Answer:` or `答案：` that names options, else the
    whole text if it is one line. Takes linear time.
    """
    text, is_thinking = after_thinking(response)
    if is_thinking:
        return ""
    text = unicodedata.normalize("NFKC", text[-MAX_CHARS:])
    _, tag, inside = text.rpartition("<answer>")
    if tag:
        text = inside.partition("</answer>")[0]
    boxes, is_open = find_boxes(text)
    if is_open:
        return ""
    if boxes:
        named = [
            option_letters(box.content) for box in boxes_side_by_side(boxes, text, _BETWEEN_BOXES)
        ]
        return "".join(sorted(set("".join(named)))) if all(named) else ""
    for line in reversed(_ANSWER_LINE.findall(text)):
        if letters := option_letters(line):
            return letters
    return option_letters(text) if "\n" not in text.strip() else ""


def option_letters(text: str) -> str:
    """Return the distinct options at the beginning of the text, sorted: "CA, A" gives "AC".

    "" if the letters belong to a word, as in "Banana", "A bank" or "A股"; "B. Bonds" names B.
    """
    text = unwrap(unicodedata.normalize("NFKC", text))
    opening = _OPENING.match(text)
    position = end = opening.end() if opening else 0
    found: set[str] = set()
    while match := _LETTERS.match(text, position):
        found.update(match.group(1))
        position, end = match.end(), match.end(1)
    is_label = text[end : end + 1] in (".", ":", ")")  # "B. Bonds": an option with its text
    return "" if not is_label and _IN_A_WORD.match(text, position) else "".join(sorted(found))
