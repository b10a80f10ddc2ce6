"""`dapo cluster render`: files that start Ray on a cluster, for sites with their own launcher."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.options import SetOption

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@app.command(
    epilog="Example: dapo cluster render mine.yaml --scripts --output start; dapo cluster render mine.yaml "
    "--slurm --config configs/dapo_qwen3_32b_math.yaml --site partition=npu --output job; dapo "
    "cluster "
    "render mine.yaml --kuberay --output pods",
    short_help="Write scripts, a SLURM job or KubeRay YAML that start Ray.",
)
def render(
    inventory: Annotated[
        Path | None,
        typer.Argument(metavar="INVENTORY", help="Machines; default: those of this allocation."),
    ] = None,
    is_scripts: Annotated[
        bool, typer.Option("--scripts", help="A start and stop script per node.")
    ] = False,
    is_slurm: Annotated[
        bool,
        typer.Option(
            "--slurm", help="A batch file that starts Ray and runs --config in an allocation."
        ),
    ] = False,
    is_kuberay: Annotated[
        bool,
        typer.Option(
            "--kuberay", help="A RayCluster, or with --config a RayJob that runs the recipe."
        ),
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", metavar="RECIPE", help="Recipe to run; also sets the environment."
        ),
    ] = None,
    overrides: SetOption = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the files; default: standard output.")
    ] = None,
    site: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="With --slurm: an sbatch option, such as partition=npu. With --kuberay: image, claim (for the "
            "store's volume), queue (Volcano starts all pods or none), cpu or memory (per pod). "
            "Repeatable.",
        ),
    ] = None,
) -> None:
    """Write files that start Ray on the nodes of an inventory and, with --slurm or --kuberay, run a
    recipe.

    Interfaces, variables and resources match `dapo cluster up` and `dapo doctor env`. Nothing is
    started.
    """
    from flows.config import load_config, load_config_or_defaults
    from tasks.nodes.rendering import render as forms
    from tasks.nodes.scheduler import machines_of

    if is_scripts + is_slurm + is_kuberay != 1:
        raise typer.BadParameter("choose one of --scripts, --slurm and --kuberay")
    if is_slurm and config is None:
        raise typer.BadParameter("--slurm needs a recipe", param_hint="--config")
    if is_scripts and site:
        raise typer.BadParameter("needs --slurm or --kuberay", param_hint="--site")
    machines, source = machines_of(inventory, os.environ)
    changes = ["train.ray_address=auto", *(overrides or ())]
    if config is None:
        changes.insert(0, f"train.device={machines.device}")
    settings = (
        load_config_or_defaults(None, changes) if config is None else load_config(config, changes)
    )
    place = forms.Site(source or "an allocation", tuple(site or ()))
    path = _in_project(config) if config is not None and is_slurm else config
    recipe = None if path is None else forms.Recipe(str(path), tuple(overrides or ()))
    if is_scripts:
        files = forms.render_scripts(machines, settings, place, recipe)
    elif is_slurm and recipe is not None:
        files = forms.render_slurm(machines, settings, place, recipe)
    else:
        files = forms.render_kuberay(machines, settings, place, recipe, settings.flow.stop_seconds)
    remarks = forms.remarks_of_env(machines)
    if is_kuberay:
        remarks += forms.remarks_of_kuberay(machines, settings if config else None)
    if is_scripts and output is not None:
        remarks += place.remarks_of_stale_scripts(output, files)
    _write_files(files, remarks, output)


def _write_files(files: Mapping[str, str], remarks: Iterable[str], output: Path | None) -> None:
    for remark in remarks:
        typer.secho(remark, err=True, fg="yellow")
    for name, text in files.items():
        if output is None:
            typer.echo(text, nl=False)
        else:
            _write(output / name, text)


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)  # it holds environment values
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(
            f"cannot write {path}: {error.strerror}", param_hint="--output"
        ) from None
    typer.echo(f"wrote {path}")


def _in_project(path: Path) -> Path:
    """Return a recipe's path relative to the project folder, where a job starts."""
    from tasks.nodes.inventory import PROJECT

    whole = path.resolve()
    return whole.relative_to(PROJECT) if whole.is_relative_to(PROJECT) else whole
