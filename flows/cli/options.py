"""Arguments and options that several commands have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="Recipe, such as configs/arith_cpu.yaml.")]
JsonOption = Annotated[bool, typer.Option("--json", help="For programs: JSON on standard output.")]
SmokeOption = Annotated[
    bool, typer.Option("--smoke", help="Also start the recipe's engines and ask each for one response: a minute.")
]
StoreOption = Annotated[Path, typer.Option(help="Artifact store.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change a key; repeatable.")
]
GateOption = Annotated[
    list[str] | None,
    typer.Option(
        "--gate", help="What must hold, such as 'math500 >= before - 1'; repeatable. Exit status 3 if not."
    ),
]
BaselineOption = Annotated[
    list[str] | None,
    typer.Option("--baseline", metavar="NAME=FOLDER", help="Evaluation of a further model; repeatable."),
]
GATE_EXIT_CODE = 3  # all is done, and a gate failed


def exit_by_gates(report: Mapping[str, Any]) -> None:
    """End the command with status 3 if a gate of the report failed."""
    if report["is_failed"]:
        raise typer.Exit(GATE_EXIT_CODE)


def read_baselines(given: list[str] | None) -> dict[str, Path]:
    """{name: folder} of the option --baseline."""
    pairs = [text.partition("=") for text in given or ()]
    if wrong := ["".join(pair) for pair in pairs if not (pair[0] and pair[2])]:
        raise typer.BadParameter(f"{wrong[0]!r} is not NAME=FOLDER", param_hint="--baseline")
    return {name: Path(folder) for name, _, folder in pairs}
