"""`dapo import-config`: convert other trainers' files to recipes."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli.options import JsonOption

if TYPE_CHECKING:
    from interop.account import Account, Entry
    from interop.read import Reading
    from interop.recipe import Recipe

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

FilesArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILE...",
        help="Bash scripts or YAML; run.sh#2: its second training.",
    ),
]
OutputOption = Annotated[
    Path | None, typer.Option(help="Recipe to write; default: only show the account.")
]
EnvOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="A value known only on the script's machine; repeatable. "
        "num_train_rows=N: training rows.",
    ),
]
AllowOption = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY", help="Import without this key of theirs; repeatable."),
]
VersionOption = Annotated[
    str | None,
    typer.Option("--trainer-version", help="Version of their trainer; default: the newest fit."),
]
TinyOption = Annotated[
    bool,
    typer.Option("--tiny", help="Two steps of two prompts on a CPU, to try the algorithm now."),
]


@app.command(
    "import-config",
    epilog="Example: dapo import-config run.sh --set-env num_train_rows=17917 --output mine.yaml; "
    "dapo import-config run.sh --tiny --output try.yaml",
    short_help="Make a recipe from another trainer's script or YAML.",
)
def import_config(
    files: FilesArgument,
    output: OutputOption = None,
    set_env: EnvOption = None,
    allow: AllowOption = None,
    version: VersionOption = None,
    tiny: TinyOption = False,
    as_json: JsonOption = False,
) -> None:
    """Account for every key of another trainer's configuration, and write an equivalent recipe.

    Scripts are read, never executed. If keys stop the import that are not in --allow, nothing is
    written and the exit status is 1.
    """
    from dapo_core.errors import ConfigError
    from flows.tables import print_account
    from tasks.recipes.migration import account_of_files, default_keys, recipe_from, write_recipe

    if output is not None and output.exists():
        raise ConfigError(f"{output} exists; name another file, or remove it")
    reading, account = account_of_files(files, _pairs(set_env), version, is_tiny=tiny)
    recipe = recipe_from(account, is_tiny=tiny)
    blocking = account.blocking(allow or ())
    if as_json:
        typer.echo(json.dumps(_as_json(account, reading, recipe, blocking), indent=2, default=str))
    else:
        print_account(account, reading.notes, default_keys())
    if blocking:
        typer.secho(_blocking_message(blocking), err=True, fg="red")
        raise typer.Exit(1)
    _require_loadable(recipe, (output or files[0]).stem)
    if output is not None:
        named = ", ".join(path.name for path in files)
        write_recipe(
            recipe, output, [f"From {named} ({account.trainer} {account.version}).", *reading.notes]
        )
        typed = shlex.quote(str(output))
        typer.secho(f"wrote {output}; next: dapo plan {typed}, then dapo run {typed}", err=as_json)


def _pairs(given: list[str] | None) -> dict[str, str]:
    """Parse --set-env into {name: value}; a name in $( ) may contain `=`."""
    pairs = {}
    for text in given or ():
        start = text.rfind(")") if text.startswith(("$(", "`", "[")) and ")=" in text else 0
        at = text.find("=", start)
        if at <= 0:
            raise typer.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--set-env")
        pairs[text[:at]] = text[at + 1 :]
    return pairs


def _require_loadable(recipe: Recipe, name: str) -> None:
    """Raise ConfigError for invalid values, with the settings that the keys come from."""
    from dapo_core.errors import ConfigError
    from flows.config import resolve_config

    try:
        resolve_config({"run": {"name": name}, **recipe.tree})
    except ConfigError as error:
        named = [
            key
            for key in recipe.values
            if re.search(rf"(?<![\w.]){re.escape(key)}(?!\.?[a-z_])", str(error))
        ]
        origins = [f"  {key}: {recipe.comments[key]}" for key in named if recipe.comments.get(key)]
        raise ConfigError("\n".join([str(error), *origins])) from None


def _blocking_message(blocking: list[Entry]) -> str:
    keys = list(dict.fromkeys(entry.setting.key for entry in blocking))
    allowing = " ".join(f"--allow {key}" for key in keys)
    lines = [f"{len(keys)} key{'s' * (len(keys) > 1)} stop{'s' * (len(keys) == 1)} the import:"]
    lines += [
        f"  {entry.setting.origin} {entry.setting.key}: {entry.fate}; {entry.note}"
        for entry in blocking
    ]
    lines.append(f"to import without them: {allowing}")
    if any("num_train_rows" in entry.note for entry in blocking):
        lines.append(
            "to convert epochs to steps: --set-env num_train_rows=N, the rows of data.train_files"
        )
    return "\n".join(lines)


def _as_json(
    account: Account, reading: Reading, recipe: Recipe, blocking: list[Entry]
) -> dict[str, Any]:
    from interop.recipe import counts_of

    def of(entry: Entry) -> dict[str, Any]:
        return {
            **entry.setting._asdict(),
            "fate": entry.fate,
            "ours": entry.ours,
            "note": entry.note,
        }

    return {
        "trainer": account.trainer,
        "version": account.version,
        "notes": reading.notes,
        "environment": reading.environment,
        "counts": {"keys": len(account.entries), **counts_of(account)},
        "entries": [of(entry) for entry in account.entries],
        "implied": [of(entry) for entry in account.implied],
        "blocking": [entry.setting.key for entry in blocking],
        "recipe": recipe.tree,
    }
