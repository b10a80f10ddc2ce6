"""Answers in plain notation to tokens, and numerals to their exact values."""

from __future__ import annotations

import re
from fractions import Fraction

from eval.answers.latex import FUNCTIONS

MAX_TOKENS = 1500
MAX_DIGITS = 2000

_TOKEN = re.compile(
    r"""\s*(?:
    (?P<repeating>\d*\.\d*\s*\\(?:overline|dot|bar)\s*\{\s*\d+\s*\})
  | (?P<scientific>\d+(?:\.\d*)?[eE][+-]?\d+(?![\d.]))
  | (?P<number>\d+(?:\.\d*)?|\.\d+)
  | \\(?P<command>[A-Za-z]+)
  | (?P<word>[A-Za-z]+)
  | "(?P<text>[^"]*)"
  | (?P<other>\S)
    )""",
    re.VERBOSE,
)


class NotReadableError(ValueError):
    """Text that is no expression of this grammar, or too long or too deep to be an answer."""


def tokens_of(text: str) -> list[tuple[str, str]]:
    """(kind, text) of every token."""
    tokens: list[tuple[str, str]] = []
    text = re.sub(r"\^\s*\{\s*('+)\s*\}", r"\1", text)
    for match in _TOKEN.finditer(text):
        kind = str(match.lastgroup)
        value = match.group(kind)
        if kind == "word":
            tokens += _split_word(value)
        else:
            tokens.append((kind, value))
        if len(tokens) > MAX_TOKENS:
            raise NotReadableError("too many tokens")
    return tokens


def _split_word(word: str) -> list[tuple[str, str]]:
    """A run of letters: a function's name, or letters that are factors."""
    if word in FUNCTIONS:
        return [("command", word)]
    for name in ("arcsin", "arccos", "arctan", "sin", "cos", "tan", "log", "ln"):
        before, found, after = word.partition(name)
        if found and len(before) <= 2 and len(after) <= 2:
            return [("letter", c) for c in before] + [("command", name)] + [("letter", c) for c in after]
    return [("letter", character) for character in word]


def number_of(text: str) -> Fraction:
    """Exact value of a decimal numeral, one in scientific notation, or a repeating decimal."""
    if len(text) > MAX_DIGITS:
        raise NotReadableError("too many digits")
    repeating = re.fullmatch(r"(\d*)\.(\d*)\s*\\\w+\s*\{\s*(\d+)\s*\}", text)
    if repeating:
        whole, fixed, cycle = repeating.groups()
        start = Fraction(int((whole + fixed) or "0"), 10 ** len(fixed))
        return start + Fraction(int(cycle), (10 ** len(cycle) - 1) * 10 ** len(fixed))
    mantissa, _, exponent = text.lower().partition("e")
    if len(exponent) > 4:
        raise NotReadableError("too large an exponent")
    if not mantissa.rstrip("."):
        raise NotReadableError("no digit")
    return Fraction(mantissa.rstrip(".")) * Fraction(10) ** int(exponent or "0")
