"""What an answer can say: a value, words, a list, a point or interval, a matrix, a region, a relation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from eval.answers.expression import Node


class Interval(NamedTuple):
    """A piece of the real line; an infinite end is open."""

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
    """An answer in words, or what cannot be read: compared as text."""

    text: str


@dataclass(frozen=True)
class Listing:
    """Several answers without an order: `1, 2`, `\\{1, 2\\}`, `1 \\pm 2`."""

    items: tuple[Answer, ...]
    is_set: bool = False


@dataclass(frozen=True)
class Point:
    """A point, vector or interval: items in brackets."""

    opening: str
    closing: str
    items: tuple[Answer, ...]


@dataclass(frozen=True)
class Matrix:
    """Rows of entries."""

    rows: tuple[tuple[Answer, ...], ...]


@dataclass(frozen=True)
class Region:
    """A set of real numbers that is a union of intervals."""

    pieces: tuple[Interval, ...]
    variable: str | None = None


@dataclass(frozen=True)
class Relation:
    """An equation or inequality, or a chain of them."""

    operators: tuple[str, ...]
    sides: tuple[Node, ...]


@dataclass(frozen=True)
class Named:
    """A value with its name in front: `x = 5`, `f(x) = 2x`, `\\text{Area} = 5`."""

    name: str
    value: Answer


@dataclass(frozen=True)
class Approximate:
    """A value and what it was said to be close to."""

    values: tuple[Answer, ...]


Answer = Value | Words | Listing | Point | Matrix | Region | Relation | Named | Approximate

INFINITY: Node = ("inf",)
REALS = (Interval(("neg", INFINITY), False, INFINITY, False),)
