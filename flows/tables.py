"""Tables that the command line prints."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from dapo_core.config.derived import Derived
    from tasks.plan import PlannedStage

SHORT_KEY = 16
WIDTH = 200  # where no terminal says how wide it is


def print_plan(stages: Sequence[PlannedStage]) -> None:
    """The chain with each stage's key and state."""
    table = Table("stage", "state", "key", "built in (s)")
    for stage in stages:
        table.add_row(
            stage.label,
            stage.state,
            stage.key[:SHORT_KEY] if stage.key else f"known after {stage.waits_for}",
            f"{stage.seconds:.1f}" if stage.seconds is not None else "",
        )
    Console(width=_width()).print(table)


def print_runs(records: Sequence[dict[str, Any]]) -> None:
    """Runs with what they cost and what they showed; accuracies in percent, differences in points."""
    table = Table("run", "name", "started", "seconds", "cached", "before (%)", "after (%)", "difference", "p", "n")
    for record in records:
        report = record.get("report")
        cached = sum(stage["cached"] for stage in record["stages"].values())
        table.add_row(
            record["id"],
            record["name"],
            f"{datetime.datetime.fromtimestamp(record['started_at']):%Y-%m-%d %H:%M}",
            f"{record['seconds']:.0f}",
            f"{cached}/{len(record['stages'])}",
            *(_result(report) if report else ["", "", "unfinished", "", ""]),
        )
    Console(width=_width()).print(table)


def print_derived(derived: Derived) -> None:
    """What a configuration means in numbers, to standard error: standard output holds the configuration itself."""
    table = Table("of", "", "unit", "from", title="What follows from it", title_justify="left")
    table.columns[1].justify = "right"
    for what, number, unit, formula in derived.rows():
        table.add_row(what, f"{number:,}", unit, formula)
    is_terminal = Console(stderr=True).is_terminal
    Console(stderr=True, width=None if is_terminal else WIDTH).print(table)


def _result(report: dict[str, Any]) -> list[str]:
    return [
        f"{100 * report['before']:.1f}",
        f"{100 * report['after']:.1f}",
        f"{100 * report['difference']:+.1f}",
        f"{report['p']:.2g}",
        str(report["n"]),
    ]


def _width() -> int | None:
    """Wide enough for whole paths where no terminal bounds the line."""
    return None if Console().is_terminal else WIDTH
