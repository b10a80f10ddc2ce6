"""`dapo up`, `down` and `doctor`: the Prefect services of this machine, and checks."""

from __future__ import annotations

import glob
import importlib.util
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.options import JsonOption, SetOption, SmokeOption, StoreOption
from flows.services import (
    DEFAULT_STORE,
    Services,
    bring_up,
    read_deployments,
    store_option,
    take_down,
)
from heartbeat import heartbeat

NOTHING_SCHEDULED = (
    "nothing; for nightly runs name your recipe at dapo-nightly in prefect.yaml, set active: true "
    "there, and run dapo up again"
)

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

WordsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[env] [CONFIG]",
        help="A recipe: also check its model, data and devices. env: check variables instead, and "
        "show each one's effect, whether it is missing, unused or harmful.",
    ),
]
ExportOption = Annotated[
    bool,
    typer.Option("--export", help="With env: print shell lines that set the missing variables."),
]
FolderOption = Annotated[
    Path | None, typer.Option(help="Artifact store; default: the recipe's, else .dapo.")
]
WaitOption = Annotated[
    float, typer.Option(help="How long to wait for the next runs of schedules.", min=0)
]


@app.command(
    epilog="Example: dapo up --database postgresql+asyncpg://dapo@/dapo?host=/var/run/postgresql",
    short_help="Start a Prefect server and worker in the background.",
)
@heartbeat(lambda: "starting the services")
def up(
    database: Annotated[
        str | None,
        typer.Option(
            help="The server's database: postgresql+asyncpg://user@host/name, or sqlite for a file "
            "in the store (default). Put a URL with a password in the environment variable.",
            envvar=[
                "PREFECT_SERVER_DATABASE_CONNECTION_URL",
                "PREFECT_API_DATABASE_CONNECTION_URL",
            ],
            show_envvar=True,
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(help="Server port; default: 4200 if free, else any.", min=1, max=65535),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            help="Address to listen on; default: 127.0.0.1. For other machines, this machine's own "
            "address; 0.0.0.0 listens at all, and the UI calls the host name. Both need a password "
            "in PREFECT_API_AUTH_STRING."
        ),
    ] = None,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Start a Prefect server and a worker in the background, and register the deployments.

    Run this in the folder of prefect.yaml. Services that already run are left alone. If
    PREFECT_API_URL or your Prefect profile names a server, that one is used.
    """
    if importlib.util.find_spec("prefect") is None:  # before anything starts
        raise ModuleNotFoundError("No module named 'prefect'", name="prefect")
    project = Path.cwd()
    url = bring_up(store, project, host=host, port=port, database=database)
    services, page_url, export = Services(store), url.removesuffix("/api"), ""
    if services.is_own(url):
        page_url = services.server.read()["page_url"]
        is_found = not store_option(store)  # by Prefect's start-up plugin
        first = "Outside this directory, first" if is_found else "First"
        export = f"{first}: export PREFECT_API_URL={url}\n"
        if (named := f"{page_url}/api") != url:  # it listens at all addresses
            export += (
                f"Other machines: export PREFECT_API_URL={named}\n"
                f"                The UI calls {named} too. If they cannot resolve that name:\n"
                f"                {services.command('down')}, then "
                f"{services.command('up --host ADDRESS')} with this machine's address\n"
            )
    logs = [each.log for each in (services.server, services.worker) if each.is_running]
    typer.echo(
        f"Prefect UI:     {page_url}\n"
        f"Logs:           {' '.join(map(str, logs))}\n"
        f"{export}"
        "Run the chain:  prefect deployment run dapo-full\n"
        f"Scheduled:      {'; '.join(_schedules(project)) or NOTHING_SCHEDULED}\n"
        f"Stop:           {services.command('down')}"
    )


@app.command(
    epilog="Example: dapo down --cancel",
    short_help="Stop what `dapo up` started, and nothing else.",
)
def down(
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Cancel active flow runs instead of refusing.")
    ] = False,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Stop the worker and server that `dapo up` started; refuses while flow runs are active.

    A `dapo run` that uses the server counts too; --cancel does not end it, but Ctrl-C there does.
    """
    stopped = take_down(store, cancel)
    for each in stopped:
        typer.echo(f"stopped {each}")
    if not stopped:
        typer.echo(f"no services of {store} are running")


@app.command(
    epilog="Example: dapo doctor configs/mine.yaml; dapo doctor env configs/mine.yaml --export",
    short_help="Check packages, store, devices, Prefect, a recipe, variables.",
)
@heartbeat(lambda: "checking this machine")
def doctor(
    words: WordsArgument = None,
    overrides: SetOption = None,
    is_smoke: SmokeOption = False,
    is_export: ExportOption = False,
    is_json: JsonOption = False,
    store: FolderOption = None,
    wait_seconds: WaitOption = 90.0,
) -> None:
    """Check packages, store, devices, Prefect and a recipe; exit status 1 if a check fails.

    For a recipe: all quick checks before any stage, as in `dapo plan` and `dapo run`. With
    train.ray_address also every cluster node and every connection between two, as in `dapo run`:
    versions, devices, links, clocks, limits, disks, variables, files, ports, an all-reduce. This
    takes about ten seconds.
    """
    is_of_variables, named = bool(words and words[0] == "env"), list(words or ())
    named = named[1:] if is_of_variables else named
    if len(named) > 1:
        raise typer.BadParameter(f"give one recipe, not {', '.join(named)}", param_hint="CONFIG")
    config = Path(named[0]) if named else None
    if is_of_variables:
        _lint_variables(config, overrides or (), is_export, is_json)
        return
    if is_export:
        raise typer.BadParameter("needs `dapo doctor env`", param_hint="--export")
    from flows.prefect_settings import apply_prefect_settings

    apply_prefect_settings()
    logging.getLogger("tasks").setLevel(logging.WARNING)
    from flows.config import load_config
    from flows.doctor import FAIL, examine
    from flows.tables import print_findings, print_json
    from tasks.preflight.run import examine as examine_recipe
    from tasks.runs.signal import examine_stored_signal

    if config is None and (is_smoke or overrides):
        raise typer.BadParameter("--smoke and --set need a recipe", param_hint="CONFIG")
    settings = None if config is None else load_config(config, overrides or ())
    folder = store or (DEFAULT_STORE if settings is None else Path(settings.store.path))
    findings = list(examine(folder, Path.cwd(), wait_seconds))
    if settings is not None:
        findings += examine_recipe(settings, is_smoke, on_nodes=True)
        findings += examine_stored_signal(settings) if is_smoke else []
    if is_json:
        print_json([asdict(finding) for finding in findings])
    else:
        print_findings(findings)
    if any(finding.status == FAIL for finding in findings):
        raise typer.Exit(1)


def _lint_variables(
    config: Path | None, overrides: Sequence[str], is_export: bool, is_json: bool
) -> None:
    """Print how environment variables affect a recipe, or training on this machine's devices."""
    from flows.config import load_config_or_defaults
    from flows.tables import print_json, print_variables
    from tasks.nodes.on_node import DEVICE_FILES
    from tasks.preflight.environment import STATUSES, exports, lint
    from tasks.preflight.finding import FAIL
    from tasks.recipes.first_recipe import Machine

    device = [] if config is not None else [f"train.device={Machine.this().kind}"]
    settings = load_config_or_defaults(config, [*device, *overrides])
    is_node = bool(glob.glob(DEVICE_FILES.get(settings.train.device, "")))
    variables = lint(os.environ, settings, is_node)
    if is_json:
        print_json([{**asdict(each), "status": STATUSES[each.state]} for each in variables])
    elif is_export:
        typer.echo("\n".join(exports(variables)))
    else:
        print_variables(variables, settings.train.device)
    if any(STATUSES[each.state] == FAIL for each in variables):
        raise typer.Exit(1)


def _schedules(project: Path) -> list[str]:
    return [
        f"{deployment['name']} with {deployment['parameters']['config']}, "
        f"cron {schedule['cron']} {schedule.get('timezone', 'UTC')} (prefect.yaml)"
        for deployment in read_deployments(project)
        for schedule in deployment.get("schedules", ())
        if schedule.get("active", True)
    ]
