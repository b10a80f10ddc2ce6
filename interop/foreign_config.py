"""Another trainer's settings with the defaults of its version, and what a conversion returns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import yaml

from interop.table import Fate, Table

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


# Outcomes without a key of ours, from their note; unsupported ones stop an import.
default = partial(Outcome, "default", {})
meaningless = partial(Outcome, "meaningless", {})
unsupported = partial(Outcome, "unsupported", {})


def taken(note: str = "", **ours: Any) -> Outcome:
    """Return an outcome with our keys; `__` stands for a dot: `taken(train__num_ranks=8)`."""
    return Outcome("taken", {name.replace("__", "."): value for name, value in ours.items()}, note)


@dataclass(frozen=True)
class ForeignConfig:
    """A configuration in one version of a trainer; `facts` are numbers that no key holds."""

    table: Table
    version: str
    values: Mapping[str, Any]
    facts: Mapping[str, int] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        """Return a key's value or default by its newest name, references resolved."""
        return self._plain(key, set())

    def _plain(self, key: str, followed: set[str]) -> Any:
        if key in self.values:
            value = self.values[key]
        else:
            row = self.table.resolve(key, self.version)
            value = None if row is None else row.defaults.get(self.version)
        match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            return value
        target = self.table.resolve(match[1], self.version)
        name = match[1] if target is None or target.is_family else target.key
        found = None if name in followed else self._plain(name, {*followed, name})
        return yaml.safe_load(match[2]) if found is None and match[2] is not None else found


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


def by_name(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return values and sections by dotted name, since some keys hold a section."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found[f"{prefix}{name}"] = value
        if isinstance(value, Mapping):
            found |= by_name(value, f"{prefix}{name}.")
    return found
