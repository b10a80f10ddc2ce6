"""`dapo import-config`, `export-config`: recipes of ours from other trainers' files, and the other way."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flows.cli.options import ConfigArgument, JsonOption, SetOption

if TYPE_CHECKING:
    from interop.account import Account, Entry
    from interop.read import Reading
    from interop.recipe import Recipe

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
SCRIPT = "run.sh"


Trainer = Literal["verl", "mindspeed-rl", "mindspeed-mm"]


@app.command(
    "import-config",
    epilog="Example: dapo import-config run.sh --set-env num_train_rows=17917 --output mine.yaml; "
    "dapo import-config run.sh --tiny --output try.yaml",
    short_help="Make a recipe from another trainer's script or YAML.",
)
def import_config(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...", help="Bash scripts, YAML, or overrides, one a line; run.sh#2: its second training."
        ),
    ],
    output: Annotated[Path | None, typer.Option(help="The recipe to write; default: only the account.")] = None,
    set_env: Annotated[
        list[str] | None,
        typer.Option(
            "--set-env",
            metavar="NAME=VALUE",
            help="What only the script's machine knows; repeatable. num_train_rows=N: rows of data.train_files.",
        ),
    ] = None,
    allow: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="Go on without a key of theirs; repeatable.")
    ] = None,
    backend: Annotated[
        Literal["own", "verl", "mindspeed-rl", "mindspeed-mm"],
        typer.Option(help="Who trains; another trainer keeps the keys that our core lacks."),
    ] = "own",
    version: Annotated[
        str | None,
        typer.Option("--trainer-version", help="Version of their trainer; default: the newest it fits."),
    ] = None,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Same algorithm, two steps of two prompts on a CPU, to try at once.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Say what becomes of every key of another trainer's configuration, and write our recipe of it.

    A script is read, never run. Exit status 1, and no file, while --allow lacks keys that stop the import.
    """
    from dapo_core.errors import ConfigError
    from flows.tables import print_account
    from tasks.importing import account_of_files, default_keys, recipe_from, write_recipe

    if output is not None and output.exists():
        raise ConfigError(f"{output} exists; name another file, or remove it")
    reading, account = account_of_files(files, _pairs(set_env), version, is_tiny=tiny)
    recipe = recipe_from(account, backend, reading.environment, is_tiny=tiny)
    blocking = [entry for entry in account.blocking(allow or ()) if entry in recipe.left]
    if as_json:
        typer.echo(json.dumps(_as_json(account, reading, recipe, blocking), indent=2, default=str))
    else:
        print_account(account, reading.notes, default_keys())
    if blocking:
        typer.secho(_how_to_go_on(blocking, backend, account.trainer), err=True, fg="red")
        raise typer.Exit(1)
    _require_loadable(recipe, (output or files[0]).stem)
    if output is not None:
        named = ", ".join(path.name for path in files)
        write_recipe(recipe, output, [f"From {named} ({account.trainer} {account.version}).", *reading.notes])
        typed = shlex.quote(str(output))
        typer.secho(f"wrote {output}; next: dapo plan {typed}, then dapo run {typed}", err=as_json)


def _pairs(given: list[str] | None) -> dict[str, str]:
    """{name: value} of --set-env; a name in $( ) may hold `=`."""
    pairs = {}
    for text in given or ():
        start = text.rfind(")") if text.startswith(("$(", "`", "[")) and ")=" in text else 0
        at = text.find("=", start)
        if at <= 0:
            raise typer.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--set-env")
        pairs[text[:at]] = text[at + 1 :]
    return pairs


def _require_loadable(recipe: Recipe, name: str) -> None:
    """Raises ConfigError for what our keys rule out, with the settings that the named keys come from."""
    from dapo_core.errors import ConfigError
    from flows.config import resolve_config

    try:
        resolve_config({"run": {"name": name}, **recipe.tree})
    except ConfigError as error:
        named = [
            key for key in recipe.values if re.search(rf"(?<![\w.]){re.escape(key)}(?!\.?[a-z_])", str(error))
        ]
        origins = [f"  {key}: {recipe.comments[key]}" for key in named if recipe.comments.get(key)]
        raise ConfigError("\n".join([str(error), *origins])) from None


def _how_to_go_on(blocking: list[Entry], backend: str, trainer: str) -> str:
    keys = list(dict.fromkeys(entry.setting.key for entry in blocking))
    allowing = " ".join(f"--allow {key}" for key in keys)
    lines = [f"{len(keys)} key{'s' * (len(keys) > 1)} stop{'s' * (len(keys) == 1)} the import:"]
    lines += [f"  {entry.setting.origin} {entry.setting.key}: {entry.fate}; {entry.note}" for entry in blocking]
    lines.append(f"to go on without them: {allowing}")
    if any("num_train_rows" in entry.note for entry in blocking):
        lines.append("to count the steps of the epochs: --set-env num_train_rows=N, the rows of data.train_files")
    if backend == "own" and any(entry.fate == "unsupported" for entry in blocking):
        lines.append(f"to have {trainer} train, with these keys as they are: --backend {trainer}")
    return "\n".join(lines)


def _as_json(account: Account, reading: Reading, recipe: Recipe, blocking: list[Entry]) -> dict[str, Any]:
    from interop.recipe import counts_of

    def of(entry: Entry) -> dict[str, Any]:
        return {**entry.setting._asdict(), "fate": entry.fate, "ours": entry.ours, "note": entry.note}

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


@app.command(
    "export-config",
    epilog="Example: dapo export-config configs/dapo_qwen3_32b_math.yaml --for verl --output verl/qwen3_32b",
    short_help="Write a recipe as another trainer's script.",
)
def export_config(
    config: ConfigArgument,
    trainer: Annotated[Trainer, typer.Option("--for", help="The trainer to write for.")],
    output: Annotated[
        Path | None, typer.Option(help=f"Folder for {SCRIPT} and the files it names; default: print the script.")
    ] = None,
    version: Annotated[
        str | None,
        typer.Option("--trainer-version", help="Its version, such as 0.6.1; default: the newest known."),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Model folder in place of model.path or model.id; one of `fetch-model`.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Output of `prepare-data`, whose rows are written beside the script.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes of the devices; default: 8 devices a node, 16 of an Atlas A3.")
    ] = None,
    overrides: SetOption = None,
) -> None:
    """Write what starts another trainer with a recipe: overrides, environment, reward file, and rows if given.

    Keys of the recipe that the trainer has no word for are named, on standard error and in the script.
    """
    from flows.config import load_config
    from interop.render.launch import script_of
    from tasks.exporting import launch_of, unsaid_keys, write_launch

    settings = load_config(config, overrides or ())
    folder = (output or Path(f"{config.stem}-{trainer}")).absolute()
    launch = launch_of(trainer, settings, folder, version, model, nodes)
    lost = unsaid_keys(config, overrides or (), launch)
    comments = [f"{settings.run.name} of dapo-pipeline for {trainer}, not run with it."]
    if trainer != "verl":
        comments.append("Run it in its checkout. Places in <...> of the YAML are to be filled in.")
    if lost:
        comments.append(f"Without a word there: {', '.join(lost)}.")
    if output is None:
        comments += [f"{name} is written by --output." for name in launch.files]
    script = script_of(launch.argv, launch.env, comments)
    if output is not None:
        write_launch(launch, folder, {SCRIPT: script}, data)
    if output is None:
        typer.echo(script, nl=False)
    else:
        typer.echo(f"wrote {folder / SCRIPT}" + ("" if data else "; its rows: --data FOLDER of dapo prepare-data"))
    if lost:
        typer.secho(f"{trainer} has no word for {', '.join(lost)}", err=True, fg="yellow")
