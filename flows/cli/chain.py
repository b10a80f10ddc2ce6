"""`dapo run`, `plan`, `runs`, `config show`: the whole chain, and a look at it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.options import ConfigArgument, SetOption

if TYPE_CHECKING:
    from dapo_core.config import Config

logger = logging.getLogger(__name__)

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
config_app = typer.Typer(help="Look at configurations.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(config_app, name="config")


@app.command(epilog="Example: dapo run configs/arith_cpu.yaml --set run.seed=2")
def run(config: ConfigArgument, overrides: SetOption = None) -> None:
    """Run the whole chain as the Prefect flow dapo-full and print the report."""
    from dapo_core.config import load_config
    from flows.console import print_chain, print_markdown
    from flows.prefect_settings import apply_prefect_settings
    from tasks.run import check_start

    settings = load_config(config, overrides or ())
    check_start(settings)
    apply_prefect_settings()
    print_chain()
    logger.info("starting Prefect")
    from flows.prefect_server import provide_prefect_api

    wait_for_api = provide_prefect_api(Path(settings.store.path))
    from flows.dapo_full import dapo_full

    _use_the_wait(settings)
    wait_for_api()
    result = dapo_full(str(config), tuple(overrides or ()))
    report = Path(result["run"]) / "report"
    print_markdown((report / "report.md").read_text(encoding="utf-8"))
    typer.secho(f"\n{result['verdict']}\nReport with plots: {report / 'report.html'}", bold=True)


def _use_the_wait(settings: Config) -> None:
    """Do while Prefect starts what would cost time after that: read the stages' code, import what draws."""
    import matplotlib.backends.backend_agg  # noqa: F401

    from tasks.stages import CHAIN

    for link in CHAIN:
        link.stage.key(settings, {})  # each source file is parsed once in a process


@app.command(epilog="Example: dapo plan configs/arith_cpu.yaml")
def plan(config: ConfigArgument, overrides: SetOption = None) -> None:
    """Show each stage with its key and whether it is cached, without running anything."""
    from dapo_core.config import load_config
    from flows.tables import print_plan
    from tasks.plan import plan_chain
    from tasks.run import check_inputs

    settings = load_config(config, overrides or ())
    check_inputs(settings)
    print_plan(plan_chain(settings))


@app.command(epilog="Example: dapo runs --store .dapo")
def runs(store: Annotated[Path, typer.Option(help="Artifact store.")] = Path(".dapo")) -> None:
    """List the runs of a store, newest first, with their accuracies."""
    from flows.tables import print_runs
    from tasks.run import read_runs

    print_runs(list(read_runs(store)))


@config_app.command("show", epilog="Example: dapo config show configs/arith_cpu.yaml --set run.seed=2 > mine.yaml")
def config_show(config: ConfigArgument, overrides: SetOption = None) -> None:
    """Print the resolved configuration, defaults < file < --set, as YAML that can be a recipe again.

    On standard error follows what it means in numbers: prompts, responses and tokens of a training step,
    optimizer steps, tokens on a device, devices. Without it: 2> /dev/null.
    """
    from dapo_core.config import dump_config, load_config
    from dapo_core.config.derived import derive
    from flows.tables import print_derived

    settings = load_config(config, overrides or ())
    typer.echo(dump_config(settings), nl=False)
    print_derived(derive(settings))
