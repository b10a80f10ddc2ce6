r"""Multiple-choice questions with options A to G, one or several of them right.

Prompts such as CFLUE's ask for \boxed{A}; models write \boxed{A}\boxed{C}, \boxed{AC}, `Answer: A, C`, `答案：AC`.
"""

from __future__ import annotations

import re
import unicodedata

from dapo_core.errors import DataError
from dapo_core.reward.math_dapo import unwrap
from dapo_core.reward.score import Score

_BRACES = re.compile(r"\\boxed\{|\\[{}]|[{}]")
_JOINED = r"(?:[\s,;/&+、()\[\]$*\"'“”]|and|or|和|与|及|或)*"
_BETWEEN_BOXES = re.compile(_JOINED)
_MAX_BETWEEN_CHARACTERS = 20
_ANSWER_LINE = re.compile(
    r"(?:answer|答案)[*\s]*(?:is|:|应?为|应?是|选项为|选项是|应?选)[*\s:]*([^\n]*)", re.IGNORECASE
)
_OPENING = re.compile(r"[\s$*(\[\"'“【]*(?:options?|choices?|选项?)?[\s:(\[]*", re.IGNORECASE)
_LETTERS = re.compile(rf"{_JOINED}([A-G]+)(?![A-Za-z0-9])")
# What makes a letter part of an English word or sentence (`A bank`, `A-level`), or of a Chinese word (`A股`).
_GOES_ON = re.compile(r"(?:\s+|[-'’])[A-Za-z0-9]|(?!选项|[两三四五]?项|正确|对)[^\W_]")


def score_choice(response: str, ground_truth: str) -> Score:
    r"""+1 when the response names exactly the options of the ground truth, in any order, else -1.

    Thought (before the last `</think>`) does not count. Within the last <answer>, if there is one, the answer is
    the last row of \boxed{}, else the last `Answer:` or `答案：` that names options, else all of it when it is one
    line. Letters are capitals standing as whole words, see `option_letters`. Raises DataError for a ground truth
    that names no options.
    """
    truth = option_letters(ground_truth)
    if not truth:
        raise DataError(f"ground_truth {ground_truth!r} names no options A to G; correct the training parquet")
    answer = find_options(response)
    if not answer:
        return Score(-1.0, "no_answer")
    is_right = answer == truth
    return Score(1.0 if is_right else -1.0, "right" if is_right else "wrong", answer, float(is_right))


def find_options(response: str) -> str:
    """The options that a response answers with, sorted, such as "ACD"; "" when there is no answer."""
    text = unicodedata.normalize("NFKC", response.rpartition("</think>")[2]).partition("<think>")[0]
    _, tag, inside = text.rpartition("<answer>")
    if tag:
        text = inside.partition("</answer>")[0]
    row = last_row_of_boxes(text)
    if row:
        named = [option_letters(content) for content in row]
        return "".join(sorted(set("".join(named)))) if all(named) else ""
    for line in reversed(_ANSWER_LINE.findall(text)):
        if letters := option_letters(line):
            return letters
    return option_letters(text) if "\n" not in text.strip() else ""


def option_letters(text: str) -> str:
    """The options at the beginning of the text, sorted and each once: "CA, A" gives "AC".

    "" where the letters are part of something else, as in "Banana", "A bank" or "A股"; "B. Bonds" names B.
    """
    text = unwrap(unicodedata.normalize("NFKC", text))
    opening = _OPENING.match(text)
    position = opening.end() if opening else 0
    found: set[str] = set()
    while letters := _LETTERS.match(text, position):
        found.update(letters.group(1))
        position = letters.end()
    return "" if _GOES_ON.match(text, position) else "".join(sorted(found))


def last_row_of_boxes(text: str) -> list[str]:
    r"""Contents of the last \boxed{} and of those that stand before it with only commas and the like between."""
    boxes: list[tuple[int, int]] = []  # where the contents begin and end
    open_braces: list[int | None] = []
    for match in _BRACES.finditer(text):
        token = match.group()
        if token in ("{", "\\boxed{"):
            open_braces.append(None if token == "{" else match.end())
        elif token == "}" and open_braces:
            start = open_braces.pop()
            if start is not None:
                boxes.append((start, match.start()))
    row: list[str] = []
    row_start = len(text)
    for start, end in reversed(boxes):
        between = text[end + 1 : row_start]
        if row and (len(between) > _MAX_BETWEEN_CHARACTERS or not _BETWEEN_BOXES.fullmatch(between)):
            break
        row.append(text[start:end])
        row_start = start - len("\\boxed{")
    return row[::-1]
