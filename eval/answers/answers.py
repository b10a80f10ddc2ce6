"""Parsed answers: a value, words, a list, a point or interval, a matrix, a region, a relation.

Regions are merged so that equal sets of real numbers have equal pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import NamedTuple

from eval.answers.expression import Node
from eval.answers.numeric import is_same_value, sign_of_difference, substituted, variables


class Interval(NamedTuple):
    """An interval of the real line; infinite ends are open."""

    low: Node
    low_closed: bool
    high: Node
    high_closed: bool


@dataclass(frozen=True)
class Value:
    """A number or expression."""

    node: Node
    unit: str = ""
    is_percent: bool = False


@dataclass(frozen=True)
class Words:
    """An answer in words, or an unparsable one; compared as text."""

    text: str


@dataclass(frozen=True)
class Listing:
    """Unordered answers: `1, 2`, `\\{1, 2\\}`, `1 \\pm 2`."""

    items: tuple[Answer, ...]
    is_set: bool = False


@dataclass(frozen=True)
class Point:
    """A point, vector or interval: items in brackets, or named values `x = 1, y = 2`."""

    opening: str
    closing: str
    items: tuple[Answer, ...]
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Matrix:
    """Rows of entries."""

    rows: tuple[tuple[Answer, ...], ...]


@dataclass(frozen=True)
class Region:
    """A union of intervals."""

    pieces: tuple[Interval, ...]
    variable: str | None = None


@dataclass(frozen=True)
class Relation:
    """An equation, an inequality, or a chain of them."""

    operators: tuple[str, ...]
    sides: tuple[Node, ...]


@dataclass(frozen=True)
class Named:
    """A named value: `x = 5`, `f(x) = 2x`, `\\text{Area} = 5`."""

    name: str
    value: Answer


@dataclass(frozen=True)
class Approximate:
    """A value and its approximations: `\\frac13 \\approx 0.33`."""

    values: tuple[Answer, ...]


Answer = Value | Words | Listing | Point | Matrix | Region | Relation | Named | Approximate

INFINITY: Node = ("inf",)
ZERO: Node = ("num", Fraction(0))
REALS = (Interval(("neg", INFINITY), False, INFINITY, False),)
_REVERSED = {"<": ">", ">": "<", "≤": "≥", "≥": "≤"}


def region_of_inequality(operators: tuple[str, ...], sides: tuple[Node, ...]) -> Region | None:
    """Return the solutions of an inequality in one variable: x > 3, 1 < x <= 5, x != 2."""
    if any(side[:2] == ("call", "abs") for side in sides):
        return _region_of_distance(operators, sides)
    if any(side[0] == "neg" and _is_unknown(side[1]) for side in sides):  # -x > -1
        operators = tuple(_REVERSED.get(operator, operator) for operator in operators)
        sides = tuple(side[1] if side[0] == "neg" else ("neg", side) for side in sides)
    where = [index for index, side in enumerate(sides) if _is_unknown(side)]
    if len(where) != 1 or any(
        variables(side) for index, side in enumerate(sides) if index != where[0]
    ):
        return None
    name = str(sides[where[0]][1])  # x, or _f for f(x)
    if len(sides) == 2:
        bound = sides[1 - where[0]]
        operator = operators[0] if where[0] == 0 else _REVERSED.get(operators[0], operators[0])
        below = Interval(("neg", INFINITY), False, bound, operator == "≤")
        above = Interval(bound, operator == "≥", INFINITY, False)
        pieces = {
            "<": (below,),
            "≤": (below,),
            ">": (above,),
            "≥": (above,),
            "≠": (below, above),
        }.get(operator)
        return Region(pieces, name) if pieces else None
    if len(sides) == 3 and where[0] == 1:
        if set(operators) <= set(">≥"):
            operators, sides = (
                tuple(_REVERSED[operator] for operator in reversed(operators)),
                sides[::-1],
            )
        if set(operators) <= set("<≤"):
            return Region(
                (Interval(sides[0], operators[0] == "≤", sides[2], operators[1] == "≤"),), name
            )
    return None


def _region_of_distance(operators: tuple[str, ...], sides: tuple[Node, ...]) -> Region | None:
    """Return the solutions of |ax + b| < c, or of another inequality of one distance."""
    where = [index for index, side in enumerate(sides) if side[:2] == ("call", "abs")]
    names = variables(sides[where[0]])
    if len(where) != 1 or len(names) != 1:
        return None
    inside, unknown = sides[where[0]][2], ("var", *names)
    offset = substituted(inside, unknown, ZERO)
    slope: Node = ("sub", substituted(inside, unknown, ("num", Fraction(1))), offset)
    sign = sign_of_difference(slope, ZERO)
    distances = region_of_inequality(
        operators, tuple(unknown if index in where else side for index, side in enumerate(sides))
    )
    line = ("add", ("mul", slope, unknown), offset)
    if not sign or distances is None or not is_same_value(inside, line):
        return None
    if any(sign_of_difference(piece.high, ZERO) == -1 for piece in distances.pieces):
        return None

    def solution(distance: Node) -> Node:
        if distance in (INFINITY, ("neg", INFINITY)):
            return distance
        return ("div", ("sub", ("mul", ("num", Fraction(sign)), distance), offset), slope)

    pieces: list[Interval] = []
    for low, low_closed, high, high_closed in distances.pieces:
        minus: Node = ("neg", high)
        if sign_of_difference(low, ZERO) == -1:
            low, low_closed = minus, high_closed
        else:
            ends = solution(minus), high_closed, solution(("neg", low)), low_closed
            pieces.append(Interval(*ends))
        pieces.append(Interval(solution(low), low_closed, solution(high), high_closed))
    return Region(tuple(pieces), distances.variable)


def _is_unknown(node: Node) -> bool:
    """True for a variable, and for a function of one: f(x)."""
    return node[0] == "var" or (
        node[0] == "call"
        and node[1].startswith("_")
        and [child[0] for child in node[2:]] == ["var"]
    )


def as_region(answer: Answer) -> Region | None:
    """Return an interval in brackets or a set of numbers as a set of real numbers, else None."""
    match answer:
        case Region():
            return answer
        case Named(_, value):
            return as_region(value)
        case Listing(items, True):
            nodes = [item.node for item in items if isinstance(item, Value)]
            pieces = tuple(Interval(node, True, node, True) for node in nodes)
            return Region(pieces) if len(nodes) == len(items) else None
        case Point("(" | "[" as opening, ")" | "]" as closing, (Value(low), Value(high))):
            if sign_of_difference(low, high) == 1:
                return None  # (11, 7) is a point
            return Region((Interval(low, opening == "[", high, closing == "]"),))
    return None


def combined(operator: str, regions: Sequence[Region]) -> Region | None:
    """Return the union, difference or intersection; None if their ends cannot be ordered."""
    pieces = regions[0].pieces
    for region in regions[1:]:
        found = _COMBINE[operator](pieces, region.pieces)
        if found is None:
            return None
        pieces = found
    return Region(pieces, regions[0].variable)


def _intersection(
    left: tuple[Interval, ...], right: tuple[Interval, ...]
) -> tuple[Interval, ...] | None:
    common: list[Interval] = []
    for one, other in product(left, right):
        lows = sign_of_difference(one.low, other.low)
        highs = sign_of_difference(one.high, other.high)
        if lows is None or highs is None:
            return None
        low, high = (one if lows == 1 else other), (one if highs == -1 else other)
        low_closed = low.low_closed and (lows != 0 or one.low_closed)
        high_closed = high.high_closed and (highs != 0 or one.high_closed)
        length = sign_of_difference(high.high, low.low)
        if length == 1 or (length == 0 and low_closed and high_closed):
            common.append(Interval(low.low, low_closed, high.high, high_closed))
    return tuple(common)


def _difference(
    pieces: tuple[Interval, ...], removed: tuple[Interval, ...]
) -> tuple[Interval, ...] | None:
    left: tuple[Interval, ...] | None = pieces
    for piece in removed:
        below = Interval(("neg", INFINITY), False, piece.low, not piece.low_closed)
        above = Interval(piece.high, not piece.high_closed, INFINITY, False)
        left = left and _intersection(left, (below, above))
    return left


_COMBINE: dict[str, Callable[..., tuple[Interval, ...] | None]] = {
    "∪": lambda left, right: left + right,
    "∖": _difference,
    "∩": _intersection,
}


def merged(pieces: tuple[Interval, ...]) -> list[Interval] | None:
    """Merge intervals into as few as possible, in order; None if they cannot be ordered."""
    in_order: list[Interval] = []
    for piece in pieces:
        signs = [sign_of_difference(piece.low, other.low) for other in in_order]
        if None in signs:
            return None
        before = sum(sign == 1 or (sign == 0 and not piece.low_closed) for sign in signs)
        in_order.insert(before, piece)
    joined: list[Interval] = []
    for piece in in_order:
        gap = sign_of_difference(piece.low, joined[-1].high) if joined else 1
        if gap is None:
            return None
        if gap == 1 or (gap == 0 and not piece.low_closed and not joined[-1].high_closed):
            joined.append(piece)
            continue
        last = joined[-1]
        further = sign_of_difference(piece.high, last.high)
        if further is None:
            return None
        closed = (
            piece.high_closed
            if further == 1
            else last.high_closed or (further == 0 and piece.high_closed)
        )
        joined[-1] = Interval(
            last.low, last.low_closed, piece.high if further == 1 else last.high, closed
        )
    return joined
