"""Parse training logs of verl, MindSpeed-RL and MindSpeed-MM into metrics per step, under our
names.

verl prints `step:N - name:value - ...` and its `file` logger writes `{"step": N, "data": {...}}`.
MindSpeed prints `[time] iteration: N / M | name : value | ...`. Our metrics.jsonl is read too.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

Steps = list[dict[str, Any]]  # {"step": N, metric: value} of each training step, in order

MAX_LINE_BYTES = 2**20  # a longer line is read in parts
_MAX_JOINED_CHARS = 2**16  # of one record
_MAX_ITEM_CHARS = 400
# Also escapes that lost their first byte.
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\[\d{1,3}(?:;\d{1,3})*m")
_PROCESS = re.compile(r"\([\w.:\[\]-]+ pid=\d+(?:, ip=[\w.:]+)?\) ?")  # Ray's prefix
_NUMBER = (
    r"(?:(?:np|numpy|torch)\.\w+\()?"
    r"(?P<value>[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf)|True|False)"
)

_VALUE_BEGINS = re.compile(r" +(?::|: +(?:[-+]|na?|in?)?)?$")  # of an item cut by line wrapping


@dataclass(frozen=True)
class Record:
    """The metrics of one training step in a log, under our names; values may be nan or infinite."""

    step: int
    metrics: dict[str, float]
    trainer: str  # "verl", "mindspeed", or "" for a metrics.jsonl of ours
    num_steps: int | None = None  # of the whole training, if the line has it


@dataclass(frozen=True)
class Training:
    """A training as shown by its log."""

    trainer: str
    num_steps: int | None
    steps: Steps


@dataclass(frozen=True)
class _Form:
    """A trainer's log format for one step."""

    trainer: str
    start: re.Pattern[str]
    item: re.Pattern[str]
    mark: str  # between items, with a space on both sides

    def parts(self, text: str) -> list[str]:
        return [part.strip() for part in re.split(rf"\s{re.escape(self.mark)}(?:\s|$)", text)]


_FORMS = (
    _Form(
        "verl",
        re.compile(r"(?<![\w/])step:(?P<step>\d+) -(?: |$)"),
        re.compile(rf"(?P<name>\S.*?/.*?):{_NUMBER}"),
        "-",
    ),
    _Form(
        "mindspeed",
        re.compile(r"(?<!\w)iteration: *(?P<step>\d+) */ *(?P<num_steps>\d+) *\|(?: |$)"),
        re.compile(rf"(?P<name>[^:|]+?) *: *{_NUMBER}"),
        "|",
    ),
)
_HINTS = ("step:", "iteration:")  # one of them is in the first line of a record


@dataclass
class _Open:
    """A record that may continue on the next line."""

    form: _Form
    step: int
    num_steps: int | None
    text: str  # after the step number
    widths: list[int]  # characters of each of its lines

    def joins(self, line: str) -> bool:
        """Append a continuation line; False if the line is not one.

        A continuation adds items or completes a truncated one. A line of digits completes a
        truncated number if at least the two lines before it have the same width.
        """
        mark, item = self.form.mark, self.form.item
        begins = line.lstrip().startswith(f"{mark} ")
        joined = self.text + (" " if begins or self.text.endswith(f" {mark}") else "") + line
        if len(_items(self.form, joined)[0]) > len(_items(self.form, self.text)[0]):
            is_cut = item.match(self.form.parts(self.text)[-1]) is None
            is_next = begins or is_cut or len(self.form.parts(line)) > 1
        else:
            number = re.fullmatch(rf"[\d.e+-]+\)?(\s{re.escape(mark)}.*)?", line)
            is_wrapped = len(self.widths) > 1 and len(set(self.widths)) == 1
            is_next = number is not None and bool(number[1] or is_wrapped)
        self.text = joined
        self.widths.append(len(line))
        return is_next


class LogParser:
    """Turns log lines into records as they arrive; keeps only the last record of each process.

    A wrapped line yields a record per part with all metrics so far; later records replace earlier
    ones.
    """

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}

    def feed(self, line: str) -> Record | None:
        """Return the record that the line starts or continues, None for any other line."""
        if line.startswith("{"):
            return _json_record(line)
        has_hint = any(hint in line for hint in _HINTS)
        if not has_hint and not self._open:
            return None
        text = _ESCAPES.sub("", line).rstrip("\r\n")
        process = match[0].strip() if (match := _PROCESS.match(text)) else ""
        body = text[match.end() :] if match else text
        record = _begun(body) if has_hint else None
        if record is None and body.strip():
            record = self._open.pop(process, None)
            record = record if record and record.joins(body) else None
        if record is None:
            return None
        metrics, is_ended = _items(record.form, record.text)
        self._open[process] = record
        if is_ended or len(record.text) > _MAX_JOINED_CHARS:
            del self._open[process]
        trainer = record.form.trainer
        named = _renamed(trainer, metrics)
        return Record(record.step, named, trainer, record.num_steps) if metrics else None


def _begun(line: str) -> _Open | None:
    """Return the record that starts anywhere in the line."""
    for form in _FORMS:
        if found := form.start.search(line):
            named = found.groupdict()
            total = int(named["num_steps"]) if "num_steps" in named else None
            return _Open(form, int(named["step"]), total, line[found.end() :], [len(line)])
    return None


def _items(form: _Form, text: str) -> tuple[dict[str, float], bool]:
    """Return (metrics, True if other text follows the last value)."""
    metrics: dict[str, float] = {}
    *whole, last = form.parts(text)
    for part in (*whole, last):
        match = form.item.match(part, 0, _MAX_ITEM_CHARS)
        if match is not None:
            value = {"True": 1, "False": 0}.get(match["value"], match["value"])
            metrics[match["name"]] = float(value)
            rest = part[match.end() :].lstrip(")")
            if rest and not (part is last and re.fullmatch("e[-+]?", rest)):  # a truncated exponent
                return metrics, True
    is_cut = " " not in _VALUE_BEGINS.sub("", last)
    return metrics, form.item.match(last) is None and not is_cut


def _json_record(line: str) -> Record | None:
    """Return the record of a line of our metrics.jsonl or of verl's file logger."""
    with contextlib.suppress(ValueError):
        row = json.loads(line)
        if isinstance(row, dict) and type(row.get("step")) is int:
            step = row.pop("step")
            is_verl = isinstance(row.get("data"), dict)
            values = row["data"] if is_verl else row
            numbers = {
                key: float(value) for key, value in values.items() if isinstance(value, int | float)
            }
            named = _renamed("verl", numbers) if is_verl else numbers
            return Record(step, named, "verl" if is_verl else "")
    return None


def _renamed(trainer: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Rename the metrics to our names; a metric that already has our name wins."""
    table = metric_names(trainer)
    named = {table[name]["ours"]: value for name, value in metrics.items() if name in table}
    return {**named, **{name: value for name, value in metrics.items() if name not in table}}


@cache
def metric_names(trainer: str) -> dict[str, dict[str, str]]:
    """Return {their name: {ours, unit, note}} for `verl` or `mindspeed`."""
    text = (Path(__file__).parent / "metrics.yaml").read_text(encoding="utf-8")
    table: dict[str, dict[str, str]] = yaml.safe_load(text)[trainer]
    return table


def read_training(path: str | Path) -> Training:
    """Return the training steps of a console log or metrics file in order, possibly none.

    Several attempts in one log count as one training: where the step number goes back, later steps
    of the previous attempt are dropped and newer values replace older ones. The log is read line by
    line.
    """
    steps: dict[int, dict[str, Any]] = {}
    last, trainer, num_steps = -1, "", None
    for record in read_records(Path(path)):
        if record.step < last:
            steps = {step: metrics for step, metrics in steps.items() if step <= record.step}
        last, trainer, num_steps = record.step, record.trainer, record.num_steps
        steps.setdefault(record.step, {"step": record.step}).update(record.metrics)
    return Training(trainer, num_steps, [steps[step] for step in sorted(steps)])


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of a log as they are read."""
    parser = LogParser()
    with path.open("rb") as log:
        while line := log.readline(MAX_LINE_BYTES):
            for part in line.split(b"\r"):  # progress bars
                record = parser.feed(part.decode("utf-8", errors="replace"))
                if record is not None:
                    yield record
