"""Gates: what a recipe requires of the measured result, such as `math500 >= before - 1`."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from downloads.nearest import nearest
from eval import InputError
from eval.problems.registry import POOLED

BEFORE = "before"
LAST_NIGHT = "last-night"  # the column that a nightly run adds where there is an earlier night
ACCURACY = "accuracy"
METRICS = (ACCURACY, "finished", "truncated", "no_answer", "request_failed", "tokens")
FORM = "NAME[.METRIC] >= NUMBER, or NAME[.METRIC] >= COLUMN - NUMBER; the sign is >=, >, <= or <"

_SIGNS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
_NUMBER = r"\d+(?:\.\d+)?"
_GATE = re.compile(
    r"(?P<name>\w[\w-]*)(?:\.(?P<metric>[\w@]+))?\s*(?P<sign>>=|<=|>|<)\s*"
    rf"(?P<bound>-?{_NUMBER}|(?P<column>[^\W\d][\w-]*?)(?P<shift>\s*[+-]\s*{_NUMBER})?)"
)
_DECIMALS = 9  # of a percentage; binary fractions of a share differ beyond it

Metrics = Mapping[str, float | None]  # {metric: percent, or tokens}
# {column: {benchmark or `pooled`: (metrics of the column, metrics after, over the same items)}}
Measured = Mapping[str, Mapping[str, tuple[Metrics, Metrics]]]


class GateError(InputError):
    """A gate cannot be read, or names what the recipe does not have."""


@dataclass(frozen=True)
class Gate:
    """`name.metric sign column + points`, or without a column `name.metric sign points`."""

    text: str
    name: str  # of a benchmark, or `pooled`
    metric: str
    sign: str
    column: str | None
    points: float  # of a percentage, or tokens


@dataclass(frozen=True)
class GateResult:
    """What a gate came to. `is_passed` is None where there is no comparable earlier night."""

    gate: str
    unit: str
    measured: float | None
    bound: float | None
    is_passed: bool | None
    reason: str | None  # why there are no values


def parse_gate(text: str, benchmarks: Sequence[str], columns: Sequence[str]) -> Gate:
    """The gate that the text says. Raises GateError, with what was probably meant.

    `benchmarks` is empty where there is only one: any name means it, and the gate's is `pooled`.
    """
    match = _GATE.fullmatch(text.strip())
    if match is None:
        raise GateError(f"evaluate.gates: {text!r} is not of the form {FORM}")
    name, metric = match["name"], match["metric"] or ACCURACY
    column, shift = match["column"], match["shift"] or "0"
    if match["bound"] in columns:  # a name that ends like a number of points
        column, shift = match["bound"], "0"
    if benchmarks and name not in (*benchmarks, POOLED):
        raise GateError(f"evaluate.gates: {text!r}: no benchmark {name}{nearest(name, (*benchmarks, POOLED))}")
    if metric not in METRICS:
        raise GateError(f"evaluate.gates: {text!r}: no metric {metric}{nearest(metric, METRICS)}")
    if benchmarks and name == POOLED and metric != ACCURACY:
        raise GateError(f"evaluate.gates: {text!r}: {POOLED} has no {metric}, only its accuracy; name a benchmark")
    if column is not None and column not in columns:
        raise GateError(f"evaluate.gates: {text!r}: no column {column}{nearest(column, columns)}")
    points = float(match["bound"]) if column is None else float("".join(shift.split()))
    return Gate(text.strip(), name if benchmarks else POOLED, metric, match["sign"], column, points)


def check_gate(gate: Gate, measured: Measured) -> GateResult:
    """The gate against the measured values themselves, not their intervals.

    Where a value is missing the gate fails, but for last night's: there may be none, or one asked in another way.
    """
    unit = "tokens" if gate.metric == "tokens" else "%"
    theirs, ours = measured.get(gate.column or BEFORE, {}).get(gate.name, ({}, {}))
    value = ours.get(gate.metric)
    base = 0.0 if gate.column is None else theirs.get(gate.metric)
    if value is None or base is None:
        is_night = gate.column == LAST_NIGHT  # which the recipe cannot promise
        where = f"beside {gate.column}" if gate.column else "after training"
        reason = f"{gate.name} has no {gate.metric} {where}"
        if is_night and LAST_NIGHT not in measured:
            reason = "there is no earlier night"
        return GateResult(gate.text, unit, value, None, None if is_night else False, reason)
    value, bound = round(value, _DECIMALS), round(base + gate.points, _DECIMALS)
    return GateResult(gate.text, unit, value, bound, _SIGNS[gate.sign](value, bound), None)


def describe_gates(results: Sequence[GateResult]) -> list[str]:
    """The gates in a sentence: which failed, with the measured values; none without gates."""
    if not results:
        return []
    failed = [result for result in results if result.is_passed is False]
    skipped = sum(result.is_passed is None for result in results)
    more = f", {skipped} without a comparable earlier night" if skipped else ""
    if not failed:
        return [f"Gates: {len(results) - skipped} of {len(results)} hold{more}."]
    words = (f"{result.gate} ({_values(result)})" for result in failed)
    return [f"GATES FAILED, {len(failed)} of {len(results)}{more}: {'; '.join(words)}."]


def _values(result: GateResult) -> str:
    if result.bound is None or result.measured is None:
        return f"not measured: {result.reason}"
    return f"measured {result.measured:.4g}, against {result.bound:.4g} {result.unit}"
