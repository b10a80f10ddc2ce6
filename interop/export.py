"""Convert our recipe to another trainer's settings: the inverse of an import, with the same table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import interop.account  # noqa: F401  registers the conversions that the tables name
from interop.foreign_config import Setting, foreign_value
from interop.table import NOT_SET, Row, load

_ANY = ".*"


def settings_for(
    tree: Mapping[str, Any], trainer: str, version: str | None = None
) -> list[Setting]:
    """Return the settings of a trainer's version that are equivalent to a resolved recipe, in table
    order.

    `tree` has every key of the recipe, defaults included. A setting's origin lists the keys of ours
    it covers. Keys that the version does not have or read are left out. Raises ForeignConfigError
    for an unknown version.
    """
    table = load(trainer)
    version = table.newest if version is None else table.require_version(version)
    ours = by_name(tree)
    settings: list[Setting] = []
    for row in sorted(
        table.rows, key=lambda row: row.is_family
    ):  # an exact key wins over its family
        if (name := name_of(row, version)) is None:
            continue
        if row.is_family:
            covered = {setting.origin for setting in settings}
            settings += (
                setting for setting in _of_family(name, row, ours) if setting.origin not in covered
            )
        elif set(row.ours) <= ours.keys() and (value := foreign_value(row, ours)) is not NOT_SET:
            settings.append(Setting(name, value, ", ".join(row.ours)))
    return settings


def _of_family(name: str, row: Row, ours: Mapping[str, Any]) -> Iterator[Setting]:
    """Yield the settings of a family of free keys that maps to a family of ours."""
    if len(row.ours) != 1 or not (name.endswith(_ANY) and row.ours[0].endswith(_ANY)):
        return
    section = row.ours[0].removesuffix(_ANY)
    for part, value in (ours.get(section) or {}).items():
        yield Setting(f"{name.removesuffix(_ANY)}.{part}", value, f"{section}.{part}")


def name_of(row: Row, version: str) -> str | None:
    """Return a row's key in a version; None if the version does not have or read it."""
    names = [] if version in row.ignored else row.names(version)
    return names[0] if names else None


def by_name(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a tree by dotted name, sections included, since some keys hold a
    section.
    """
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found[f"{prefix}{name}"] = value
        if isinstance(value, Mapping):
            found |= by_name(value, f"{prefix}{name}.")
    return found
