"""Arguments and options shared by several commands."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

ConfigArgument = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="Recipe, such as configs/arith_cpu.yaml.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
SmokeOption = Annotated[
    bool,
    typer.Option(
        "--smoke", help="Also start the recipe's engines and sample responses from them (minutes)."
    ),
]
StoreOption = Annotated[Path, typer.Option(help="Artifact store.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Change a key; repeatable. Values are YAML, for text keys the text as typed.",
    ),
]
GateOption = Annotated[
    list[str] | None,
    typer.Option(
        "--gate",
        help="Condition, such as 'math500 >= before - 1'; repeatable. Exit status 3 if not met.",
    ),
]
BaselineOption = Annotated[
    list[str] | None,
    typer.Option(
        "--baseline", metavar="NAME=FOLDER", help="Results folder of another model; repeatable."
    ),
]
GATE_EXIT_CODE = 3  # everything ran, but a gate failed


def exit_by_gates(report: Mapping[str, Any]) -> None:
    """Exit with status 3 if a gate of the report failed."""
    if report["is_failed"]:
        raise typer.Exit(GATE_EXIT_CODE)


def read_baselines(given: list[str] | None) -> dict[str, Path]:
    """Parse --baseline into {name: folder}."""
    pairs = [text.partition("=") for text in given or ()]
    if wrong := ["".join(pair) for pair in pairs if not (pair[0] and pair[2])]:
        raise typer.BadParameter(f"{wrong[0]!r} is not NAME=FOLDER", param_hint="--baseline")
    return {name: Path(folder) for name, _, folder in pairs}
