"""Another trainer's settings with the defaults of its version, and the registry of conversions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml

from interop.table import UNSAID, Fate, Row, Table

_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?\s*([\w.]+)\s*(?:,\s*([^}]*))?\}")


class Setting(NamedTuple):
    """A key as written, without Hydra's + or ++, its value, and where it is set: `run.sh:41`."""

    key: str
    value: Any
    origin: str


@dataclass(frozen=True)
class Outcome:
    """The result of converting one setting."""

    fate: Fate
    ours: dict[str, Any] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Theirs:
    """A configuration in one version of a trainer; `facts` are numbers that no key holds."""

    table: Table
    version: str
    values: Mapping[str, Any]
    facts: Mapping[str, int] = field(default_factory=dict)

    def is_set(self, key: str) -> bool:
        """True if the configuration sets the key."""
        return key in self.values

    def __getitem__(self, key: str) -> Any:
        """Return a key's value, set or default, by its newest name; resolves references. None if it has none."""
        value = self._plain(key, set())
        return None if value is UNSAID else value

    def _plain(self, key: str, followed: set[str]) -> Any:
        if key in self.values:
            value = self.values[key]
        else:
            row = self.table.resolve(key, self.version)
            value = UNSAID if row is None else row.default(self.version)
        match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            return value
        target = self.table.resolve(match[1], self.version)
        name = match[1] if target is None or target.is_family else target.key
        found = UNSAID if name in followed else self._plain(name, {*followed, name})
        if found is not UNSAID and found is not None:
            return found
        return UNSAID if match[2] is None else yaml.safe_load(match[2])


ToOurs = Callable[[Any, Theirs], Outcome]
ToTheirs = Callable[[Mapping[str, Any]], Any]
TO_OURS: dict[str, ToOurs] = {}
TO_THEIRS: dict[str, ToTheirs] = {}


def ours_from(name: str, is_one_way: bool = False) -> Callable[[ToOurs], ToOurs]:
    """Register a function that converts a value of theirs to our keys; rows refer to it as `convert: NAME`.

    With `is_one_way`, an export skips the key.
    """

    def register(function: ToOurs) -> ToOurs:
        TO_OURS[name] = function
        if is_one_way:
            TO_THEIRS[name] = lambda _: UNSAID
        return function

    return register


def theirs_from(name: str) -> Callable[[ToTheirs], ToTheirs]:
    """Register the inverse function, which returns their value for all our keys, or UNSAID."""

    def register(function: ToTheirs) -> ToTheirs:
        TO_THEIRS[name] = function
        return function

    return register


def taken(note: str = "", **ours: Any) -> Outcome:
    """Return an outcome with our keys; `__` stands for a dot: `taken(train__num_ranks=8)`."""
    return Outcome("taken", {name.replace("__", "."): value for name, value in ours.items()}, note)


def outcome_of(row: Row, key: str, value: Any, theirs: Theirs) -> Outcome:
    """Convert a value of a row's key; for a family, the key determines ours."""
    if theirs.version in row.ignored:
        return Outcome("ignored-by-trainer", {}, row.reason)
    if row.convert is not None:
        return _converted(row, value, theirs)
    if row.is_family and (value is None or value == {}) and key == row.key.removesuffix(".*"):
        return Outcome("default", {}, "empty")
    if row.values and value not in list(row.values):
        known = ", ".join(str(each) for each in row.values)
        return Outcome("unsupported", {}, f"known are {known}. {row.reason}".strip())
    if row.only is not None and value not in row.only:
        return Outcome("unsupported", {}, row.reason)
    if not row.ours:
        return Outcome(row.fate, {}, row.reason)
    converted = row.values[value] if row.values else value
    if converted is None and len(row.ours) == 1 and row.values == {}:
        return Outcome("default", {}, "unset")
    if row.is_family:
        below = key.removeprefix(row.key.removesuffix("*"))
        return Outcome("taken", {name.removesuffix("*") + below: converted for name in row.ours}, row.change)
    return Outcome("taken", dict.fromkeys(row.ours, converted), row.change)


def _converted(row: Row, value: Any, theirs: Theirs) -> Outcome:
    try:
        outcome = TO_OURS[row.convert or ""](value, theirs)
    except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        return Outcome("unsupported", {}, f"cannot be converted with the keys it depends on: {error}")
    return outcome if outcome.note or outcome.fate != "taken" else Outcome("taken", outcome.ours, row.change)


def theirs_of(row: Row, ours: Mapping[str, Any]) -> Any:
    """Return the value of a row's key that is equivalent to our keys; UNSAID if none exists or is needed."""
    if row.export is not UNSAID:
        return row.export
    if row.convert in TO_THEIRS:
        return TO_THEIRS[row.convert](ours)
    if len(row.ours) != 1 or row.is_family:
        return UNSAID
    value = ours.get(row.ours[0], UNSAID)
    if not row.values or value is UNSAID:
        return value
    return next((theirs for theirs, of_ours in row.values.items() if of_ours == value), UNSAID)


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Turn values by dotted name into nested sections."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *sections, leaf = name.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[leaf] = value
    return tree
