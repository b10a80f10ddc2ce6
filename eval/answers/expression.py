"""Parses plain notation (eval.answers.latex) into expression trees: nested tuples that begin with
their kind.

("num", Fraction)  ("var", name)  ("const", name)  ("neg", a)  ("add" | "sub" | "mul" | "div" |
"pow", a, b) ("pm", +1 | -1, a, b)  ("call", name, argument, ...)  ("deg", a)  ("inf",)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import lru_cache
from typing import Any

from eval.answers.latex import FUNCTIONS

Node = tuple[Any, ...]

MAX_TOKENS = 1500
MAX_DIGITS = 2000
MAX_DEPTH = 40
MAX_HEIGHT = 200

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
_CALLED = frozenset("fg")  # letters that are functions before a parenthesis; others are factors
_CONSTANTS = {"e": "e", "i": "i", "π": "pi"}
_INVERSE = {name: f"arc{name}" for name in ("sin", "cos", "tan", "cot", "sinh", "cosh")}
_BRACKETS = {"(": ")", "[": "]", "{": "}", "⌊": "⌋", "⌈": "⌉"}
_SIGNS = {"+": "add", "-": "sub"}
_NUM_ARGUMENTS = {"binom": 2, "dot": 1, "ddot": 1, "partial": 1, "nabla": 1}
_ROUNDING = {"⌊": "floor", "⌈": "ceil"}
_STARTS_FACTOR = frozenset("({[⌊⌈|∞")


class NotReadableError(ValueError):
    """The text is not an expression in this grammar, or is too long or too deep to be an answer."""


@lru_cache(maxsize=4096)
def parse_expression(text: str) -> Node | None:
    """Parse an expression into a tree; None if it cannot be parsed."""
    try:
        parser = _Parser(_tokens_of(text))
        node = parser.expression()
        if parser.position != len(parser.tokens) or is_too_high(node):
            return None
        return node
    except (NotReadableError, RecursionError):
        return None


def is_too_high(node: Node) -> bool:
    """True if a tree is too high for recursion, such as a sum or product of hundreds of terms."""
    level = [node]
    for _ in range(MAX_HEIGHT):
        level = [child for parent in level for child in parent[1:] if isinstance(child, tuple)]
        if not level:
            return False
    return True


class _Parser:
    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self.tokens = tokens
        self.position = 0
        self.depth = 0
        self.bars = 0

    def peek(self, offset: int = 0) -> tuple[str, str]:
        index = self.position + offset
        return self.tokens[index] if index < len(self.tokens) else ("end", "")

    def take(self) -> tuple[str, str]:
        token = self.peek()
        self.position += 1
        return token

    def accept(self, *values: str) -> str | None:
        kind, value = self.peek()
        if kind == "other" and value in values:
            self.position += 1
            return value
        return None

    def expect(self, value: str) -> None:
        if self.accept(value) is None:
            raise NotReadableError(f"no {value}")

    @contextmanager
    def deeper(self) -> Iterator[None]:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise NotReadableError("too deep")
        yield
        self.depth -= 1

    def expression(self) -> Node:
        with self.deeper():
            node = self.signed()
            while (sign := self.accept("+", "-", "±", "∓")) is not None:
                node = _signed(node, sign, self.term())
        return node

    def signed(self) -> Node:
        """A term with leading signs."""
        sign = self.accept("+", "-", "±", "∓")
        if sign is None:
            return self.term()
        if self.peek() in (("other", "+"), ("other", "-")):
            with self.deeper():
                inner = self.signed()
        else:
            inner = self.term()
        if sign in "+-":
            return inner if sign == "+" else ("neg", inner)
        return _signed(("num", Fraction(0)), sign, inner)

    def term(self) -> Node:
        node = self.factor()
        while True:
            operator = self.accept("*", "/")
            if operator is not None:
                right = self.signed_factor()
                node = ("mul" if operator == "*" else "div", node, right)
            elif self.starts_factor():
                node = self.juxtaposed(node)
            else:
                return node

    def signed_factor(self) -> Node:
        if self.accept("-"):
            return ("neg", self.factor())
        self.accept("+")
        return self.factor()

    def juxtaposed(self, node: Node) -> Node:
        """Adjacent factors: a product, or the mixed number 1\\frac34 or 1 3/4."""
        after_number = node[0] == "num" and self.peek(-1)[0] == "number"
        is_whole = after_number and node[1].denominator == 1
        kind, value = self.peek()
        right = self.factor()
        if is_whole and kind == "command" and value == "frac" and _is_proper(right):
            return ("num", node[1] + right[1][1] / right[2][1])
        if after_number and kind in ("number", "scientific", "repeating"):
            if not is_whole or not self.accept("/"):
                raise NotReadableError("adjacent numbers")
            below = self.factor()
            if not _is_proper(("div", right, below)):
                raise NotReadableError("not a mixed number")
            return ("num", node[1] + right[1] / below[1])
        return ("mul", node, right)

    def starts_factor(self) -> bool:
        kind, value = self.peek()
        if kind == "other":
            return value in _STARTS_FACTOR and not (value == "|" and self.bars)
        return kind in ("number", "scientific", "repeating", "letter") or (
            kind == "command" and value != "mod"
        )

    def factor(self) -> Node:
        """A primary with postfixes and powers; powers are right-associative."""
        node = self.primary()
        while True:
            if self.accept("^"):
                node = _power(node, self.exponent())
            elif self.accept("!"):
                node = ("call", "factorial", node)
            elif self.accept("°"):
                node = ("deg", self.with_minutes(node))
            elif self.accept("'"):
                node = ("call", "prime", node)
            elif self.accept("%"):
                node = ("div", node, ("num", Fraction(100)))
            else:
                return node

    def with_minutes(self, degrees: Node) -> Node:
        """45°30'15'': minutes have one mark, seconds two."""
        for num_marks, parts in ((1, 60), (2, 3600)):
            marks = [self.peek(offset) == ("other", "'") for offset in (1, 2)]
            if self.peek()[0] == "number" and marks == [True, num_marks == 2]:
                degrees = ("add", degrees, ("num", _number_of(self.take()[1]) / parts))
                self.position += num_marks
        return degrees

    def exponent(self) -> Node:
        with self.deeper():
            negative = self.accept("-") is not None
            node = self.primary()
            if self.accept("^"):
                node = ("pow", node, self.exponent())
        return ("neg", node) if negative else node

    def primary(self) -> Node:
        kind, value = self.take()
        if kind in ("number", "scientific", "repeating"):
            return ("num", _number_of(value))
        if kind == "letter":
            return self.letter(value)
        if kind == "command":
            return self.command(value)
        if kind == "other" and value in _BRACKETS:
            node = self.expression()
            self.expect(_BRACKETS[value])
            return ("call", _ROUNDING[value], node) if value in _ROUNDING else node
        if kind == "other" and value == "|":
            outer, self.bars = self.bars, 1
            node = self.expression()
            self.bars = outer
            self.expect("|")
            return ("call", "abs", node)
        if kind == "other" and value == "∞":
            return ("inf",)
        if kind == "other" and value in "_^":
            return self.combination()
        raise NotReadableError(f"unexpected {value!r}")

    def combination(self) -> Node:
        """_{10}C_3"""
        above = self.argument()
        if self.take() != ("letter", "C") or not self.accept("_"):
            raise NotReadableError("no combination")
        return ("call", "binom", above, self.argument())

    def letter(self, name: str) -> Node:
        name = self.subscripted(name)
        at_zero = [self.peek(offset)[1] for offset in range(3)] == ["(", "0", ")"]
        if (name in _CALLED and self.peek() == ("other", "(")) or at_zero:
            return ("call", f"_{name}", *self.listed())
        return ("const", _CONSTANTS[name]) if name in _CONSTANTS else ("var", name)

    def subscripted(self, name: str) -> str:
        while self.accept("_"):
            kind, value = self.take()
            if (kind, value) == ("other", "{"):
                value = ""
                while not self.accept("}"):
                    kind, part = self.take()
                    if kind == "end":
                        raise NotReadableError("open subscript")
                    value += part
            name += f"_{value}"
        return name

    def command(self, name: str) -> Node:
        if name == "frac":
            return ("div", self.argument(), self.argument())
        if name == "sqrt":
            return self.root()
        if name == "pi":
            return ("const", "pi")
        if name in ("overline", "bar", "overrightarrow"):
            return self.overlined(name)
        if name == "log" or name in FUNCTIONS:
            return self.function(name)
        if name in _NUM_ARGUMENTS:
            return ("call", name, *(self.argument() for _ in range(_NUM_ARGUMENTS[name])))
        if name == "angle" or name == "triangle":
            node = self.term()
            if name == "angle" and node[0] == "mul" and node[1][0] == "mul":  # the vertex counts
                return ("call", name, ("mul", node[1][1], node[2]), node[1][2])
            return ("call", name, node)
        if name in _UNREADABLE:
            raise NotReadableError(name)
        return ("var", self.subscripted(f"\\{name}"))

    def overlined(self, name: str) -> Node:
        inner = self.peek(1)
        node = self.argument()
        return node if inner[1].isupper() else ("call", name, node)

    def root(self) -> Node:
        index: Node = ("num", Fraction(2))
        if self.accept("["):
            index = self.expression()
            self.expect("]")
        return ("call", "root", self.argument(whole_number=True), index)

    def argument(self, whole_number: bool = False) -> Node:
        """A braced argument, else the next digit or primary, or the whole number under a root."""
        kind, value = self.peek()
        if kind != "number" or whole_number or len(value) == 1:
            return self.primary()
        if not value[0].isdigit():
            raise NotReadableError("not an argument")
        self.tokens[self.position] = ("number", value[1:])
        return ("num", Fraction(value[0]))

    def function(self, name: str) -> Node:
        """\\sin^2 x, \\log_2 8, \\sin(x) y; \\sin 2x: a bare argument is the product."""
        base: Node | None = None
        power: Node | None = None
        while True:
            if self.accept("_"):
                base = self.argument()
            elif self.accept("^"):
                power = self.exponent()
            else:
                break
        if power == ("neg", ("num", Fraction(1))) and name in _INVERSE:
            name, power = _INVERSE[name], None
        if self.peek() in (("other", "("), ("other", "["), ("other", "{")):
            arguments = self.listed()
            if self.accept("^"):
                arguments[-1] = ("pow", arguments[-1], self.exponent())  # \sin (x)^2 is \sin(x^2)
        else:
            arguments = [self.bare_argument()]
        node: Node = (
            ("call", name, *arguments) if base is None else ("call", f"{name}_", *arguments, base)
        )
        return node if power is None else ("pow", node, power)

    def listed(self) -> list[Node]:
        """Arguments in brackets, separated by commas."""
        bracket = self.take()[1]
        arguments = [self.expression()]
        while self.accept(","):
            arguments.append(self.expression())
        self.expect(_BRACKETS[bracket])
        return arguments

    def bare_argument(self) -> Node:
        sign = self.accept("-")
        node = self.factor()
        while self.starts_factor() and not self.at_function() and self.peek()[1] not in "([":
            node = self.juxtaposed(node)
        while self.accept("/"):
            node = ("div", node, self.factor())
        return ("neg", node) if sign else node

    def at_function(self) -> bool:
        kind, value = self.peek()
        return kind == "command" and value in FUNCTIONS


_UNREADABLE = frozenset(
    """sum prod int lim iint oint begin end forall exists sup inf limsup liminf operatorname because
    therefore""".split()
)


def _power(base: Node, exponent: Node) -> Node:
    """C_{10}^3 and C_n^k are binomial coefficients; C_1^2 is the square of a constant."""
    above = parse_expression(base[1][2:]) if base[0] == "var" and base[1][:2] == "C_" else None
    is_number = above is not None and above[0] == exponent[0] == "num" and above[1] >= exponent[1]
    if above is not None and (is_number or "n" in base[1]):
        return ("call", "binom", above, exponent)
    return ("pow", base, exponent)


def _signed(left: Node, sign: str, right: Node) -> Node:
    return (
        (_SIGNS[sign], left, right)
        if sign in _SIGNS
        else ("pm", 1 if sign == "±" else -1, left, right)
    )


def _is_proper(node: Node) -> bool:
    """True for a fraction of whole numbers below one, the second part of a mixed number."""
    match node:
        case "div", ("num", above), ("num", below):
            return bool(above.denominator == below.denominator == 1 and 0 < above < below)
    return False


def _tokens_of(text: str) -> list[tuple[str, str]]:
    """Tokenize into (kind, text)."""
    tokens: list[tuple[str, str]] = []
    text = re.sub(r"\^\s*\{?\s*('[\s']*)\}?", r"\1", text.replace("{}", ""))
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
    """Split a run of letters into function names and single-letter factors."""
    if word in FUNCTIONS:
        return [("command", word)]
    for name in ("arcsin", "arccos", "arctan", "sin", "cos", "tan", "log", "ln"):
        before, found, after = word.partition(name)
        if found and len(before) <= 2 and len(after) <= 2:
            return (
                [("letter", c) for c in before]
                + [("command", name)]
                + [("letter", c) for c in after]
            )
    return [("letter", character) for character in word]


def _number_of(text: str) -> Fraction:
    """Return the exact value of a decimal, scientific or repeating number."""
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
