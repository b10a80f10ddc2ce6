"""Training logs of verl, MindSpeed-RL and MindSpeed-MM as metrics of training steps under our names.

verl prints `step:N - name:value - ...` and writes `{"step": N, "data": {...}}` (its logger `file`). MindSpeed
prints `[time] iteration: N / M | name : value | ...`. Our metrics.jsonl is read too.
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
_ESCAPES = re.compile(
    r"\x1b\[[0-9;?]*[ -/]*[@-~]|\[\d{1,3}(?:;\d{1,3})*m"
)  # also those that lost their first byte
_PROCESS = re.compile(r"\([\w.:\[\]-]+ pid=\d+(?:, ip=[\w.:]+)?\) ?")  # Ray's prefix
_NUMBER = (
    r"(?:(?:np|numpy|torch)\.\w+\()?"
    r"(?P<value>[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf)|True|False)"
)

_VALUE_BEGINS = re.compile(r" +(?::|: +(?:[-+]|na?|in?)?)?$")  # of an item that a wrapped line cut


@dataclass(frozen=True)
class Record:
    """The metrics that a log shows of one training step, under our names; values may be nan or infinite."""

    step: int
    metrics: dict[str, float]
    trainer: str  # "verl", "mindspeed", or "" for a metrics.jsonl of ours
    num_steps: int | None = None  # of the whole training, where the line names it


@dataclass(frozen=True)
class Training:
    """What a log shows of a training."""

    trainer: str
    num_steps: int | None
    steps: Steps


@dataclass(frozen=True)
class _Form:
    """How a trainer prints a step."""

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
    """A record whose line may go on in the next one."""

    form: _Form
    step: int
    num_steps: int | None
    text: str  # behind the step
    widths: list[int]  # characters of each of its lines


class LogParser:
    """Turns the lines of a log into records as they come; holds the last record of each process, no more.

    A wrapped line gives a record for each part, with all metrics so far: the later one replaces the earlier.
    """

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}

    def feed(self, line: str) -> Record | None:
        """The record that the line begins or goes on with, None for any other line."""
        if line.startswith("{"):
            return _json_record(line)
        has_hint = any(hint in line for hint in _HINTS)
        if not has_hint and not self._open:
            return None
        text = _ESCAPES.sub("", line).rstrip("\r\n")
        process = match[0].strip() if (match := _PROCESS.match(text)) else ""
        body = text[match.end() :] if match else text
        begun = _begun(body) if has_hint else None
        if begun is not None:
            self._open[process] = begun
            return self._read(process)
        if process not in self._open or not body.strip():
            return None
        waiting = self._open[process]
        joined = _joined(waiting, body)
        if joined is None:
            del self._open[process]
            return None
        waiting.text = joined
        waiting.widths.append(len(body))
        return self._read(process)

    def _read(self, process: str) -> Record | None:
        """The process's record so far; closes it where something else follows its last value."""
        record = self._open[process]
        metrics, is_ended = _items(record.form, record.text)
        if is_ended or len(record.text) > _MAX_JOINED_CHARS:
            del self._open[process]
        trainer = record.form.trainer
        return Record(record.step, _renamed(trainer, metrics), trainer, record.num_steps) if metrics else None


def _begun(line: str) -> _Open | None:
    """The record that begins anywhere in the line."""
    for form in _FORMS:
        if found := form.start.search(line):
            named = found.groupdict()
            total = int(named["num_steps"]) if "num_steps" in named else None
            return _Open(form, int(named["step"]), total, line[found.end() :], [len(line)])
    return None


def _items(form: _Form, text: str) -> tuple[dict[str, float], bool]:
    """(metrics, whether something else follows the last value)."""
    metrics: dict[str, float] = {}
    *whole, last = form.parts(text)
    for part in (*whole, last):
        match = form.item.match(part, 0, _MAX_ITEM_CHARS)
        if match is not None:
            metrics[match["name"]] = float({"True": 1, "False": 0}.get(match["value"], match["value"]))
            rest = part[match.end() :].lstrip(")")
            if rest and not (part is last and re.fullmatch("e[-+]?", rest)):  # an exponent that was cut
                return metrics, True
    is_cut = " " not in _VALUE_BEGINS.sub("", last)
    return metrics, form.item.match(last) is None and not is_cut


def _joined(record: _Open, line: str) -> str | None:
    """The record's text with the line that goes on with it, None if the line does not.

    It does if it has further items, or completes the one that was cut. A number that was cut is completed by a
    line of digits where at least two lines before have one width.
    """
    form, text = record.form, record.text
    last = form.parts(text)[-1]
    begins = line.lstrip().startswith(f"{form.mark} ")
    joined = text + (" " if begins or text.endswith(f" {form.mark}") else "") + line
    if len(_items(form, joined)[0]) > len(_items(form, text)[0]):
        is_cut = form.item.match(last) is None
        return joined if begins or is_cut or len(form.parts(line)) > 1 else None
    number = re.fullmatch(rf"[\d.e+-]+\)?(\s{re.escape(form.mark)}.*)?", line)
    is_wrapped = len(record.widths) > 1 and len(set(record.widths)) == 1
    return joined if number and (number[1] or is_wrapped) else None


def _json_record(line: str) -> Record | None:
    """The record of a line of our metrics.jsonl, or of verl's file logger."""
    with contextlib.suppress(ValueError):
        row = json.loads(line)
        if isinstance(row, dict) and type(row.get("step")) is int:
            is_verl = isinstance(row.get("data"), dict)
            values = row["data"] if is_verl else {key: row[key] for key in row if key != "step"}
            numbers = {key: float(value) for key, value in values.items() if isinstance(value, int | float)}
            if is_verl:
                return Record(row["step"], _renamed("verl", numbers), "verl")
            return Record(row["step"], numbers, "")
    return None


def _renamed(trainer: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics under our names; what already has our name wins over what gets it."""
    table = metric_names(trainer)
    named = {table[name]["ours"]: value for name, value in metrics.items() if name in table}
    return {**named, **{name: value for name, value in metrics.items() if name not in table}}


@cache
def metric_names(trainer: str) -> dict[str, dict[str, str]]:
    """{their name: {ours, unit, note}} of `verl` or `mindspeed`."""
    text = (Path(__file__).parent / "metrics.yaml").read_text(encoding="utf-8")
    table: dict[str, dict[str, str]] = yaml.safe_load(text)[trainer]
    return table


def read_training(path: str | Path) -> Training:
    """The training steps of a console log or a metrics file, ordered; none if it shows none.

    A log of several attempts shows one training: where the step goes back, later steps of the attempt before are
    dropped, and the later values of the others count. Lines are read one at a time: memory holds the steps alone.
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
    """The records of a log, as they come."""
    parser = LogParser()
    with path.open("rb") as log:
        while line := log.readline(MAX_LINE_BYTES):
            for part in line.split(b"\r"):  # of a progress bar
                record = parser.feed(part.decode("utf-8", errors="replace"))
                if record is not None:
                    yield record
