"""Evaluate bash tests, `[ ... ]` and `[[ ... ]]`, to true, false, or unknown and why."""

from __future__ import annotations

import re
from operator import eq, ge, gt, le, lt, ne
from typing import Any, NamedTuple

from interop.shell.scope import Scope, ShellError, marks_of
from interop.shell.words import number, pieces, regex_of, scalar

NESTED = ("unary_expression", "binary_expression", "parenthesized_expression")
NUMERIC = {"-eq": eq, "-ne": ne, "-lt": lt, "-le": le, "-gt": gt, "-ge": ge}
OF_MACHINE = ("=~", "-ef", "-nt", "-ot")  # depend on files, or are regular expressions
COMPARING = ("=", "==", "!=", "<", ">", *NUMERIC, *OF_MACHINE)
UNARY = re.compile(r"-[a-zA-Z]")


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
    reader = _Tests(list(tokens), scope, is_double)
    verdict = reader.any_of()
    if reader.tokens:
        raise ShellError(f"{scope.origin}: cannot parse the test {' '.join(tokens)!r}")
    return verdict


class _Tests:
    """Parses the tokens of a test by precedence: or, and, not, comparison."""

    def __init__(self, tokens: list[str], scope: Scope, is_double: bool) -> None:
        self.tokens, self.scope, self.is_double = tokens, scope, is_double

    def peek(self, ahead: int = 0) -> str:
        return self.tokens[ahead] if len(self.tokens) > ahead else ""

    def take(self) -> str:
        return self.tokens.pop(0)

    def any_of(self) -> Verdict:
        verdict = self.all_of()
        while self.peek() in ("||", "-o"):
            self.take()
            verdict = combined(verdict, self.all_of(), deciding=True)
        return verdict

    def all_of(self) -> Verdict:
        verdict = self.one()
        while self.peek() in ("&&", "-a"):
            self.take()
            verdict = combined(verdict, self.one(), deciding=False)
        return verdict

    def one(self) -> Verdict:
        if self.peek() == "!" and len(self.tokens) > 1:
            self.take()
            return self.one().negated()
        if self.peek() == "(":
            self.take()
            verdict = self.any_of()
            self.take()
            return verdict
        if not self.tokens:
            return Verdict(False)
        if self.peek(1) in COMPARING:
            return self.compared(self.take(), self.take(), self.take() if self.tokens else "''")
        if UNARY.fullmatch(self.peek()) and self.peek(1) not in ("", "&&", "||", "-a", "-o", ")"):
            return self.unary(self.take(), self.take())
        return self.filled(self.take(), True)

    def filled(self, source: str, is_wanted: bool) -> Verdict:
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
        if operator in OF_MACHINE:
            return self.asked(f"{left} {operator} {right}")
        pattern = [piece for piece in pieces(right, self.scope) if piece.kind != "break"]
        a, b = scalar(left, self.scope), "".join(piece.text for piece in pattern)
        if operator in NUMERIC:
            a, b = (number(self.scope, text) for text in (a, b))
        if marks := marks_of(a + b):
            return Verdict(None, marks)
        if operator in NUMERIC:
            return Verdict(NUMERIC[operator](int(a), int(b)))
        if operator in "<>":
            return Verdict(a < b if operator == "<" else a > b)
        is_equal = bool(re.fullmatch(regex_of(pattern), a)) if self.is_double else a == b
        return Verdict(is_equal == (operator != "!="))


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
