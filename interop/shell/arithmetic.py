"""Evaluate bash arithmetic on integers: `+ - * / %`, comparisons, `&&` and `||`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

OPERATORS: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    ast.Mod: lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def evaluate(text: str, read: Callable[[str], str]) -> int | None:
    """Return the value of an expression, None for what bash refuses or this module does not read.

    `read` returns a variable's text, which may be an expression itself. Python's grammar agrees
    with bash's on these operators; octal numbers and fractions are not read.
    """
    source = text.replace("&&", " and ").replace("||", " or ").strip() or "0"
    try:
        value = _value(ast.parse(f"({source})", mode="eval").body, read)
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError, RecursionError):
        return None
    return value if -(2**63) <= value < 2**63 else None  # bash wraps larger values


def _value(node: Any, read: Callable[[str], str]) -> int:
    match node:
        case ast.Constant() if type(node.value) is int:
            return node.value
        case ast.Name():
            value = evaluate(read(node.id), read)
            if value is not None:
                return value
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand, read)
        case ast.BinOp(left, sign, right) | ast.Compare(left, [sign], [right]):
            return int(OPERATORS[type(sign)](_value(left, read), _value(right, read)))
        case ast.BoolOp():
            values = [_value(each, read) for each in node.values]
            return int(all(values) if isinstance(node.op, ast.And) else any(values))
    raise ValueError(node)
