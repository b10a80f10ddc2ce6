"""Arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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
