"""`dapo runs` and `export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from flows.cli.options import GATE_EXIT_CODE, JsonOption, StoreOption
from flows.services import DEFAULT_STORE

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
NUM_LISTED = 20
NUM_PROMPTS = 4  # whose responses are shown
runs_app = typer.Typer(rich_markup_mode=None)
app.add_typer(runs_app, name="runs", short_help="List the runs in a store with their results.")

RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="Run id (or its start or end), run folder, latest, or latest~1."
    ),
]


@runs_app.callback(
    invoke_without_command=True, epilog="Example: dapo runs --limit 50; dapo runs show latest"
)
def runs(
    context: typer.Context,
    store: StoreOption = DEFAULT_STORE,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"Number of newest runs; default: {NUM_LISTED} in a table, all in JSON."
        ),
    ] = None,
    is_json: JsonOption = False,
) -> None:
    """List the runs in a store, newest first, with state, cached stages and result."""
    from flows.tables import print_json, print_runs
    from tasks.runs.history import describe_run, read_runs, require_store, short_ids

    if context.invoked_subcommand is not None:
        return
    require_store(store)
    recorded = list(read_runs(store))
    if is_json:
        print_json([describe_run(run) for run in recorded[:limit]])
        return
    if not recorded:
        typer.echo(f"no runs in {store}")
        return
    shown = recorded[: limit or NUM_LISTED]
    print_runs(shown, short_ids(store))
    if len(recorded) > len(shown):
        typer.echo(f"{len(recorded) - len(shown)} older runs: --limit {len(recorded)}")


@runs_app.command(
    "show",
    epilog="Example: dapo runs show latest; dapo runs show latest --rollouts --step 20",
    short_help="Show everything about one run.",
)
def show(
    run: RunArgument,
    store: StoreOption = DEFAULT_STORE,
    has_rollouts: Annotated[
        bool, typer.Option("--rollouts", help="Show responses that its training saved instead.")
    ] = False,
    step: Annotated[
        int | None, typer.Option(min=1, help="For --rollouts: a training step; default: the last.")
    ] = None,
    is_json: JsonOption = False,
) -> None:
    """Show everything about one run: stages, outputs, result, and configuration changes."""
    from flows.tables import print_json, print_run, print_sample
    from tasks.artifacts.artifact import StoreError
    from tasks.runs.history import changed_keys, describe_run, find_run, read_report, run_before
    from tasks.runs.rollouts import read_sample

    if step is not None and not has_rollouts:
        raise typer.BadParameter("needs --rollouts", param_hint="--step")
    found = find_run(store, run)
    if has_rollouts:
        sample = read_sample(found, step, NUM_PROMPTS)
        print_json(sample.shown) if is_json else print_sample(sample)
        return
    before = run_before(found)
    try:
        changes = changed_keys(before, found) if before else []
    except StoreError as error:
        typer.echo(f"skipped: {error}", err=True)
        changes = None
    report = read_report(found)
    if is_json:
        print_json(
            {
                **describe_run(found),
                "verdict": report and report["verdict"],
                "run_before": before and before.id,
                "changes": changes if changes is None else [vars(change) for change in changes],
            }
        )
        return
    print_run(found, before, changes, report)


@runs_app.command(
    epilog="Example: dapo runs accept latest --reference 84.2",
    short_help="Fill in the acceptance form of a run from its records.",
)
def accept(
    run: RunArgument,
    reference: Annotated[
        str | None,
        typer.Option(
            help="Accuracy to compare with: in percent, or a run or results folder of dapo eval."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Markdown file; default: acceptance.md in the run's folder.")
    ] = None,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Fill in the form by which recipes on a device are accepted, with a verdict per line.

    Reward over 100 steps, engine against policy, step time, throughput, MFU, memory against the
    plan, evaluation against a reference, versions, environment, topology, commit. What the run did
    not record stays `not recorded`; dapo run --accept records all of it. Exit status: 0 accepted; 3
    a line is not met or not recorded.
    """
    from durable import write_atomically
    from flows.config import load_config
    from flows.tables import print_acceptance
    from tasks.runs.accept import acceptance, is_accepted, records_of, to_markdown
    from tasks.runs.history import CONFIG_FILE, find_run

    found = find_run(store, run)
    records = records_of(found, load_config(found.folder / CONFIG_FILE), reference)
    lines = acceptance(records)
    path = output or found.folder / "acceptance.md"
    write_atomically(path, to_markdown(records, lines))
    print_acceptance(records.title, lines)
    typer.echo(f"form to attach: {path}")
    if not is_accepted(lines):
        raise typer.Exit(GATE_EXIT_CODE)


@runs_app.command(
    epilog="Example: dapo runs gc --keep-runs 10 --dry-run",
    short_help="Remove artifacts that no kept run uses.",
)
def gc(
    keep_runs: Annotated[
        int, typer.Option(min=1, help="Keep all artifacts of this many newest runs with a report.")
    ],
    store: StoreOption = DEFAULT_STORE,
    is_dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be removed.")
    ] = False,
    has_unfinished: Annotated[
        bool,
        typer.Option(
            "--unfinished", help="Also remove unfinished attempts that have been idle for a day."
        ),
    ] = False,
    has_damaged: Annotated[
        bool, typer.Option("--damaged", help="Also remove damaged and half-written outputs.")
    ] = False,
) -> None:
    """Remove artifacts that no kept run uses. Records and reports of all runs are kept.

    Artifacts stay if a run newer than the oldest kept one, a run in progress, or a run of the last
    day without a report uses them, or if they are being built or younger than an hour. Waits for
    exports and for runs that are recording a stage.
    """
    from flows.tables import print_garbage
    from tasks.runs.collect_garbage import collect_garbage
    from tasks.runs.history import short_ids

    found = collect_garbage(
        store,
        keep_runs,
        has_unfinished=has_unfinished,
        has_damaged=has_damaged,
        is_dry_run=is_dry_run,
    )
    print_garbage(found, is_dry_run, short_ids(store))


ExportFormat = Literal["model", "inspect"]


@app.command(
    epilog="Example: dapo export latest model; dapo export before log.json --format inspect",
    short_help="Export a run's model and report, or an evaluation's log.",
)
def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="A run as in dapo runs show, or a results folder of dapo eval."
        ),
    ],
    destination: Annotated[
        Path, typer.Argument(metavar="DEST", help="New folder; for inspect, a file.")
    ],
    form: Annotated[
        ExportFormat,
        typer.Option(
            "--format",
            help="model: a run's merged model, report, manifests and configuration, with a model "
            "card. inspect: the evaluation as a log of inspect_ai.",
        ),
    ] = "model",
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Copy a run's model and report into one folder, or write an evaluation as another's log.

    For inspect, a run stands for its evaluation after training; dapo grade --output imports the
    log.
    """
    if form != "model":
        from eval.logs.exported import export_logs
        from tasks.runs.history import find_evaluation

        results, _ = find_evaluation(store, source)
        for path in export_logs(results, destination):
            typer.echo(path)
        return
    from flows.progress import bytes_progress
    from tasks.runs.export_run import export_run
    from tasks.runs.history import find_run

    if Path(source).is_dir():
        raise typer.BadParameter(
            f"{source} is a folder, and only a run has a model; for an evaluation's log, add "
            "--format inspect",
            param_hint="SOURCE",
        )
    found = find_run(store, source, "report")
    with bytes_progress("export") as on_progress:
        num_bytes = export_run(found, destination, on_progress)
    typer.echo(
        f"{destination}: model of run {found.id}, {num_bytes:,} bytes, every file's digest verified"
    )
