"""Answers in plain notation (eval.answers.latex) to expression trees: nested tuples with the kind in front.

("num", Fraction)  ("var", name)  ("const", name)  ("neg", a)  ("add" | "sub" | "mul" | "div" | "pow", a, b)
("pm", +1 | -1, a, b)  ("call", name, argument, ...)  ("deg", a)  ("inf",)
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from typing import Any

from eval.answers.latex import FUNCTIONS
from eval.answers.tokens import NotReadableError, number_of, tokens_of

Node = tuple[Any, ...]

MAX_DEPTH = 40
MAX_HEIGHT = 200

_CALLED = frozenset("fg")  # letters that are functions before a parenthesis; others are factors
_CONSTANTS = {"e": "e", "i": "i", "π": "pi"}
_INVERSE = {name: f"arc{name}" for name in ("sin", "cos", "tan", "cot", "sinh", "cosh")}
_BRACKETS = {"(": ")", "[": "]", "{": "}", "⌊": "⌋", "⌈": "⌉"}
_ROUNDING = {"⌊": "floor", "⌈": "ceil"}
_STARTS_FACTOR = frozenset("({[⌊⌈|∞")


@lru_cache(maxsize=4096)
def parse_expression(text: str) -> Node | None:
    """The tree of an expression, or None when it cannot be read."""
    try:
        parser = _Parser(tokens_of(text))
        node = parser.expression()
        if parser.position != len(parser.tokens) or is_too_high(node):
            return None
        return node
    except NotReadableError:
        return None


def is_too_high(node: Node) -> bool:
    """True for a tree too high to be walked recursively: a sum or product of hundreds of terms."""
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

    def expression(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise NotReadableError("too deep")
        node = self.signed()
        while (sign := self.accept("+", "-", "±", "∓")) is not None:
            right = self.term()
            if sign in "±∓":
                node = ("pm", 1 if sign == "±" else -1, node, right)
            else:
                node = ("add" if sign == "+" else "sub", node, right)
        self.depth -= 1
        return node

    def signed(self) -> Node:
        """A term with the signs in front of it."""
        sign = self.accept("+", "-", "±", "∓")
        if sign is None:
            return self.term()
        if self.peek() in (("other", "+"), ("other", "-")):
            self.depth += 1
            if self.depth > MAX_DEPTH:
                raise NotReadableError("too deep")
            inner = self.signed()
            self.depth -= 1
        else:
            inner = self.term()
        if sign == "+":
            return inner
        return ("neg", inner) if sign == "-" else ("pm", 1 if sign == "±" else -1, ("num", Fraction(0)), inner)

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
        """Two things beside each other: a product, or the mixed number 1\\frac34 or 1 3/4."""
        after_number = node[0] == "num" and self.peek(-1)[0] == "number"
        is_whole = after_number and node[1].denominator == 1
        kind, value = self.peek()
        right = self.factor()
        if is_whole and kind == "command" and value == "frac" and _is_proper(right):
            return ("num", node[1] + right[1][1] / right[2][1])
        if after_number and kind in ("number", "scientific", "repeating"):
            if not is_whole or not self.accept("/"):
                raise NotReadableError("two numbers beside each other")
            below = self.factor()
            if not _is_proper(("div", right, below)):
                raise NotReadableError("no mixed number")
            return ("num", node[1] + right[1] / below[1])
        return ("mul", node, right)

    def starts_factor(self) -> bool:
        kind, value = self.peek()
        if kind == "other":
            return value in _STARTS_FACTOR and not (value == "|" and self.bars)
        return kind in ("number", "scientific", "repeating", "letter") or (kind == "command" and value != "mod")

    def factor(self) -> Node:
        """A primary with its postfixes and powers; powers bind to the right."""
        node = self.primary()
        while True:
            if self.accept("^"):
                node = ("pow", node, self.exponent())
            elif self.accept("!"):
                node = ("call", "factorial", node)
            elif self.accept("°"):
                node = ("deg", node)
            elif self.accept("'"):
                node = ("call", "prime", node)
            elif self.accept("%"):
                node = ("div", node, ("num", Fraction(100)))
            else:
                return node

    def exponent(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise NotReadableError("too deep")
        negative = self.accept("-") is not None
        node = self.primary()
        if self.accept("^"):
            node = ("pow", node, self.exponent())
        self.depth -= 1
        return ("neg", node) if negative else node

    def primary(self) -> Node:
        kind, value = self.take()
        if kind in ("number", "scientific", "repeating"):
            return ("num", number_of(value))
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
        raise NotReadableError(f"unexpected {value!r}")

    def letter(self, name: str) -> Node:
        name = self.subscripted(name)
        at_zero = [self.peek(offset)[1] for offset in range(3)] == ["(", "0", ")"]
        if (name in _CALLED and self.peek() == ("other", "(")) or at_zero:
            self.take()
            arguments = [self.expression()]
            while self.accept(","):
                arguments.append(self.expression())
            self.expect(")")
            return ("call", f"_{name}", *arguments)
        return ("const", _CONSTANTS[name]) if name in _CONSTANTS else ("var", name)

    def subscripted(self, name: str) -> str:
        while self.accept("_"):
            kind, value = self.take()
            if (kind, value) != ("other", "{"):
                name += f"_{value}"
                continue
            parts: list[str] = []
            while not self.accept("}"):
                kind, value = self.take()
                if kind == "end":
                    raise NotReadableError("open subscript")
                parts.append(value)
            name += f"_{''.join(parts)}"
        return name

    def command(self, name: str) -> Node:
        if name == "frac":
            return ("div", self.argument(), self.argument())
        if name == "sqrt":
            return self.root()
        if name == "binom":
            return ("call", "binom", self.argument(), self.argument())
        if name == "pi":
            return ("const", "pi")
        if name in ("overline", "bar", "overrightarrow"):
            return self.overlined(name)
        if name == "log" or name in FUNCTIONS:
            return self.function(name)
        if name in ("dot", "ddot", "partial", "nabla"):
            return ("call", name, self.argument())
        if name == "angle" or name == "triangle":
            return ("call", name, self.term())
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
        """A braced argument; without braces the next digit or primary, or under a root the whole number."""
        kind, value = self.peek()
        if kind == "number" and not whole_number and len(value) > 1:
            self.tokens[self.position] = ("number", value[1:])
            return ("num", Fraction(value[0])) if value[0].isdigit() else self.fail()
        return self.primary()

    def fail(self) -> Node:
        raise NotReadableError("not an argument")

    def function(self, name: str) -> Node:
        """\\sin^2 x, \\log_2 8, \\sin(x) y, \\sin 2x: without parentheses the product is the argument."""
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
        else:
            arguments = [self.bare_argument()]
        node: Node = ("call", name, *arguments) if base is None else ("call", f"{name}_", *arguments, base)
        return node if power is None else ("pow", node, power)

    def listed(self) -> list[Node]:
        bracket = self.take()[1]
        arguments = [self.expression()]
        while self.accept(","):
            arguments.append(self.expression())
        self.expect(_BRACKETS[bracket])
        if self.accept("^"):
            arguments[-1] = ("pow", arguments[-1], self.exponent())  # \sin (x)^2 is \sin(x^2)
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


_UNREADABLE = frozenset((
    "sum", "prod", "int", "lim", "iint", "oint", "begin", "end", "forall", "exists", "sup", "inf", "limsup",
    "liminf", "operatorname", "because", "therefore",
))  # fmt: skip


def _is_proper(node: Node) -> bool:
    """True for a division of two whole numbers below one: the fraction of a mixed number."""
    if node[0] != "div" or node[1][0] != "num" or node[2][0] != "num":
        return False
    above, below = node[1][1], node[2][1]
    return bool(above.denominator == below.denominator == 1 and 0 < above < below)
