"""Evaluate bash tests, `[ ... ]` and `[[ ... ]]`.

A verdict is True, False, or the marks of the unknown values that it depends on.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from operator import eq, ge, gt, le, lt, ne
from typing import Any

from interop.shell.scope import Scope, marks_of
from interop.shell.words import EXTENDED, number, pieces, regex_of, scalar

NESTED = ("unary_expression", "binary_expression", "parenthesized_expression")
Verdict = bool | str
NUMERIC = {"-eq": eq, "-ne": ne, "-lt": lt, "-le": le, "-gt": gt, "-ge": ge}


def leaves(node: Any, source: bytes) -> Iterator[str]:
    """Yield the source of the brackets, operands and operators of a test."""
    for child in node.children:
        if child.type in NESTED:
            yield from leaves(child, source)
        else:
            yield source[child.start_byte : child.end_byte].decode()


def judge(tokens: list[str], scope: Scope, is_double: bool) -> Verdict:
    """Evaluate the tokens between `[` and `]`, or between `[[` and `]]`."""
    if "(" in tokens:
        return _asked(" ".join(tokens), scope)
    verdict: Verdict = False
    for alternative in _split(tokens, ("||", "-o")):
        every: Verdict = True
        for test in _split(alternative, ("&&", "-a")):
            every = combined(every, _judge_one(test, scope, is_double), deciding=False)
        verdict = combined(verdict, every, deciding=True)
    return verdict


def _split(tokens: list[str], separators: tuple[str, ...]) -> list[list[str]]:
    groups = itertools.groupby(tokens, lambda token: token in separators)
    return [list(group) for is_separator, group in groups if not is_separator]


def _judge_one(test: list[str], scope: Scope, is_double: bool) -> Verdict:
    match test:
        case ["!", *rest] if rest:
            return negated(_judge_one(rest, scope, is_double))
        case [source] | ["-n", source]:
            return _filled(source, scope)
        case ["-z", source]:
            return negated(_filled(source, scope))
        case [left, sign, right] if sign in NUMERIC:
            a, b = (number(scope, scalar(source, scope)) for source in (left, right))
            return marks_of(a + b) or NUMERIC[sign](int(a), int(b))
        case [left, "!=", right]:
            return negated(_equal(left, right, scope, is_double))
        case [left, "=" | "==", right]:
            return _equal(left, right, scope, is_double)
        case _:  # a file's state, a regular expression
            return _asked(" ".join(test), scope)


def _asked(test: str, scope: Scope) -> Verdict:
    """Return the verdict on something only the script's machine knows."""
    return verdict_of(scope.mark(f"[ {test} ]", "a test on the machine, true or false"))


def _filled(source: str, scope: Scope) -> Verdict:
    text = scalar(source, scope)
    marks = marks_of(text)
    return marks if marks == text != "" else bool(text)


def _equal(left: str, right: str, scope: Scope, is_double: bool) -> Verdict:
    """Compare two texts; between `[[` and `]]`, the right one is a pattern."""
    pattern = [piece for piece in pieces(right, scope) if piece.kind != "break"]
    if is_double and any(EXTENDED.search(each.text) for each in pattern if each.kind != "quoted"):
        return _asked(f"{left} == {right}", scope)
    a, b = scalar(left, scope), "".join(piece.text for piece in pattern)
    return marks_of(a + b) or (bool(re.fullmatch(regex_of(pattern), a)) if is_double else a == b)


def negated(verdict: Verdict) -> Verdict:
    return verdict if isinstance(verdict, str) else not verdict


def combined(a: Verdict, b: Verdict, deciding: bool) -> Verdict:
    """Combine verdicts: `a || b` (deciding=True) or `a && b` (deciding=False)."""
    if deciding in (a, b):
        return deciding
    return "".join(each for each in (a, b) if isinstance(each, str)) or not deciding


def verdict_of(text: str) -> Verdict:
    """Return the verdict for a mark, or for the answer that --set-env gave instead."""
    return marks_of(text) or text.lower() in ("1", "true", "yes")
