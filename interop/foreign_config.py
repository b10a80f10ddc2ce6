"""Another trainer's settings with the defaults of its version, and the registry of conversions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml

from interop.table import NOT_SET, Fate, Row, Table

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
class ForeignConfig:
    """A configuration in one version of a trainer; `facts` are numbers that no key holds."""

    table: Table
    version: str
    values: Mapping[str, Any]
    facts: Mapping[str, int] = field(default_factory=dict)

    def is_set(self, key: str) -> bool:
        """True if the configuration sets the key."""
        return key in self.values

    def __getitem__(self, key: str) -> Any:
        """Return a key's value, set or default, by its newest name; resolves references. None if it
        has none.
        """
        value = self._plain(key, set())
        return None if value is NOT_SET else value

    def _plain(self, key: str, followed: set[str]) -> Any:
        if key in self.values:
            value = self.values[key]
        else:
            row = self.table.resolve(key, self.version)
            value = NOT_SET if row is None else row.default(self.version)
        match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            return value
        target = self.table.resolve(match[1], self.version)
        name = match[1] if target is None or target.is_family else target.key
        found = NOT_SET if name in followed else self._plain(name, {*followed, name})
        if found is not NOT_SET and found is not None:
            return found
        return NOT_SET if match[2] is None else yaml.safe_load(match[2])


FromForeign = Callable[[Any, ForeignConfig], Outcome]
ToForeign = Callable[[Mapping[str, Any]], Any]
FROM_FOREIGN: dict[str, FromForeign] = {}
TO_FOREIGN: dict[str, ToForeign] = {}


def from_foreign(name: str, is_one_way: bool = False) -> Callable[[FromForeign], FromForeign]:
    """Register a function that converts a foreign value to our keys; rows refer to it as `convert:
    NAME`.

    With `is_one_way`, an export skips the key.
    """

    def register(function: FromForeign) -> FromForeign:
        FROM_FOREIGN[name] = function
        if is_one_way:
            TO_FOREIGN[name] = lambda _: NOT_SET
        return function

    return register


def to_foreign(name: str) -> Callable[[ToForeign], ToForeign]:
    """Register the inverse function, which returns their value for all our keys, or NOT_SET."""

    def register(function: ToForeign) -> ToForeign:
        TO_FOREIGN[name] = function
        return function

    return register


def taken(note: str = "", **ours: Any) -> Outcome:
    """Return an outcome with our keys; `__` stands for a dot: `taken(train__num_ranks=8)`."""
    return Outcome("taken", {name.replace("__", "."): value for name, value in ours.items()}, note)


def outcome_of(row: Row, key: str, value: Any, config: ForeignConfig) -> Outcome:
    """Convert a value of a row's key; for a family, the key determines ours."""
    if config.version in row.ignored:
        return Outcome("ignored-by-trainer", {}, row.reason)
    if row.convert is not None:
        return _converted(row, value, config)
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
        return Outcome(
            "taken", {name.removesuffix("*") + below: converted for name in row.ours}, row.change
        )
    return Outcome("taken", dict.fromkeys(row.ours, converted), row.change)


def _converted(row: Row, value: Any, config: ForeignConfig) -> Outcome:
    try:
        outcome = FROM_FOREIGN[row.convert or ""](value, config)
    except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        return Outcome(
            "unsupported", {}, f"cannot be converted with the keys it depends on: {error}"
        )
    return (
        outcome
        if outcome.note or outcome.fate != "taken"
        else Outcome("taken", outcome.ours, row.change)
    )


def foreign_value(row: Row, ours: Mapping[str, Any]) -> Any:
    """Return the value of a row's key that is equivalent to our keys; NOT_SET if none exists or is
    needed.
    """
    if row.export is not NOT_SET:
        return row.export
    if row.convert in TO_FOREIGN:
        return TO_FOREIGN[row.convert](ours)
    if len(row.ours) != 1 or row.is_family:
        return NOT_SET
    value = ours.get(row.ours[0], NOT_SET)
    if not row.values or value is NOT_SET:
        return value
    return next(
        (foreign for foreign, ours_value in row.values.items() if ours_value == value), NOT_SET
    )


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
