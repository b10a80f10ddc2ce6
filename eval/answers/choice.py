r"""Finds the options A to J that a response names.

Prompts such as CFLUE's ask for \boxed{A}; models write \boxed{A}\boxed{C}, \boxed{AC}, `Answer: A,
C`, `答案：AC`, `Answer: C. Bonds`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from itertools import pairwise

from eval.answers.extraction import MAX_CHARS, after_thinking, boxes_side_by_side, find_boxes

_AND = r"(?:and|or|和|与|及|或)"
_BETWEEN_BOXES = re.compile(rf"(?:[\s,;/&+、()\[\]$*\"'“”.]|{_AND})*")
_ANSWER_LINE = re.compile(
    r"""(?ix)(?: (?:answers?|(?:correct|right)\s(?:option|choice)s?|答案|正确选项)[*\s]*
        (?:is|are|:|应?为|应?是|选项为|选项是|应?选)
    | (?:故|因此|所以)(?:本题)?应?选 )[*\s:]*([^\n]*)"""
)
_LINE_BREAK = re.compile(r"\\\\(?![a-z])")
_SPACE = re.compile(r"\\[,;:!> &]|\\q?quad|~")
_MARKUP = re.compile(
    r"""\\+(?:text|math|boxed|fbox|mbox|emph|underline|overline)[a-z]*|\\?[{}]|[$*`"“”]"""
)
_ROMAN = re.compile(
    r"(?:(?<![A-Za-z])I[、，,和与\s]*)?(?:[\u2160-\u217f]|(?<![A-Za-z])I(?:I+|V)(?![A-Za-z]))"
)
_SMALL = re.compile(rf"[\s(\[]*[a-j](?:(?:[\s,;/&+、()\[\]]|{_AND}\b)+[a-j]\b)*[\s)\].]*")
_SMALL_LABEL = re.compile(r"\s*(?:\(?[a-j]\)|[a-j][.:]\s)")
_BEFORE = r"(?:[\s:]|[(\[【](?![A-J][)\]】]))*"
_OPENING = re.compile(rf"{_BEFORE}(?:both\s+)?(?:options?|choices?|选项?)?{_BEFORE}", re.IGNORECASE)
# `C.`, `C:`, `C)`, `(C)`
_LABEL = re.compile(r"([(\[【]?)(?<![A-Za-z0-9])([A-J])([)\]】]|[.:](?![\d.]))")
# A letter and its text without a mark between: `C \text{ triangle}`, `C\ A\ triangle`.
_BLANK = r"\}?(?:\s|~|\\[ ,;:!])"
_BEFORE_TEXT = re.compile(
    rf"""(?x)[\s{{]*(?:\\(?:text|math)[a-z]*\{{)? (?:
    ([A-J]){_BLANK}*\}}?\\(?:q?quad\b|(?:text|mbox)[a-z]*\s*\{{)
    | ([B-HJ]){_BLANK}+(?=[A-Z]) | ([AI]){_BLANK}+(?=(?:An?|The)\b) )"""
)
_SEPARATOR = re.compile(rf"(?:[,;、/&+\n]|(?<![A-Za-z]){_AND})$")
_DOTTED = re.compile(r"[A-J](?:\.[A-J])+(?![A-Za-z0-9+,、和与及或])")  # `A.C`
_LETTERS = re.compile(r"(?:[(\[【](?=[A-J][)\]】]))?([A-J]+)(?![A-Za-z0-9])[)\]】]?")
_JOINED = re.compile(rf"\s*(\.(?=[A-J])|[,;/&+、]*)\s*{_AND}?\s*")
# The letter belongs to an English word or sentence (`A bank`, `A-level`), or to a Chinese word
# (`A股`).
_IN_A_WORD = re.compile(
    r"""(?x)[-’][A-Za-z0-9] | \+\+ | \# | \s*(?! (?:because|since|as|only)\b
    | (?:is|are)\s(?:both\s|the\s)?(?:correct|right|true|best)\b
    | 选项|[两三四五]?项|[都均是]*(?:正确|对)|因为|由于 )[^\W_]"""
)

_GOLD = re.compile(
    r"""(?x)\s*(?:(?i:options?|choices?|选项)\s*)?
    (?: [(\[]?[A-J][)\]]?(?:(?:[\s,;、/&]|and)*[(\[]?[A-J][)\]]?)*\.?\s* | [A-J][.):]\s.* )"""
)


def find_options(response: str) -> str:
    """Return the options that a response answers with, sorted, such as "ACD"; "" without an answer.

    Thinking (before the last `</think>`) is ignored. Within the last <answer>, if any, the answer
    is the last row of boxes, else the last line `Answer:` or `答案：` that names options, else the
    whole text if it is one line. Takes linear time.
    """
    text, is_thinking = after_thinking(response)
    if is_thinking:
        return ""
    text = _normalized(text[-MAX_CHARS:])
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
    r"""Return the distinct options at the beginning of the text, sorted: "CA, A" gives "AC".

    After a label (`C.`, `C)`, `C:`, `(C)`) comes the option's text, in which only further labels
    of the same form name options: "C. A triangle" gives "C", "(A), (C)" gives "AC". So it does
    after a letter outside \text, or before a capital: "C A triangle". "" if the letters belong to
    a word, as in "Banana", "A bank" or "A股".
    """
    plain = _plain(text)
    opening = _OPENING.match(plain)
    start = opening.end() if opening else 0
    label = _LABEL.match(plain, start)
    if label and not _DOTTED.match(plain, start):
        return "".join(sorted({label.group(2), *_labelled_after(label)}))
    if letters := _listed(plain, start):
        return "".join(sorted(letters))
    before_text = _BEFORE_TEXT.match(text)
    return str(before_text[before_text.lastindex or 0]) if before_text else ""


def _normalized(text: str) -> str:
    """Replace full-width characters. Roman numerals are no letters."""
    return unicodedata.normalize("NFKC", _ROMAN.sub("1", text))


def _plain(text: str) -> str:
    """Remove markup; write small letters that are the whole text or label it as capitals."""
    text = _LINE_BREAK.sub("\n", _normalized(text))
    text = _MARKUP.sub("", _SPACE.sub(" ", text))
    if _SMALL.fullmatch(text):
        return re.sub(r"\b[a-j]\b", lambda letter: letter.group().upper(), text)
    small = _SMALL_LABEL.match(text)
    return small.group().upper() + text[small.end() :] if small else text


def _labelled_after(first: re.Match[str]) -> list[str]:
    """Return the letters after the first label if each has its label and follows a separator."""
    text, form = first.string, first.group(1, 3)
    labels = [m for m in _LABEL.finditer(text, first.end()) if m.group(1, 3) == form]
    gaps = [text[a.end() : b.start()] for a, b in pairwise([first, *labels])]
    are_adjacent = form[1] in ")]】" and not any(gap.strip() for gap in gaps)
    if are_adjacent or all(_SEPARATOR.search(gap.rstrip(" ")[-4:]) for gap in gaps):
        return [label.group(2) for label in labels]
    return []


def _listed(text: str, position: int) -> set[str]:
    """Return the letters of a list such as `A, C`; of `A、B股`, whose last is a word, only A."""
    found: list[str] = []
    separator = ""
    while match := _LETTERS.match(text, position):
        joined = _JOINED.match(text, match.end())
        position = joined.end() if joined else match.end()
        is_word = not _LETTERS.match(text, position) and _IN_A_WORD.match(text, match.end(1))
        if is_word or (found and len(match.group(1)) > 1):
            return set(found[0]) if separator and len(found) == 1 else set()
        found.append(match.group(1))
        separator = joined.group(1) if joined else ""
    return set("".join(found))


def are_options(golds: Iterable[str]) -> bool:
    """True if all gold answers are letters of options, as in "B", "BD", "A, C" or "B. Bonds"."""
    return all(map(_GOLD.fullmatch, golds))
