"""Evaluate bash arithmetic: integers, C operators, variables by name."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

TOKEN = re.compile(
    r"\s*(0[xX][0-9a-fA-F]+|\d+|[A-Za-z_]\w*|\*\*|\+\+|--|&&|\|\||<<|>>|[<>=!]=|[-+*/%]=|.)",
    re.DOTALL,
)
MAX_DEPTH = 20

# Operators by precedence, loosest first.
LEVELS: tuple[dict[str, Callable[[int, int], int]], ...] = (
    {"||": lambda a, b: bool(a or b)},
    {"&&": lambda a, b: bool(a and b)},
    {"|": operator.or_},
    {"^": operator.xor},
    {"&": operator.and_},
    {"==": operator.eq, "!=": operator.ne},
    {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge},
    {"<<": lambda a, b: a << (b & 63), ">>": lambda a, b: a >> (b & 63)},
    {"+": operator.add, "-": operator.sub},
    {"*": operator.mul, "/": lambda a, b: _divided(a, b)[0], "%": lambda a, b: _divided(a, b)[1]},
)
UNARY: dict[str, Callable[[int], int]] = {
    "-": operator.neg,
    "+": operator.pos,
    "~": operator.invert,
    "!": operator.not_,
}


class ArithmeticFailure(ValueError):
    """Bash would fail on this expression too."""


def evaluate(
    text: str, read: Callable[[str], str], write: Callable[[str, str], None], depth: int = 0
) -> int:
    """Return the value of an expression; `read` returns a variable's text, which may be an
    expression itself.

    Raises ArithmeticFailure where bash fails: fractions, division by 0, an incomplete expression.
    """
    if depth > MAX_DEPTH:
        raise ArithmeticFailure(f"{text!r} refers to itself")
    return _Reader(text, read, write, depth).whole()


class _Reader:
    """Evaluates from left to right; while `is_taken` is False, nothing is read or written."""

    def __init__(
        self, text: str, read: Callable[[str], str], write: Callable[[str, str], None], depth: int
    ) -> None:
        self.text, self.read, self.write, self.depth = text.strip(), read, write, depth
        self.tokens = TOKEN.findall(self.text)
        self.is_taken = True

    def peek(self) -> str:
        return self.tokens[0] if self.tokens else ""

    def take(self, *expected: str) -> str:
        if not self.tokens or (expected and self.tokens[0] not in expected):
            raise ArithmeticFailure(f"{self.text!r} is not an integer expression")
        token: str = self.tokens.pop(0)
        return token

    def whole(self) -> int:
        value = self.ternary() if self.tokens else 0
        while self.peek() == ",":
            self.take()
            value = self.ternary()
        if self.tokens:
            raise ArithmeticFailure(
                f"{self.text!r} is not an integer expression (at {self.peek()!r})"
            )
        return value

    def ternary(self) -> int:
        value = self.binary(0)
        if self.peek() != "?":
            return value
        self.take()
        first = self.only_if(bool(value), self.ternary)
        self.take(":")
        other = self.only_if(not value, self.ternary)
        return first if value else other

    def only_if(self, condition: bool, body: Callable[[], int]) -> int:
        before, self.is_taken = self.is_taken, self.is_taken and condition
        value = body()
        self.is_taken = before
        return value

    def binary(self, level: int) -> int:
        if level == len(LEVELS):
            return self.power()
        left = self.binary(level + 1)
        while (sign := self.peek()) in LEVELS[level]:
            self.take()
            is_decided = (sign == "||" and left) or (sign == "&&" and not left)
            right = self.only_if(not is_decided, lambda: self.binary(level + 1))
            left = _wrapped(LEVELS[level][sign](left, right)) if self.is_taken else 0
        return left

    def power(self) -> int:
        base = self.unary()
        if self.peek() != "**":
            return base
        self.take()
        exponent = self.power()
        if exponent < 0:
            raise ArithmeticFailure(f"{base} ** {exponent}: negative exponent")
        return _wrapped(pow(base, exponent, 1 << 64))

    def unary(self) -> int:
        token = self.take()
        if token in UNARY:
            return _wrapped(int(UNARY[token](self.unary())))
        if token in ("++", "--"):
            name = self.take()
            return self.set(name, self.value_of(name) + (1 if token == "++" else -1))
        if token == "(":
            value = self.ternary()
            self.take(")")
            return value
        if not re.fullmatch(r"[A-Za-z_]\w*", token):
            return self.number(token)
        sign = self.peek()
        if sign in ("++", "--"):
            self.take()
            value = self.value_of(token)
            self.set(token, value + (1 if sign == "++" else -1))
            return value
        if sign == "=" or re.fullmatch(r"[-+*/%]=", sign):
            self.take()
            right = self.ternary()
            change = next((level[sign[0]] for level in LEVELS if sign[0] in level), None)
            return self.set(token, change(self.value_of(token), right) if change else right)
        return self.value_of(token)

    def value_of(self, name: str) -> int:
        if not self.is_taken:
            return 0
        return evaluate(self.read(name) or "0", self.read, self.write, self.depth + 1)

    def set(self, name: str, value: int) -> int:
        if self.is_taken:
            self.write(name, str(_wrapped(value)))
        return value

    def number(self, token: str) -> int:
        try:
            is_octal = token.startswith("0") and token.isdigit() and len(token) > 1
            return int(token, 8 if is_octal else 0)
        except ValueError:
            message = f"{self.text!r} is not an integer expression (at {token!r})"
            raise ArithmeticFailure(message) from None


def _divided(a: int, b: int) -> tuple[int, int]:
    """Return quotient and remainder, rounded toward zero."""
    if b == 0:
        raise ArithmeticFailure(f"{a} / 0: division by zero")
    quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    return quotient, a - b * quotient


def _wrapped(value: int) -> int:
    """Wrap to 64 bits, as bash does."""
    return (int(value) + (1 << 63)) % (1 << 64) - (1 << 63)
