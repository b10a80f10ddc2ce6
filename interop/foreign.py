"""Say what to write in a recipe instead of another trainer's key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from interop.account import outcome_of, split_sections
from interop.foreign_config import ForeignConfig, Setting
from interop.table import TRAINERS, Row, Table, load

_TITLES = {"verl": "verl", "mindspeed-rl": "MindSpeed-RL"}
_INSTEAD = {
    "unsupported": "this value is not supported here",
    "ignored-by-trainer": "no version reads it",
    "other-stage": "here another stage handles it",
}


def instead_of(typed: Mapping[str, Any]) -> dict[str, str]:
    """Return, for each key of verl or MindSpeed, what to write instead; other keys are left out.

    `typed` holds unknown keys with their values, possibly whole sections.
    """
    settings = [Setting(name, value, "") for name, value in typed.items()]
    found: dict[str, str] = {}
    for trainer in TRAINERS:
        table = load(trainer)
        for name, value, _ in split_sections(settings, table):
            if name not in found and (row := _row(table, name)) is not None:
                here = _here(table, row, name, value)
                found[name] = f"unknown key {name} is {_TITLES[trainer]}'s; {here}"
    return found


def key_of(name: str) -> tuple[str, tuple[str, ...]] | None:
    """Return a sentence on another trainer's key, and our keys for it; None for an unknown key."""
    for trainer in TRAINERS:
        if (row := _row(load(trainer), name)) is not None:
            whose = f"{name} is {_TITLES[trainer]}'s"
            said = f"{whose}; here {_keys(row)}" if row.ours else f"{whose}: {row.reason}"
            return said, row.ours
    return None


def _row(table: Table, name: str) -> Row | None:
    row = table.resolve(name.lstrip("+~"), table.newest)
    return None if row is not None and row.key.startswith("*") else row


def _here(table: Table, row: Row, name: str, value: Any) -> str:
    """Return our keys, with the value where it does not depend on other keys of theirs."""
    held = [each for each in table.versions_of(name.lstrip("+~")) if each not in row.ignored]
    if row.ours and (row.convert or row.when or not held):
        return f"here {_keys(row)}"
    config = ForeignConfig(table, (held or table.versions)[-1], {})
    outcome = outcome_of(row, name.lstrip("+~"), value, config)
    if outcome.fate == "taken":
        keys = ", ".join(f"{ours}={_spelt(each)}" for ours, each in outcome.ours.items())
        return f"here {keys}: {outcome.note}" if outcome.note else f"here {keys}"
    its_key = f"; its key is {' or '.join(row.ours)}" if row.ours else ""
    return f"{_INSTEAD.get(outcome.fate, f'not needed here{its_key}')}: {outcome.note}"


def _keys(row: Row) -> str:
    return ": ".join(each for each in (", ".join(row.ours), row.change or row.reason) if each)


def _spelt(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
