"""Evaluate bash tests, `[ ... ]` and `[[ ... ]]`, to true, false, or unknown and why."""

from __future__ import annotations

import itertools
import re
from operator import eq, ge, gt, le, lt, ne
from typing import Any, NamedTuple

from interop.shell.scope import Scope, marks_of
from interop.shell.words import number, pieces, regex_of, scalar

NESTED = ("unary_expression", "binary_expression", "parenthesized_expression")
NUMERIC = {"-eq": eq, "-ne": ne, "-lt": lt, "-le": le, "-gt": gt, "-ge": ge}


class Verdict(NamedTuple):
    """True, False, or None with the marks of the unknown values it depends on."""

    value: bool | None
    marks: str = ""

    def negated(self) -> Verdict:
        return self if self.value is None else Verdict(not self.value)


def leaves(node: Any, source: bytes) -> list[str]:
    """Return the source of the operands and operators between the brackets."""
    found: list[str] = []
    for child in node.children:
        if child.type in NESTED:
            found += leaves(child, source)
        else:
            found.append(source[child.start_byte : child.end_byte].decode())
    return found


def judge(tokens: list[str], scope: Scope, is_double: bool) -> Verdict:
    """Evaluate the tokens between `[` and `]`, or between `[[` and `]]`."""
    if "(" in tokens:
        return _asked(" ".join(tokens), scope)
    verdict = Verdict(False)
    for alternative in _split(tokens, ("||", "-o")):
        every = Verdict(True)
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
            return _judge_one(rest, scope, is_double).negated()
        case [source] | ["-n", source]:
            return _filled(source, scope)
        case ["-z", source]:
            return _filled(source, scope).negated()
        case [left, sign, right] if sign in NUMERIC:
            a, b = (number(scope, scalar(source, scope)) for source in (left, right))
            marks = marks_of(a + b)
            return Verdict(None, marks) if marks else Verdict(NUMERIC[sign](int(a), int(b)))
        case [left, "=" | "==" | "!=" as sign, right]:
            return _equal(left, right, scope, is_double, is_wanted=sign != "!=")
        case _:  # a file's state, a regular expression
            return _asked(" ".join(test), scope)


def _asked(test: str, scope: Scope) -> Verdict:
    """Return the verdict on something only the script's machine knows."""
    return verdict_of(scope.mark(f"[ {test} ]", "a test on the machine, true or false"))


def _filled(source: str, scope: Scope) -> Verdict:
    text = scalar(source, scope)
    marks = marks_of(text)
    return Verdict(None, marks) if marks == text != "" else Verdict(bool(text))


def _equal(left: str, right: str, scope: Scope, is_double: bool, is_wanted: bool) -> Verdict:
    """Compare two texts; between `[[` and `]]`, the right one is a pattern."""
    pattern = [piece for piece in pieces(right, scope) if piece.kind != "break"]
    a, b = scalar(left, scope), "".join(piece.text for piece in pattern)
    if marks := marks_of(a + b):
        return Verdict(None, marks)
    is_equal = bool(re.fullmatch(regex_of(pattern), a)) if is_double else a == b
    return Verdict(is_equal == is_wanted)


def combined(a: Verdict, b: Verdict, deciding: bool) -> Verdict:
    """Combine verdicts: `a || b` (deciding=True) or `a && b` (deciding=False)."""
    if deciding in (a.value, b.value):
        return Verdict(deciding)
    if None in (a.value, b.value):
        return Verdict(None, a.marks + b.marks)
    return Verdict(not deciding)


def verdict_of(text: str) -> Verdict:
    """Return the verdict for a mark, or for the answer that --set-env gave instead."""
    return Verdict(None, text) if marks_of(text) else Verdict(text.lower() in ("1", "true", "yes"))
