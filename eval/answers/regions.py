"""Sets of real numbers: from inequalities and brackets, merged so that equal sets have equal pieces."""

from __future__ import annotations

from eval.answers.answers import INFINITY, Answer, Interval, Listing, Named, Point, Region, Value
from eval.answers.expression import Node
from eval.answers.numeric import sign_of_difference, variables


def region_of_inequality(operators: list[str], sides: tuple[Node, ...]) -> Region | None:
    """The numbers that an inequality in one variable allows: x > 3, 1 < x <= 5, x != 2."""
    where = [index for index, side in enumerate(sides) if side[0] == "var"]
    if len(where) != 1 or any(variables(side) for index, side in enumerate(sides) if index != where[0]):
        return None
    name = str(sides[where[0]][1])
    if len(sides) == 2:
        bound = sides[1 - where[0]]
        operator = operators[0] if where[0] == 0 else {"<": ">", ">": "<", "≤": "≥", "≥": "≤"}.get(operators[0])
        below, above = (
            Interval(("neg", INFINITY), False, bound, operator == "≤"),
            Interval(bound, operator == "≥", INFINITY, False),
        )
        if operators[0] == "≠":
            return Region((below, above), name)
        return Region((below if operator in ("<", "≤") else above,), name) if operator in tuple("<≤>≥") else None
    if len(sides) == 3 and where[0] == 1:
        if set(operators) <= set("<≤"):
            return Region((Interval(sides[0], operators[0] == "≤", sides[2], operators[1] == "≤"),), name)
        if set(operators) <= set(">≥"):
            return Region((Interval(sides[2], operators[1] == "≥", sides[0], operators[0] == "≥"),), name)
    return None


def ordered(points: list[Node]) -> list[Node] | None:
    ordered: list[Node] = []
    for point in points:
        signs = [sign_of_difference(point, other) for other in ordered]
        if any(sign is None for sign in signs):
            return None
        ordered.insert(sum(sign == 1 for sign in signs), point)
    return ordered


def as_region(answer: Answer) -> Region | None:
    """The answer as a set of real numbers, where it can be one: an interval in brackets, a set of numbers."""
    if isinstance(answer, Region):
        return answer
    if isinstance(answer, Named):
        return as_region(answer.value)
    if isinstance(answer, Listing) and answer.is_set and all(isinstance(item, Value) for item in answer.items):
        nodes = [item.node for item in answer.items if isinstance(item, Value)]
        return Region(tuple(Interval(node, True, node, True) for node in nodes))
    if isinstance(answer, Point) and len(answer.items) == 2 and answer.opening in "([" and answer.closing in ")]":
        low, high = answer.items
        if isinstance(low, Value) and isinstance(high, Value):
            return Region((Interval(low.node, answer.opening == "[", high.node, answer.closing == "]"),))
    return None


def merged(pieces: tuple[Interval, ...]) -> list[Interval] | None:
    """The same set in as few pieces as possible, from left to right; None when its ends cannot be ordered."""
    ordered: list[Interval] = []
    for piece in pieces:
        signs = [sign_of_difference(piece.low, other.low) for other in ordered]
        if any(sign is None for sign in signs):
            return None
        before = sum(sign == 1 or (sign == 0 and not piece.low_closed) for sign in signs)
        ordered.insert(before, piece)
    joined: list[Interval] = []
    for piece in ordered:
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
        closed = piece.high_closed if further == 1 else last.high_closed or (further == 0 and piece.high_closed)
        joined[-1] = Interval(last.low, last.low_closed, piece.high if further == 1 else last.high, closed)
    return joined
