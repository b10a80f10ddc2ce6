"""Start any trainer that a recipe can name: command, environment and rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from interop import ForeignConfigError
from interop.render import mindspeed, verl
from interop.render.launch import Launch, Places

COLUMNS = ("data_source", "prompt", "ability", "reward_model", "extra_info")


def render(
    trainer: str, tree: Mapping[str, Any], places: Places, version: str | None = None
) -> Launch:
    """Render the start of a trainer for a resolved recipe; raises ForeignConfigError for
    unsupported keys.
    """
    if trainer == "verl":
        return verl.render(tree, places, version)
    return mindspeed.render(tree, places, version)


def environment(trainer: str, tree: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment of a trainer's process, without external.env."""
    return verl.environment(tree) if trainer == "verl" else mindspeed.environment(tree, trainer)


def own_overrides(
    trainer: str, tree: Mapping[str, Any], places: Places, version: str | None = None
) -> tuple[str, ...]:
    """Return the overrides that come from the recipe's own keys, without external.overrides."""
    if trainer == "verl":
        external = {**tree["external"], "overrides": []}
        own = verl.render({**tree, "external": external}, places, version).overrides
        return tuple(
            each for each in own if "recompute_" not in each
        )  # the user decides how much to recompute
    return mindspeed.render(tree, places, version).overrides


def write_rows(prepared: Path, path: Path) -> int:
    """Write a prepared file's rows with only verl's columns; returns the number of rows.

    verl draws rows uniformly, we draw sets by weight. With several sets, rows are repeated until
    each set's share matches its weight; every row appears at least once.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if "images" in pq.read_schema(prepared).names:
        raise ForeignConfigError(
            f"{prepared} has pictures, which are not written for other trainers; set "
            "external.train_rows and external.held_out_rows to files in verl's own schema"
        )
    shares = pq.read_table(prepared, columns=["dataset", "weight"])
    table = pq.read_table(prepared, columns=list(COLUMNS)).take(
        pa.array(_numbers(shares.to_pydict()))
    )
    ability = table.column("ability").cast(pa.string()).fill_null("")
    table = table.set_column(COLUMNS.index("ability"), "ability", ability)
    pq.write_table(table, path)
    return int(table.num_rows)


def _numbers(shares: dict[str, list[Any]]) -> list[int]:
    """Return the indices of the rows to write; a set's rows repeat from its first row."""
    rows: dict[str, list[int]] = {}
    weights: dict[str, float] = {}
    for number, (name, weight) in enumerate(zip(shares["dataset"], shares["weight"], strict=True)):
        rows.setdefault(name, []).append(number)
        weights[name] = weight
    per_weight = max(len(rows[name]) / weights[name] for name in rows)
    return [
        rows[name][place % len(rows[name])]
        for name in rows
        for place in range(round(per_weight * weights[name]))
    ]
