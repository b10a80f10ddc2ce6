"""The start of any trainer that a recipe can name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from interop.render import mindspeed, verl
from interop.render.launch import Launch, Places

COLUMNS = ("data_source", "prompt", "ability", "reward_model", "extra_info")


def render(trainer: str, tree: Mapping[str, Any], places: Places, version: str | None = None) -> Launch:
    """How a trainer is started for a resolved recipe. Raises ForeignConfigError for what it cannot do."""
    if trainer == "verl":
        return verl.render(tree, places, version)
    return mindspeed.render(tree, places, version, trainer)


def environment(trainer: str, tree: Mapping[str, Any]) -> dict[str, str]:
    """What a trainer's process gets beside external.env, for a resolved recipe."""
    return verl.environment(tree) if trainer == "verl" else mindspeed.environment(tree, trainer)


def own_overrides(
    trainer: str, tree: Mapping[str, Any], places: Places, version: str | None = None
) -> tuple[str, ...]:
    """What the recipe's own keys say to a trainer, without external.overrides."""
    if trainer == "verl":
        external = {**tree["external"], "overrides": []}
        own = verl.render({**tree, "external": external}, places, version).overrides
        return tuple(each for each in own if "recompute_" not in each)  # how much of it is the user's to say
    return mindspeed.render(tree, places, version, trainer).overrides


def write_rows(prepared: Path, path: Path) -> int:
    """Write the rows of a prepared file with verl's columns alone; returns their number.

    verl draws rows alike, and ours sets by weight: with several sets, each is repeated until its share of the rows
    is that of its weight, so that each row is there at least once.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    shares = pq.read_table(prepared, columns=["dataset", "weight"])
    table = pq.read_table(prepared, columns=list(COLUMNS)).take(pa.array(_numbers(shares.to_pydict())))
    ability = table.column("ability").cast(pa.string()).fill_null("")
    table = table.set_column(COLUMNS.index("ability"), "ability", ability)
    pq.write_table(table, path)
    return int(table.num_rows)


def _numbers(shares: dict[str, list[Any]]) -> list[int]:
    """Numbers of the rows to write, those of a set repeated from its first row on."""
    rows: dict[str, list[int]] = {}
    weights: dict[str, float] = {}
    for number, (name, weight) in enumerate(zip(shares["dataset"], shares["weight"], strict=True)):
        rows.setdefault(name, []).append(number)
        weights[name] = weight
    per_weight = max(len(rows[name]) / weights[name] for name in rows)
    return [
        rows[name][place % len(rows[name])] for name in rows for place in range(round(per_weight * weights[name]))
    ]
