"""Compares the values of two expression trees, exactly or to 45 digits at random points.

Different algebraic or elementary expressions do not agree to 45 digits at several random points, so
agreement means equality, and a decimal approximation is not equal. Unlike simplification, the cost
is bounded.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any

from eval.answers.expression import Node

DIGITS = 70
AGREEMENT = 45
POINTS = 5
MAX_BITS = 200_000  # in an exact rational
MAX_EXPONENT = 10**8  # log2 of the largest value computed
MAX_FACTORIAL = 3000


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
}


class NoValueError(ArithmeticError):
    """The expression has no value: it divides by zero or is too large to compute."""


def exact_value(node: Node) -> Fraction | None:
    """Return the value of a tree of rational operations; None if it is none, or too large."""
    try:
        return _exact(node)
    except ArithmeticError:
        return None


def _exact(node: Node) -> Fraction:
    match node:
        case "num", Fraction() as value:
            return value
        case "neg", child:
            return -_exact(child)
        case "pow", base, exponent:
            return _exact_power(_exact(base), _exact(exponent))
        case "call", name, *arguments if name in _WHOLE:
            return _exact_call(name, [_exact(argument) for argument in arguments])
        case kind, left, right if kind in _OPERATORS:
            values = _exact(left), _exact(right)
            if sum(value.numerator.bit_length() for value in values) > MAX_BITS:
                raise NoValueError("too large")
            return Fraction(_OPERATORS[kind](*values))
    raise NoValueError(node[0])


def _exact_power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or (base == 0 and exponent <= 0):
        raise NoValueError("no rational power")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(exponent) * bits > MAX_BITS:
        raise NoValueError("too large")
    return base ** int(exponent)


_WHOLE: dict[str, Callable[..., int]] = {
    "factorial": math.factorial,
    "binom": math.comb,
    "gcd": math.gcd,
    "lcm": math.lcm,
}


def _exact_call(name: str, values: Sequence[Fraction]) -> Fraction:
    limit = MAX_FACTORIAL if name in ("factorial", "binom") else 10**DIGITS
    if any(value.denominator != 1 or not 0 <= value <= limit for value in values):
        raise NoValueError("no small whole numbers")
    return Fraction(_WHOLE[name](*map(int, values)))


def variables(node: Node) -> frozenset[str]:
    """Return the names of a tree's variables."""
    if node[0] == "var":
        return frozenset((node[1],))
    return frozenset().union(*(variables(child) for child in node[1:] if isinstance(child, tuple)))


def substituted(node: Node, unknown: Node, value: Node) -> Node:
    """Return the tree with every occurrence of `unknown` replaced by `value`."""
    if node == unknown:
        return value
    return tuple(
        substituted(child, unknown, value) if isinstance(child, tuple) else child for child in node
    )


def mentions(node: Node, name: str) -> bool:
    """True if the tree calls the function."""
    return (node[0] == "call" and node[1] == name) or any(
        mentions(child, name) for child in node[1:] if isinstance(child, tuple)
    )


def is_same_value(left: Node, right: Node) -> bool:
    """True if two trees are equal for all values of their variables."""
    exact = exact_value(left), exact_value(right)
    if exact[0] is not None and exact[1] is not None:
        return exact[0] == exact[1]
    if left == right:
        return True
    if left[0] == "inf" or right[0] == "inf":
        return False
    bases = ("e", "10") if mentions(left, "log") or mentions(right, "log") else ("e",)
    return any(_agree(left, right, base) for base in bases)


def ratio_of(left: Node, right: Node) -> float | None:
    """Return the constant c != 0 with left = c * right for all values, else None."""
    names = variables(left) | variables(right)
    ratios = []
    for point in range(4):
        values = _values_at(left, right, names, point, "e")
        if values is None:
            continue
        if abs(values[1]) < 1e-20 or abs(values[0]) < 1e-20:
            return None
        ratios.append(values[0] / values[1])
    if len(ratios) < 2 or any(not _is_close(ratio, ratios[0]) for ratio in ratios[1:]):
        return None
    return float(ratios[0].real)


def sign_of_difference(left: Node, right: Node) -> int | None:
    """Return the sign of left - right; None unless both are real numbers."""
    if left == right or (left[0] != "inf" and right[0] != "inf" and is_same_value(left, right)):
        return 0
    exact = exact_value(left), exact_value(right)
    if exact[0] is not None and exact[1] is not None:
        return 1 if exact[0] > exact[1] else -1
    infinite = [_infinite_sign(node) for node in (left, right)]
    if infinite[0] or infinite[1]:
        difference = infinite[0] - infinite[1]
        return (difference > 0) - (difference < 0)
    if variables(left) | variables(right):
        return None
    values = _values_at(left, right, frozenset(), 0, "e")
    if values is None or any(abs(value.imag) > 1e-30 for value in values):
        return None
    return 1 if values[0].real > values[1].real else -1


def _infinite_sign(node: Node) -> int:
    if node == ("inf",):
        return 1
    return -1 if node == ("neg", ("inf",)) else 0


def _agree(left: Node, right: Node, log_base: str) -> bool:
    """True if equal at two positive points or more, and at negative ones where both are real."""
    names = variables(left) | variables(right)
    agreed = 0
    for point in range(-3 if names else 0, POINTS if names else 1):
        values = _values_at(left, right, names, point, log_base)
        if values is None or (point < 0 and any(abs(value.imag) >= 1e-30 for value in values)):
            continue
        if not _is_close(*values):
            return False
        agreed += point >= 0
    return agreed >= (2 if names else 1)


def _is_close(left: Any, right: Any) -> bool:
    size = max(abs(left), abs(right))
    return bool(
        abs(left - right) <= size * _tolerance() or (_is_rounding(left) and _is_rounding(right))
    )


def _is_rounding(value: Any) -> bool:
    """True for zero and for rounding errors of about 1e-70; smaller values are intentional."""
    return bool(value == 0 or 1e-90 < abs(value) < 1e-55)


@cache
def _tolerance() -> Any:
    return _mpmath().mpf(10) ** -AGREEMENT


def _values_at(
    left: Node, right: Node, names: frozenset[str], point: int, log_base: str
) -> tuple[Any, Any] | None:
    """Evaluate both at a point, as complex numbers; variables may be negative if it is."""
    mp = _mpmath()
    environment = {name: _coordinate(name, point) for name in names}
    try:
        first, second = (mp.mpc(_value(node, environment, log_base)) for node in (left, right))
        return (first, second) if mp.isfinite(first) and mp.isfinite(second) else None
    except (ArithmeticError, ValueError, TypeError, mp.NoConvergence):
        return None  # a pole, a logarithm of zero


@lru_cache(maxsize=4096)
def _coordinate(name: str, point: int) -> Any:
    source = random.Random(f"{name!a}/{point}")
    value = _mpmath().mpf(source.randrange(10**40, 3 * 10**40)) / 10**40
    return -value if point < 0 and source.random() < 0.7 else value


@cache
def _mpmath() -> Any:
    """Return a separate mpmath context, whose precision does not affect other users."""
    import mpmath

    context = mpmath.mp.clone()
    context.dps = DIGITS
    return context


def _value(node: Node, environment: Mapping[str, Any], log_base: str) -> Any:
    mp = _mpmath()
    match node:
        case "num", value:
            return mp.mpf(value.numerator) / value.denominator
        case "var", name:
            return environment[name]
        case "const", name:
            return {"pi": +mp.pi, "e": +mp.e, "i": mp.mpc(0, 1)}[name]
        case "call", name, *arguments:
            return _call(name, arguments, environment, log_base)
        case "deg", child:
            return _value(child, environment, log_base)
        case "neg", child:
            return -_value(child, environment, log_base)
        case kind, left, right if kind == "pow" or kind in _OPERATORS:
            values = (_value(node, environment, log_base) for node in (left, right))
            return (_power if kind == "pow" else _OPERATORS[kind])(*values)
    raise NoValueError(node[0])  # infinity, or ± inside a relation


def _power(base: Any, exponent: Any) -> Any:
    mp = _mpmath()
    if base == 0:
        if mp.re(exponent) <= 0:
            raise NoValueError("a power of zero")
        return mp.mpf(0)
    if abs(exponent) * (abs(mp.log(abs(base))) + mp.pi) > MAX_EXPONENT:
        raise NoValueError("too large")
    return mp.power(base, exponent)


_RADIANS = frozenset(("sin", "cos", "tan", "cot", "sec", "csc"))


def _call(name: str, nodes: Sequence[Node], environment: Mapping[str, Any], log_base: str) -> Any:
    mp = _mpmath()
    nodes = [_in_radians(node) for node in nodes] if name in _RADIANS else nodes
    arguments = [_value(node, environment, log_base) for node in nodes]
    if name == "log" and log_base == "10":
        return mp.log(arguments[0], 10)
    if name in _bounded_functions():
        return _bounded_functions()[name](*arguments)
    if any(abs(argument) > MAX_EXPONENT for argument in arguments):
        raise NoValueError("too large")
    if name in _functions():
        return _functions()[name](*arguments)
    # An unknown function has an arbitrary value for each set of arguments.
    key = ",".join(mp.nstr(mp.mpc(argument), 30) for argument in arguments)
    return _coordinate(f"{name}({key})", 0)


def _root(value: Any, index: Any) -> Any:
    mp = _mpmath()
    if value == 0:
        return mp.mpf(0)
    is_odd = mp.im(index) == 0 and mp.isint(index) and int(index.real) % 2
    if is_odd and mp.im(value) == 0 and mp.re(value) < 0:
        return -mp.power(-value, 1 / index)  # the real cube root
    return _power(value, 1 / index)


@cache
def _functions() -> dict[str, Callable[..., Any]]:
    names = {name: name for name in "sin cos tan cot sec csc sinh cosh tanh exp factorial".split()}
    names |= {f"arc{name}": f"a{name}" for name in "sin cos tan cot sinh cosh".split()}
    names |= {"ln": "log", "lg": "log10", "binom": "binomial"}
    return {name: getattr(_mpmath(), its_name) for name, its_name in names.items()}


@cache
def _bounded_functions() -> dict[str, Callable[..., Any]]:
    """Functions that are cheap for arguments of any size."""
    mp = _mpmath()

    def whole(value: Any, function: Callable[[Any], Any]) -> Any:
        nearest = mp.nint(mp.re(value))
        return nearest if abs(value - nearest) < _tolerance() else function(mp.re(value))

    return {
        "root": _root,
        **dict.fromkeys(("log", "log_", "ln_", "lg_"), mp.log),
        "abs": abs,
        "floor": lambda value: whole(value, mp.floor),
        "ceil": lambda value: whole(value, mp.ceil),
        "max": lambda *values: max(values, key=mp.re),
        "min": lambda *values: min(values, key=mp.re),
    }


def _in_radians(node: Node) -> Node:
    """Convert degrees in the argument of a trigonometric function; other terms stay in radians."""
    if node[0] == "deg":
        return ("mul", node[1], ("div", ("const", "pi"), ("num", Fraction(180))))
    return (
        node[0],
        *(_in_radians(child) if isinstance(child, tuple) else child for child in node[1:]),
    )
