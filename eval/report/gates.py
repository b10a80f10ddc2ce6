"""Gates: conditions on the measured results, such as `math500 >= before - 1`."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from downloads.nearest import nearest
from eval import InputError
from eval.problems.registry import POOLED

BEFORE, AFTER = "before", "after"
LAST_NIGHT = "last-night"  # the column that a nightly run adds if there is an earlier night
ACCURACY = "accuracy"
METRICS = (ACCURACY, "finished", "truncated", "no_answer", "request_failed", "tokens")
FORM = "NAME[.METRIC] >= NUMBER, or NAME[.METRIC] >= COLUMN - NUMBER; the sign is >=, >, <= or <"

_SIGNS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
_NUMBER = r"\d+(?:\.\d+)?"
_GATE = re.compile(
    r"(?P<measure>\w[^<>=]*?)\s*(?P<sign>>=|<=|>|<)\s*"
    rf"(?P<bound>-?{_NUMBER}|(?P<column>[^\W\d][\w-]*?)(?P<shift>\s*[+-]\s*{_NUMBER})?)"
)
_DECIMALS = 9  # of a percentage; hides binary rounding

Metrics = Mapping[str, float | None]  # {metric: percent, or tokens}
# {column: {benchmark or `pooled`: (metrics of the column, metrics after training)}}, over the same
# items. The column `after` is for gates that name none.
Measured = Mapping[str, Mapping[str, tuple[Metrics, Metrics]]]


class GateError(InputError):
    """A gate cannot be parsed, or names an unknown benchmark, metric or column."""


@dataclass(frozen=True)
class Gate:
    """`name.metric sign column + points`, or `name.metric sign points` without a column."""

    text: str
    name: str  # a benchmark or `pooled`
    metric: str
    sign: str
    column: str | None
    points: float  # percentage points or tokens


@dataclass(frozen=True)
class GateResult:
    """Outcome of a gate. `is_passed` is None if its column was not measured."""

    gate: str
    unit: str
    measured: float | None
    bound: float | None
    is_passed: bool | None
    reason: str | None  # why it was not measured


def parse_gate(text: str, benchmarks: Sequence[str], columns: Sequence[str]) -> Gate:
    """Parse a gate. Raises GateError, suggesting the nearest name.

    `benchmarks` is empty if there is only one. Any name then refers to it, and the parsed name is
    `pooled`.
    """
    match = _GATE.fullmatch(text.strip())
    if match is None:
        raise GateError(f"evaluate.gates or --gate: {text!r} is not of the form {FORM}")
    name, metric = _name_and_metric(match["measure"], benchmarks)
    column, shift = match["column"], match["shift"] or "0"
    if match["bound"] in columns:  # a column such as qwen3-8, which also reads as "qwen3 minus 8"
        column, shift = match["bound"], "0"
    if benchmarks and name not in (*benchmarks, POOLED):
        raise GateError(
            f"evaluate.gates or --gate: {text!r}: no benchmark "
            f"{name}{nearest(name, (*benchmarks, POOLED))}"
        )
    if metric not in METRICS:
        raise GateError(
            f"evaluate.gates or --gate: {text!r}: no metric {metric}{nearest(metric, METRICS)}"
        )
    if benchmarks and name == POOLED and metric != ACCURACY:
        raise GateError(
            f"evaluate.gates or --gate: {text!r}: {POOLED} has no {metric}, only its accuracy; "
            "name a benchmark"
        )
    if column is not None and column not in columns:
        raise GateError(
            f"evaluate.gates or --gate: {text!r}: no column {column}{nearest(column, columns)}"
        )
    points = float(match["bound"]) if column is None else float("".join(shift.split()))
    return Gate(text.strip(), name if benchmarks else POOLED, metric, match["sign"], column, points)


def _name_and_metric(measure: str, benchmarks: Sequence[str]) -> tuple[str, str]:
    """Split NAME[.METRIC]. Benchmarks of other programs may have dots and spaces in their names."""
    name, dot, metric = measure.rpartition(".")
    return (name, metric) if dot and measure not in benchmarks else (measure, ACCURACY)


def check_gate(
    gate: Gate, measured: Measured, absent: Mapping[str, str] | None = None
) -> GateResult:
    """Check a gate against the measured values, not their intervals.

    A gate whose whole column is missing is not checked; `absent` says why it is. Otherwise a
    missing value fails the gate, except for `last-night`, which may not be comparable.
    """
    unit = "tokens" if gate.metric == "tokens" else "%"
    column = gate.column or AFTER
    if column not in measured:
        default = (
            "there is no earlier night" if column == LAST_NIGHT else f"{column} was not evaluated"
        )
        return GateResult(gate.text, unit, None, None, None, (absent or {}).get(column, default))
    reference, after = measured[column].get(gate.name, ({}, {}))
    value = after.get(gate.metric)
    base = 0.0 if gate.column is None else reference.get(gate.metric)
    if value is None or base is None:
        where = f"for {gate.column}" if gate.column else "after training"
        reason = f"{gate.name} has no {gate.metric} {where}"
        return GateResult(
            gate.text, unit, value, None, None if column == LAST_NIGHT else False, reason
        )
    value, bound = round(value, _DECIMALS), round(base + gate.points, _DECIMALS)
    return GateResult(gate.text, unit, value, bound, _SIGNS[gate.sign](value, bound), None)


def describe_gates(results: Sequence[GateResult]) -> list[str]:
    """Sentences on the gates that failed or were not checked; [] without gates."""
    failed = [
        f"{result.gate} ({_values(result)})" for result in results if result.is_passed is False
    ]
    unchecked = [
        f"{result.gate} ({result.reason})" for result in results if result.is_passed is None
    ]
    num_passed = len(results) - len(failed) - len(unchecked)
    sentences = []
    if failed:
        sentences.append(f"GATES FAILED, {len(failed)} of {len(results)}: {'; '.join(failed)}.")
    elif num_passed:
        sentences.append(f"Gates: {num_passed} of {len(results)} passed.")
    if unchecked:
        sentences.append(f"Gates not checked: {'; '.join(unchecked)}.")
    return sentences


def _values(result: GateResult) -> str:
    if result.bound is None or result.measured is None:
        return f"not measured: {result.reason}"
    return f"measured {result.measured:.4g}, threshold {result.bound:.4g} {result.unit}"
