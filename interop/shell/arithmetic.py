"""Evaluate bash arithmetic expressions: integers, C operators, variables by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

TOKEN = re.compile(
    r"\s*(\d+#\w+|0[xX][0-9a-fA-F]+|\d+|[A-Za-z_]\w*|<<=|>>=|\*\*|\+\+|--|&&|\|\||<<|>>|[<>=!]=|[-+*/%&|^]=|.)",
    re.DOTALL,
)
LEVELS = (
    ("||",),
    ("&&",),
    ("|",),
    ("^",),
    ("&",),
    ("==", "!="),
    ("<", "<=", ">", ">="),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "%"),
)
ASSIGNING = ("=", "+=", "-=", "*=", "/=", "%=", "<<=", ">>=", "&=", "^=", "|=")
MAX_DEPTH = 20

Read = Callable[[str], str]
Write = Callable[[str, str], None]


class ArithmeticFailure(ValueError):
    """Bash would fail on this expression too."""


def evaluate(text: str, read: Read, write: Write, depth: int = 0) -> int:
    """Return the value of an expression; `read` returns a variable's text, which may be an
    expression itself.

    Raises ArithmeticFailure where bash fails: fractions, division by 0, an incomplete expression.
    """
    if depth > MAX_DEPTH:
        raise ArithmeticFailure(f"{text!r} refers to itself")
    tree = _Parser(text).whole()
    return _value(tree, read, write, depth)


class _Parser:
    """Parses the text into nested tuples, so that untaken sides of `?:`, `&&` and `||` are not
    evaluated.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = TOKEN.findall(text.strip())
        self.at = 0

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, *expected: str) -> str:
        token = self.peek()
        if expected and token not in expected:
            raise ArithmeticFailure(f"{self.text.strip()!r} is not an integer expression")
        self.at += 1
        return token

    def whole(self) -> Any:
        if not self.tokens:
            return 0
        tree = self.comma()
        if self.peek():
            raise ArithmeticFailure(
                f"{self.text.strip()!r} is not an integer expression (at {self.peek()!r})"
            )
        return tree

    def comma(self) -> Any:
        tree = self.assignment()
        while self.peek() == ",":
            self.take()
            tree = (",", tree, self.assignment())
        return tree

    def assignment(self) -> Any:
        tree = self.ternary()
        if self.peek() in ASSIGNING and isinstance(tree, str):
            operator = self.take()
            right = self.assignment()
            return ("=", tree, right if operator == "=" else (operator[:-1], tree, right))
        return tree

    def ternary(self) -> Any:
        tree = self.binary(0)
        if self.peek() == "?":
            self.take()
            first = self.comma()
            self.take(":")
            return ("?", tree, first, self.assignment())
        return tree

    def binary(self, level: int) -> Any:
        if level == len(LEVELS):
            return self.power()
        tree = self.binary(level + 1)
        while self.peek() in LEVELS[level]:
            operator = self.take()
            tree = (operator, tree, self.binary(level + 1))
        return tree

    def power(self) -> Any:
        tree = self.unary()
        if self.peek() == "**":
            self.take()
            return ("**", tree, self.power())
        return tree

    def unary(self) -> Any:
        token = self.peek()
        if token in ("+", "-", "!", "~"):
            self.take()
            return (f"unary{token}", self.unary())
        if token in ("++", "--"):
            self.take()
            name = self.primary()
            return ("=", name, (token[0], name, 1))
        tree = self.primary()
        if self.peek() in ("++", "--") and isinstance(tree, str):
            sign = self.take()[0]
            return ("after", tree, sign)
        return tree

    def primary(self) -> Any:
        token = self.take()
        if token == "(":
            tree = self.comma()
            self.take(")")
            return tree
        if re.fullmatch(r"[A-Za-z_]\w*", token):
            return token
        return _number(token, self.text)


def _number(token: str, text: str) -> int:
    try:
        if "#" in token:
            base, _, digits = token.partition("#")
            return int(digits, int(base))
        if token[:2] in ("0x", "0X"):
            return int(token, 16)
        return int(token, 8 if token.startswith("0") and len(token) > 1 else 10)
    except ValueError:
        raise ArithmeticFailure(
            f"{text.strip()!r} is not an integer expression (at {token!r})"
        ) from None


def _value(tree: Any, read: Read, write: Write, depth: int) -> int:
    if isinstance(tree, int):
        return tree
    if isinstance(tree, str):
        return evaluate(read(tree) or "0", read, write, depth + 1)
    operator, *parts = tree
    if operator == "=":
        value = _value(parts[1], read, write, depth)
        write(parts[0], str(value))
        return value
    if operator == "after":
        value = _value(parts[0], read, write, depth)
        write(parts[0], str(value + (1 if parts[1] == "+" else -1)))
        return value
    first = _value(parts[0], read, write, depth)
    if operator == "?":
        return _value(parts[1] if first else parts[2], read, write, depth)
    if operator in ("&&", "||"):
        taken = bool(first) == (operator == "&&")
        return int(bool(_value(parts[1], read, write, depth))) if taken else int(bool(first))
    if operator.startswith("unary"):
        return _wrapped({"+": first, "-": -first, "!": int(not first), "~": ~first}[operator[-1]])
    return _wrapped(_applied(operator, first, _value(parts[1], read, write, depth)))


def _applied(operator: str, a: int, b: int) -> int:
    if operator in ("/", "%"):
        if b == 0:
            raise ArithmeticFailure(f"{a} {operator} 0: division by zero")
        quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        return quotient if operator == "/" else a - b * quotient
    if operator == "**":
        if b < 0:
            raise ArithmeticFailure(f"{a} ** {b}: negative exponent")
        return pow(a, b, 1 << 64)
    if operator in ("<<", ">>"):
        return a << (b & 63) if operator == "<<" else a >> (b & 63)
    return int(
        {
            **{"+": a + b, "-": a - b, "*": a * b, "&": a & b, "|": a | b, "^": a ^ b, ",": b},
            **{"==": a == b, "!=": a != b, "<": a < b, "<=": a <= b, ">": a > b, ">=": a >= b},
        }[operator]
    )


def _wrapped(value: int) -> int:
    """Wrap to 64 bits, as bash does."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
