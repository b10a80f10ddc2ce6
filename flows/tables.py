"""Tables printed by the command line."""

from __future__ import annotations

import datetime
import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from dapo_core.draw.texts import shortened
from dapo_core.errors import counted
from dapo_core.memory.devices import GIB
from dapo_core.memory.plan import ADVICE, PHASES
from interop.table import BLOCKING
from tasks.artifacts.stage_key import SHORT_KEY_LENGTH
from tasks.data.sources import GENERATED
from tasks.preflight.environment import STATUSES, Variable, described

if TYPE_CHECKING:
    from dapo_core.config.derived import Quantity
    from dapo_core.memory.plan import Load, MemoryPlan
    from eval.problems.rows import ProblemSet
    from interop.account import Account
    from tasks.data.reading import SetCount, Shown
    from tasks.preflight.finding import Finding
    from tasks.runs.accept import Line
    from tasks.runs.collect_garbage import Unused
    from tasks.runs.history import Difference, RecordedRun
    from tasks.runs.plan import PlannedStage
    from tasks.runs.rollouts import Sample
    from tasks.runs.simulate import Simulation

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_STATUS_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}
WIDTH = 200  # without a terminal
SHOWN_CHARACTERS = 2000  # of a prompt or response
RUNS_WIDTH = 100  # for a list of runs, narrow enough to paste


def print_account(account: Account, notes: Sequence[str], defaults: Mapping[str, Any]) -> None:
    """Print every key of another trainer's configuration with its fate, blocking keys first.

    The trainer's defaults are shown only where they differ from `defaults`, our defaults by name.
    """
    from interop.recipe import blocking_first, changing, counts_of

    names = ("key", "value", "fate", "our key = value", "note")
    table = Table(*map(_folded, names), box=SIMPLE_HEAD)
    implied = changing(account.implied, defaults)
    styles = {"ignored-by-trainer": "yellow", **dict.fromkeys(BLOCKING, "red")}
    for entry in blocking_first((*account.entries, *implied)):
        ours = "\n".join(f"{name} = {value}" for name, value in entry.ours.items())
        key = f"{entry.setting.key}\n{entry.setting.origin}"
        cells = map(Text, (key, str(entry.setting.value), entry.fate, ours, entry.note))
        table.add_row(*cells, style=styles.get(entry.fate, ""))
    print_table(table)
    for note in notes:
        typer.echo(note)
    counts = ", ".join(f"{count} {fate}" for fate, count in counts_of(account).items())
    typer.echo(f"{account.trainer} {account.version}: {len(account.entries)} keys: {counts}")
    if same := len(account.implied) - len(implied):
        typer.echo(f"{same} unset keys have the same default here; --json lists them")


def print_plan(stages: Sequence[PlannedStage], is_whole: bool) -> None:
    """Print each stage's state, the reason for it, and its key."""
    table = Table("stage", "state", "why", "key", _right("built in\n(s)"))
    for stage in stages:
        why = Text(stage.why(None if is_whole else 1))
        missing = f"after {stage.waits_for or 'its commit is known'}"
        key = stage.key[:SHORT_KEY_LENGTH] if stage.key else missing
        seconds = "" if stage.seconds is None else f"{stage.seconds:.1f}"
        table.add_row(stage.label, stage.state, why, key, seconds)
    print_table(table)


def print_memory(plan: MemoryPlan) -> None:
    """Print device memory per phase, then caches, host memory and disk, and the keys to change."""
    for load in plan.loads:
        print_table(_load_table(plan, load))
    engine, disk = plan.engine, plan.disk
    held = "unknown, as is the device's memory"
    if engine.cache is not None:
        held = f"{engine.num_sequences:,}"
    lines = [
        f"model: {plan.num_parameters:,} parameters{_describe_tower(plan)}",
        f"KV cache: {engine.token_bytes:,} bytes per token on each device of an engine, "
        f"{engine.sequence_bytes / GIB:.2f} GiB for {plan.longest:,} tokens; such sequences that "
        f"an engine can hold: {held}; rollout.max_num_seqs={engine.most_sequences}",
        f"host memory for offloaded state and routing: at most {plan.host_bytes / GIB:.1f} GiB",
        f"disk: at most {disk.num_bytes / GIB:.1f} GiB, {disk.num_checkpoints} checkpoints of "
        f"{disk.checkpoint / GIB:.1f} and {disk.num_merged} x {disk.merged / GIB:.1f} for merged "
        "models",
    ]
    typer.echo("\n".join(lines))
    for shortage in plan.shortages:
        typer.secho(f"does not fit: {shortage}", fg="red")
    if plan.shortages:
        typer.secho(f"to save memory, {ADVICE}", fg="yellow")
    elif plan.limit.num_bytes is None:
        typer.secho(
            "device memory is unknown: set train.device_model, or use --device-gigabytes",
            fg="yellow",
        )
    else:
        typer.secho("it fits", fg="green")


def _describe_tower(plan: MemoryPlan) -> str:
    """Return the size of a model's vision tower, and of the pictures that a rank is planned for."""
    if not plan.num_tower_parameters:
        return ""
    return (
        f", {plan.num_tower_parameters:,} of them in the vision tower; a micro-batch is planned "
        f"with {plan.rank.num_image_tokens:,} prompt tokens that all show pictures, of "
        f"{plan.rank.num_patches:,} patches"
    )


def _load_table(plan: MemoryPlan, load: Load) -> Table:
    """Return a table of what the device holds (rows) in each phase (columns), in GiB."""
    number = f" (x {load.num_devices})" if load.num_devices > 1 else ""
    table = Table(f"GiB on {load.name}{number}", *map(_right, PHASES), title_justify="left")
    rows: dict[str, dict[str, int]] = {}
    for use in plan.uses:
        if use.device_bytes and (processes := load.processes.get(use.role, 0)):
            several = use.role if processes == 1 else f"{processes} x {use.role}"
            name = use.what if len(load.processes) == 1 else f"{several}: {use.what}"
            cells = rows.setdefault(name, {})
            cells[use.phase] = cells.get(use.phase, 0) + processes * use.device_bytes
    for name, cells in rows.items():
        amounts = (f"{cells[phase] / GIB:.2f}" if phase in cells else "" for phase in PHASES)
        table.add_row(name, *amounts)
    table.add_section()
    sums = (sum(cells.get(phase, 0) for cells in rows.values()) / GIB for phase in PHASES)
    table.add_row("total", *(f"{total:.2f}" for total in sums), style="bold")
    limit = "unknown" if load.limit_bytes is None else f"{load.limit_bytes / GIB:.2f}"
    table.caption = (
        f"peak {load.peak_bytes / GIB:.2f} in phase {load.phase}, limit {limit} ({plan.limit.name})"
    )
    table.caption_justify = "left"
    return table


def print_simulation(simulation: Simulation) -> None:
    """Print a row per simulated recipe, what the simulation assumes, and the verdict."""
    from tasks.runs.simulate import described_keys

    columns = "step (s)|tokens/s|draw (s)|update (s)|idle slots|train nothing|mean age|worst"
    table = Table(_folded("keys"), *map(_right, columns.split("|")))
    for one in simulation.alternatives:
        found = one.found
        cells = (
            f"{found.step_seconds:,.1f}",
            f"{found.tokens_per_second:,.0f}",
            f"{found.seconds['generate']:,.1f}",
            f"{found.seconds['anchor'] + found.seconds['update']:,.1f}",
            f"{found.idle_share:.0%}",
            f"{found.waste_ratio:.0%}",
            f"{found.mean_age:.2f}",
            f"{found.max_age}",
        )
        is_best = one is simulation.best
        table.add_row(described_keys(one), *cells, style="bold" if is_best else "")
    print_table(table)
    typer.echo("\n".join(simulation.about))
    typer.secho(simulation.verdict, bold=True)


def print_sets(sets: Sequence[ProblemSet]) -> None:
    """Print the registered datasets; * marks a use whose default source is not pinned."""
    table = Table("name", "use", "problems", "scorer", "licence")
    for one in sets:
        kinds = (("train", "train", one.train), ("eval", "test", one.test))
        uses = [
            f"{use}*" if split in one.unpinned else use for use, split, sources in kinds if sources
        ]
        uses = uses or ["generated" if one.name in GENERATED else "your own files"]
        table.add_row(one.name, ", ".join(uses), one.about, one.scorer, one.licence)
    print_table(table)
    typer.echo("* the default source is a branch, not a commit: its rows may change (docs/data.md)")


def print_set(one: ProblemSet) -> None:
    """Print a dataset's registry entry."""
    table = Table("", one.name, show_header=True, box=SIMPLE_HEAD)
    for split, sources in (("train", one.train), ("eval", one.test)):
        for hub, reference in sources.items():
            table.add_row(f"{split}, {hub}", Text(reference))
    forms = "; or ".join(", ".join(schema.columns) for schema in one.schemas)
    rows = {"problems": one.about, "licence": one.licence, "columns": forms, "prompt": one.template}
    rows |= {"scorer (training)": one.scorer, "grader (evaluation)": one.grader}
    for name, value in rows.items():
        table.add_row(name, Text(value))
    print_table(table)


def print_rows(rows: Sequence[Shown], count: SetCount) -> None:
    """Print rows as the model sees them, and how many rows before the last one were unusable."""
    for row in rows:
        tokens = "" if row.num_tokens is None else f", {row.num_tokens} tokens"
        typer.secho(
            f"{row.id}: answer {row.gold!r}, scored by {row.scorer} (data_source "
            f"{row.data_source}){tokens}",
            bold=True,
        )
        typer.echo(row.prompt + "\n")
    for reason, number in count.refused.items():
        typer.secho(
            f"unusable: {number} with {reason}, such as {count.examples[reason][0]}", fg="yellow"
        )
    if not rows:
        typer.echo(f"no usable row among {count.read}")


def print_sample(sample: Sample) -> None:
    """Print responses of a training step: each prompt once, then a right and another response."""
    counts = ", ".join(
        f"{count} {verdict.replace('_', ' ')}" for verdict, count in sample.verdicts.most_common()
    )
    typer.secho(f"Training step {sample.step}: {counts or 'no response'}", bold=True)
    typer.echo(f"{sample.path}\nsteps with a file: {sample.named_steps}")
    if sample.num_damaged:
        typer.secho(f"{counted(sample.num_damaged, 'damaged line')} skipped", fg="yellow")
    prompt = None
    for row in sample.shown:
        if row["prompt"] != prompt:
            prompt = row["prompt"]
            typer.secho(f"\n{row['set']}, gold answer {row['gold']!r}:", bold=True)
            typer.echo(_indented(prompt))
        colour = "green" if row["verdict"] == "right" else "red"
        cut = ", cut" if row["truncated"] else ""
        length = row.get("response_tokens", "?")
        header = f"{row['verdict'].replace('_', ' ')}{cut}, score {row['score']:g}, {length} tokens"
        typer.secho(f"  {header}, answer {row['answer']!r}:", fg=colour)
        typer.echo(_indented(row["response"]))


def _indented(text: str) -> str:
    """The text, cut in the middle if it is long, without characters that control a terminal."""
    text = _CONTROL.sub(lambda found: repr(found[0])[1:-1], shortened(text, SHOWN_CHARACTERS))
    return textwrap.indent(text, "    ", lambda line: True)


def print_runs(runs: Sequence[RecordedRun], short_ids: Mapping[str, str]) -> None:
    """Print runs with their duration and result; times are local."""
    console = Console()
    if not console.is_terminal:
        console.width = RUNS_WIDTH
    has_flow = console.width >= RUNS_WIDTH
    when = "%Y-%m-%d %H:%M" if has_flow else "%m-%d %H:%M"
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    for header in ("when", "id", "recipe", *["flow"] * has_flow, "state"):
        # other columns are never truncated
        table.add_column(header, no_wrap=header not in ("recipe", "flow"))
    figures = ("cached\n/run", "before\n(%)", "after\n(%)", "diff.\n(pts)", "p", "took\nh:mm:ss")
    for header in figures:
        table.add_column(header, justify="right", no_wrap=True)
    for run in runs:
        names = (run.name, run.flow) if has_flow else (run.name,)
        table.add_row(
            f"{_local(run.started_at):{when}}",
            short_ids[run.id],
            *(Text(name, no_wrap=True, overflow="ellipsis") for name in names),
            "gate failed" if run.report and run.report.get("failed_gates") else run.state,
            f"{run.num_cached}/{run.num_built}",
            *_result(run.report),
            _duration(run.seconds),
        )
    console.print(table)


def print_run(
    run: RecordedRun,
    before: RecordedRun | None,
    changes: Sequence[Difference] | None,
    report: Mapping[str, Any] | None,
) -> None:
    """Print one run: how it ended, its stages, outputs, result and configuration changes.

    `changes` is None if a configuration cannot be read.
    """
    from eval.report.training import usage_lines
    from tasks.runs.history import artifact_of

    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    console.print(f"Run {run.id} of {run.name}, {run.flow}: {run.state}", style="bold")
    started = f"{_local(run.started_at):%Y-%m-%d %H:%M:%S}"
    console.print(
        f"started {started}, took {_duration(run.seconds)} (h:mm:ss), pid {run.pid} on {run.host}"
    )
    console.print(f"folder {run.folder}")
    if run.error:
        console.print(f"error {run.error}", style="red")
    table = Table("stage", "", _right("took\n(s)"), "key")
    for label, stage in run.stages.items():
        state = "cached" if stage.cached else "built"
        table.add_row(label, state, f"{stage.seconds:.1f}", stage.key[:SHORT_KEY_LENGTH])
    if run.stages:
        console.print(table)
    for label in run.stages:  # not in the table, which would fold paths
        artifact = artifact_of(run, label)
        console.print(
            f"{label} {artifact.path if artifact else 'removed (dapo runs gc, or by hand)'}"
        )
    if run.environment:
        console.print(f"variables {described(run.environment)}")
    if report is not None:
        console.print(report["verdict"])
        for line in usage_lines(report.get("train", {})):
            console.print(f"training {line}")
    if before is None:
        console.print(f"No earlier run of {run.name} to compare the configuration with.")
    elif changes is None:
        console.print(f"Configuration changes since {before.id}: unknown, one cannot be read.")
    elif changes:
        console.print(f"Configuration changes since the previous run, {before.id}:")
        console.print(*(f"  {change}" for change in changes), sep="\n")
    else:
        console.print(f"Same configuration as the previous run, {before.id}.")


def print_garbage(found: Sequence[Unused], is_dry_run: bool, short_ids: Mapping[str, str]) -> None:
    """Print what a collection removed or would remove, what it kept and why, and the bytes."""
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("artifact", overflow="fold", min_width=SHORT_KEY_LENGTH)
    table.add_column("stage", no_wrap=True)
    table.add_column("frees\n(bytes)", justify="right", no_wrap=True)
    table.add_column("last\nused by", no_wrap=True)
    table.add_column("", overflow="fold")
    removed = "would be removed" if is_dry_run else "removed"
    for item in found:
        outcome = f"kept: {item.kept_reason}" if item.kept_reason else removed
        table.add_row(
            Text(f"{item.attempt.short_key}/{item.attempt.path.name}"),
            item.attempt.stage,
            f"{item.frees_bytes:,}",
            short_ids[item.last_run] if item.last_run else "no run",
            outcome,
        )
    if found:
        print_table(table)
    going = [item for item in found if not item.kept_reason]
    total = sum(item.frees_bytes for item in going)
    plural = "" if len(going) == 1 else "s"
    summary = f"{len(going)} folder{plural} {removed}, {total:,} bytes in total"
    Console(highlight=False, soft_wrap=True).print(summary)


def print_findings(findings: Sequence[Finding]) -> None:
    """Print findings with what to do about those that are not ok."""
    table = Table("check", "", _folded("found"), _folded("what to do"))
    for finding in findings:
        status = Text(finding.status, style=_STATUS_STYLES[finding.status])
        table.add_row(finding.check, status, Text(finding.message), Text(finding.advice))
    if findings:
        print_table(table)


def print_acceptance(title: str, lines: Sequence[Line]) -> None:
    """Print an acceptance form."""
    columns = ("", "verdict", _folded("criterion"), _folded("recorded"))
    table = Table(*columns, title=f"Acceptance of {title}", title_justify="left")
    for line in lines:
        verdict = Text(line.verdict, style="green" if line.verdict == "met" else "yellow")
        table.add_row(line.name, verdict, line.criterion, Text(line.recorded))
    print_table(table)


def print_variables(variables: Sequence[Variable], device: str) -> None:
    """Print how environment variables affect training on a kind of device."""
    title = f"Environment variables that affect training on {device}"
    columns = ("variable", "value", "", _folded("effect"), _folded("what to do"))
    table = Table(*columns, title=title, title_justify="left")
    for each in variables:
        state = Text(each.state, style=_STATUS_STYLES[STATUSES[each.state]])
        value = Text(each.value, overflow="fold")
        table.add_row(each.name, value, state, each.effect, Text(each.advice))
    print_table(table)


def print_json(value: Any) -> None:
    """Print a value as JSON on standard output."""
    typer.echo(json.dumps(value, indent=2))


def print_derived(derived: Sequence[Quantity]) -> None:
    """Print the numbers derived from a configuration to standard error."""
    table = Table("quantity", "", "unit", "from", title="Derived numbers", title_justify="left")
    table.columns[1].justify = "right"
    for label, number, unit, formula in derived:
        table.add_row(label, f"{number:,}", unit, formula)
    print_table(table, is_error=True)


def _result(report: Mapping[str, Any] | None) -> list[str]:
    if report is None:
        return [""] * 4
    return [
        f"{100 * report['before']:.1f}",
        f"{100 * report['after']:.1f}",
        f"{100 * report['difference']:+.1f}",
        f"{report['p']:.2g}",
    ]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _local(timestamp: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(timestamp)


def _right(header: str) -> Column:
    return Column(header, justify="right")


def _folded(header: str) -> Column:
    return Column(header, overflow="fold")


def print_table(table: Table, *, is_error: bool = False) -> None:
    """Print a table; without a terminal it is wide enough for whole paths."""
    is_terminal = Console(stderr=is_error).is_terminal
    Console(stderr=is_error, width=None if is_terminal else WIDTH).print(table)
