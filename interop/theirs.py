"""The settings of another trainer, by the newest name of each key, with the defaults of its version."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml

from interop.table import UNSAID, Fate, Row, Table

_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?\s*([\w.]+)\s*(?:,\s*([^}]*))?\}")


class Setting(NamedTuple):
    """A key as someone wrote it, without Hydra's + or ++, and where: `run.sh:41`."""

    key: str
    value: Any
    origin: str


@dataclass(frozen=True)
class Outcome:
    """What became of one setting."""

    fate: Fate
    ours: dict[str, Any] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Theirs:
    """What a configuration says in a version of a trainer; `facts` are numbers that no key holds."""

    table: Table
    version: str
    values: Mapping[str, Any]
    facts: Mapping[str, int] = field(default_factory=dict)

    def is_set(self, key: str) -> bool:
        """Whether the configuration sets the key."""
        return key in self.values

    def __getitem__(self, key: str) -> Any:
        """The value of a key by its newest name, set or default, references followed; None if there is none."""
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
    """Register the function that turns a value of theirs into our keys, under the `convert` of a row.

    With `is_one_way`, no value of ours becomes theirs.
    """

    def register(function: ToOurs) -> ToOurs:
        TO_OURS[name] = function
        if is_one_way:
            TO_THEIRS[name] = lambda _: UNSAID
        return function

    return register


def theirs_from(name: str) -> Callable[[ToTheirs], ToTheirs]:
    """Register the function that says a value of theirs from all our keys, or UNSAID, under the same name."""

    def register(function: ToTheirs) -> ToTheirs:
        TO_THEIRS[name] = function
        return function

    return register


def taken(note: str = "", **ours: Any) -> Outcome:
    """An outcome with our keys, `__` for a dot: `taken(train__num_ranks=8)`."""
    return Outcome("taken", {name.replace("__", "."): value for name, value in ours.items()}, note)


def outcome_of(row: Row, key: str, value: Any, theirs: Theirs) -> Outcome:
    """What a value of a row's key becomes; of a family, the key says which of ours."""
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
        return Outcome("unsupported", {}, f"cannot be converted, with the keys that belong to it: {error}")
    return outcome if outcome.note or outcome.fate != "taken" else Outcome("taken", outcome.ours, row.change)


def theirs_of(row: Row, ours: Mapping[str, Any]) -> Any:
    """The value of a row's key that says what our keys say; UNSAID where it cannot, or need not."""
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
    """Values by dotted name as nested sections."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *sections, leaf = name.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[leaf] = value
    return tree
