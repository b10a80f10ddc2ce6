"""Evaluate bash tests, `[ ... ]` and `[[ ... ]]`, to true, false, or unknown and why."""

from __future__ import annotations

import re
from operator import eq, ge, gt, le, lt, ne
from typing import Any, NamedTuple

from interop.shell.scope import Scope, ShellError, marks_of
from interop.shell.syntax import regex_of
from interop.shell.words import number, pieces, scalar

NESTED = ("unary_expression", "binary_expression", "parenthesized_expression")
NUMERIC = {"-eq": eq, "-ne": ne, "-lt": lt, "-le": le, "-gt": gt, "-ge": ge}
COMPARING = ("=", "==", "!=", "=~", "<", ">", *NUMERIC, "-ef", "-nt", "-ot")
UNARY = re.compile(r"-[a-zA-Z]")


class Verdict(NamedTuple):
    """True, False, or None with the marks of the unknown values it depends on."""

    value: bool | None
    marks: str = ""

    def negated(self) -> Verdict:
        return self if self.value is None else Verdict(not self.value)


def leaves(node: Any, source: bytes) -> list[str]:
    """Return the source of the operands and operators between the brackets."""
    found = []
    for child in node.children:
        if child.type in NESTED:
            found += leaves(child, source)
        else:
            found.append(source[child.start_byte : child.end_byte].decode())
    return found


def judge(tokens: list[str], scope: Scope, is_double: bool) -> Verdict:
    """Evaluate the tokens between `[` and `]`, or between `[[` and `]]`."""
    reader = _Tests(tokens, scope, is_double)
    verdict = reader.either()
    if reader.at < len(tokens):
        raise ShellError(f"{scope.origin}: cannot parse the test {' '.join(tokens)!r}")
    return verdict


class _Tests:
    """Parses the tokens of a test by precedence: or, and, not, comparison."""

    def __init__(self, tokens: list[str], scope: Scope, is_double: bool) -> None:
        self.tokens, self.scope, self.is_double = tokens, scope, is_double
        self.at = 0

    def peek(self, ahead: int = 0) -> str:
        return self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else ""

    def take(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1]

    def either(self) -> Verdict:
        verdict = self.both()
        while self.peek() in ("||", "-o"):
            self.take()
            verdict = combined(verdict, self.both(), deciding=True)
        return verdict

    def both(self) -> Verdict:
        verdict = self.one()
        while self.peek() in ("&&", "-a"):
            self.take()
            verdict = combined(verdict, self.one(), deciding=False)
        return verdict

    def one(self) -> Verdict:
        if self.peek() == "!" and len(self.tokens) > self.at + 1:
            self.take()
            return self.one().negated()
        if self.peek() == "(":
            self.take()
            verdict = self.either()
            self.take()
            return verdict
        if not self.peek():
            return Verdict(False)
        if self.peek(1) in COMPARING:
            return self.compared(self.take(), self.take(), self.take() if self.peek() else "''")
        if UNARY.fullmatch(self.peek()) and self.peek(1) not in ("", "&&", "||", "-a", "-o", ")"):
            return self.unary(self.take(), self.take())
        return self.filled(self.take())

    def filled(self, source: str, is_wanted: bool = True) -> Verdict:
        text = scalar(source, self.scope)
        marks = marks_of(text)
        return Verdict(None, marks) if marks == text != "" else Verdict(bool(text) == is_wanted)

    def unary(self, operator: str, source: str) -> Verdict:
        if operator in ("-n", "-z"):
            return self.filled(source, operator == "-n")
        if operator == "-v" and self.scope.look_up(source) is not None:
            return Verdict(True)
        return self.asked(f"{operator} {source}")

    def asked(self, test: str) -> Verdict:
        """Return the verdict on something only the script's machine knows, such as whether a file
        exists.
        """
        return verdict_of(self.scope.mark(f"[ {test} ]", "a test on the machine, true or false"))

    def compared(self, left: str, operator: str, right: str) -> Verdict:
        if operator in ("-ef", "-nt", "-ot"):
            return self.asked(f"{left} {operator} {right}")
        a = scalar(left, self.scope)
        glob = [piece for piece in pieces(right, self.scope) if piece.kind != "break"]
        b = "".join(piece.text for piece in glob)
        if operator in NUMERIC:
            a, b = (number(self.scope, text) for text in (a, b))
        if marks := marks_of(a + b):
            return Verdict(None, marks)
        if operator in NUMERIC:
            return Verdict(NUMERIC[operator](int(a), int(b)))
        if operator == "=~":
            return self.searched(b, a)
        if operator in "<>":
            return Verdict(a < b if operator == "<" else a > b)
        is_equal = bool(re.fullmatch(regex_of(glob), a, re.DOTALL)) if self.is_double else a == b
        return Verdict(is_equal == (operator != "!="))

    def searched(self, expression: str, text: str) -> Verdict:
        try:
            return Verdict(bool(re.search(expression, text)))
        except re.error:
            return self.asked(f"{text} =~ {expression}")


def combined(a: Verdict, b: Verdict, deciding: bool) -> Verdict:
    """Combine verdicts: `a || b` (deciding=True) or `a && b` (deciding=False)."""
    if deciding in (a.value, b.value):
        return Verdict(deciding)
    if None in (a.value, b.value):
        return Verdict(None, a.marks + b.marks)
    return Verdict(not deciding)


def verdict_of(text: str) -> Verdict:
    """Return the verdict for a mark, or for the answer that --set-env gave instead."""
    return (
        Verdict(None, text)
        if marks_of(text)
        else Verdict(text.lower() in ("1", "true", "yes", "0") and text != "0")
    )
