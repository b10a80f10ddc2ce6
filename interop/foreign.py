"""Say what to write in a recipe instead of another trainer's key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import interop.account  # noqa: F401  registers the conversions that the tables name
from interop.foreign_config import ForeignConfig, Outcome, foreign_value, outcome_of
from interop.table import NOT_SET, TRAINERS, Row, Table, load

_TITLES = {"mindspeed-rl": "MindSpeed-RL", "mindspeed-mm": "MindSpeed-MM"}
_NEED_BOTH = {
    "trainer.n_gpus_per_node": "trainer.nnodes",
    "trainer.nnodes": "trainer.n_gpus_per_node",
}


def instead_of(typed: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, str]:
    """Return, for each key of verl or MindSpeed, what to write instead; other keys are left out.

    `typed` holds unknown keys with their values, possibly whole sections. `ours` holds the values
    of our keys, which conversions need: 10 training steps of warmup become 10 x train_prompts /
    mini_prompts optimizer steps.
    """
    found: dict[str, str] = {}
    for trainer in TRAINERS:
        table = load(trainer)
        flat = {name: value for name, value in _flat(typed, table).items() if name not in found}
        rows = {name: row for name in flat if (row := _row(table, name)) is not None}
        if not rows:
            continue
        given = {row.key: flat[name] for name, row in rows.items()}
        devices = {"trainer.n_gpus_per_node": ours.get("train.num_ranks"), "trainer.nnodes": 1}
        known = [
            devices | _their_values(table, ours, with_constants=each) | given
            for each in (False, True)
        ]
        for name, row in rows.items():
            is_alone = row.key in _NEED_BOTH and _NEED_BOTH[row.key] not in given
            here = f"here {_keys(row)}" if is_alone else _here(table, row, name, flat[name], known)
            found[name] = f"unknown key {name} is {_TITLES.get(trainer, trainer)}'s; {here}"
    return found


def key_of(name: str) -> str | None:
    """Return a sentence on our equivalent of another trainer's key; None for an unknown key."""
    for trainer in TRAINERS:
        row = _row(load(trainer), name)
        if row is not None:
            whose = _TITLES.get(trainer, trainer)
            return (
                f"{name} is {whose}'s; here {_keys(row)}"
                if row.ours
                else f"{name} is {whose}'s: {row.reason}"
            )
    return None


def _row(table: Table, name: str) -> Row | None:
    row = table.resolve(name.lstrip("+~"), table.newest)
    return None if row is not None and row.key.startswith("*") else row


def _flat(typed: Mapping[str, Any], table: Table, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in typed.items():
        row = table.find(f"{prefix}{name}")
        if isinstance(value, Mapping) and value and (row is None or row.is_family):
            flat |= _flat(value, table, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _their_values(table: Table, ours: Mapping[str, Any], with_constants: bool) -> dict[str, Any]:
    """Return their values for our keys, skipping unsound ones; optionally also the constants of the
    table.
    """
    known = {}
    for row in table.rows:
        if row.export is not NOT_SET and not with_constants:
            continue
        try:
            value = foreign_value(row, ours)
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            continue
        if value is not NOT_SET:
            known[row.key] = value
    return known


def _here(table: Table, row: Row, name: str, value: Any, known: list[dict[str, Any]]) -> str:
    held = table.versions_of(name.lstrip("+~"))
    version = next((each for each in reversed(held) if each not in row.ignored), table.newest)
    outcomes = [
        outcome_of(row, name.lstrip("+~"), value, ForeignConfig(table, version, each))
        for each in known
    ]
    outcome = next((each for each in outcomes if each.fate == "taken"), outcomes[0])
    return _sentence(row, outcome)


def _keys(row: Row) -> str:
    return ": ".join(each for each in (", ".join(row.ours), row.change or row.reason) if each)


def _sentence(row: Row, outcome: Outcome) -> str:
    match outcome.fate:
        case "taken":
            keys = ", ".join(f"{name}={_spelt(value)}" for name, value in outcome.ours.items())
            return ": ".join(each for each in (f"here {keys}", outcome.note) if each)
        case "unsupported":
            return f"this value is not supported here: {outcome.note}"
        case "ignored-by-trainer":
            return f"no version reads it: {outcome.note}"
        case "other-stage":
            return f"here another stage handles it: {outcome.note}"
        case _:
            instead = f"; its key is {' or '.join(row.ours)}" if row.ours else ""
            return f"not needed here{instead}: {outcome.note}"


def _spelt(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
