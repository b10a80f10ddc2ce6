"""Prepared prompts as the parquet that verl and MindSpeed's verl-like loaders read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLUMNS = ("data_source", "prompt", "ability", "reward_model", "extra_info")


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
