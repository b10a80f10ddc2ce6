"""`dapo init`, `run`, `stage`, `plan`, `simulate` and `config`."""

from __future__ import annotations

import contextlib
import json
import logging
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.options import ConfigArgument, JsonOption, SetOption, SmokeOption, exit_by_gates
from heartbeat import heartbeat
from tasks.stages import BY_COMMAND

if TYPE_CHECKING:
    from flows.config import Config
    from tasks.preflight.finding import Findings

logger = logging.getLogger(__name__)


STAGES = (*BY_COMMAND, "compare")

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help=f"One of: {', '.join(STAGES)}.")]
ForceOption = Annotated[
    bool,
    typer.Option(
        "--force", help="Rebuild even if the store has the output, or resume an unfinished attempt."
    ),
]
SideOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="evaluate-model: before, after (default), a baseline's name, or step_N; "
        "fetch-model: a baseline's name; merge-checkpoint: step_N.",
    ),
]
AllOption = Annotated[bool, typer.Option("--all", help="Show every change, not just the first.")]
MemoryOption = Annotated[bool, typer.Option("--memory", help="Only show the memory plan.")]
GigabytesOption = Annotated[
    float | None,
    typer.Option(
        "--device-gigabytes", min=0.001, help="Device memory in GiB, instead of train.device_model."
    ),
]

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
config_app = typer.Typer(
    help="Inspect configurations.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(config_app, name="config")


@app.command(
    epilog="Example: dapo init my.yaml --model models/Qwen3-0.6B --data questions.csv",
    short_help="Write a recipe for your model and data.",
)
@heartbeat(lambda: "reading the model and the data")
def init(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Recipe to write, such as my.yaml.")],
    model: Annotated[
        str, typer.Option(help="Model folder or hub id: ORG/NAME, modelscope:ORG/NAME.")
    ],
    data: Annotated[
        list[str], typer.Option(help="Training data: a file, a folder, a dataset name or a hub id.")
    ],
    columns: Annotated[
        str | None,
        typer.Option(
            help="problem=NAME,answer=NAME: your column names; used for --eval too, if it has them."
        ),
    ] = None,
    held_out: Annotated[
        str | None,
        typer.Option("--eval", help="Evaluation data; default: part of --data or its test split."),
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="Jinja chat template, for a base model without one.")
    ] = None,
    is_tried: Annotated[
        bool,
        typer.Option(
            "--try", help="Also sample 8 x 8 responses, to see what there is to learn (a minute)."
        ),
    ] = False,
) -> None:
    """Write a commented recipe for your model and data, sized for this machine and your prompts.

    Learning rate: 1e-6 for 32B parameters, as in the DAPO paper, rising with 1 / sqrt(parameters)
    to at most 3e-5. --try samples responses to 8 training prompts with the recipe's engine, prompt
    and scorer, and shows how many are right, without an answer or cut, and how many groups have
    signal.
    """
    from dapo_core.errors import ConfigError
    from flows.config import load_config
    from flows.tables import print_findings
    from tasks.preflight.finding import OK
    from tasks.preflight.run import examine
    from tasks.recipes.first_data import parse_columns
    from tasks.recipes.first_recipe import Machine, first_recipe, model_keys

    if path.exists():
        raise ConfigError(f"{path} exists; choose another file, or remove it")
    if len(data) > 1:
        raise ConfigError(
            f"--data is given {len(data)} times; give one, and add the others to data.train later"
        )
    keys = model_keys(model, chat_template)
    text = first_recipe(path, keys, data[0], held_out, Machine.this(), parse_columns(columns))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    findings = examine(load_config(path), is_sampled=is_tried)
    print_findings([one for one in findings if one.status != OK or one.check == "sampling"])
    typer.echo(f"wrote {path}{_what_next(path, findings)}")


def _what_next(path: Path, findings: Findings) -> str:
    typed = shlex.quote(str(path))
    if failed := ", ".join(dict.fromkeys(one.check for one in findings.failed)):
        return (
            f" for this machine, but its plan fails: {failed}, above. Change what the rows name "
            f"until dapo plan {typed} passes; for another machine, run dapo init there, or start "
            "from a recipe in configs/"
        )
    return f"; next: dapo plan {typed}, then dapo run {typed}"


@app.command(
    epilog="Example: dapo run configs/arith_cpu.yaml --set run.seed=2",
    short_help="Run the whole chain and print the report.",
)
def run(
    config: ConfigArgument,
    overrides: SetOption = None,
    is_accepted: Annotated[
        bool,
        typer.Option(
            "--accept", help="Record what dapo runs accept needs: 100 steps, all comparable."
        ),
    ] = False,
) -> None:
    """Run the whole chain as the Prefect flow dapo-full and print the report.

    If the store has every output and no Prefect server is configured, only the report is written.

    Exit status: 0 success; 1 failed, a retry may succeed; 2 something has to change first; 3
    success, but a gate of evaluate.gates failed; 130 or 143 stopped.
    """
    from flows.prefect_server import named_api, provide_prefect_api
    from tasks.preflight.run import require_ready
    from tasks.runs.history import REPORT_FOLDER
    from tasks.runs.plan import is_built

    if is_accepted:
        from flows.config import load_config
        from tasks.runs.accept import require_acceptable

        overrides = [*(overrides or ()), *require_acceptable(load_config(config, overrides or ()))]
    settings = begin(config, overrides)
    store = Path(settings.store.path)
    if is_built(settings) and not named_api(store):
        logger.info(
            "every output is in the store: only writing the report, without a Prefect server"
        )
        print_report(report_again(settings))
        return
    require_ready(settings)
    with heartbeat(lambda: "starting Prefect"):
        wait_for_api = provide_prefect_api(store)
        from flows.dapo_full import dapo_full

        wait_for_api()
    with message_when_stopped():
        result = dapo_full(str(config), tuple(overrides or ()))
    print_report(Path(result["run"]) / REPORT_FOLDER)


@app.command(
    epilog="Example: dapo adopt verl/checkpoints configs/dapo_qwen3_8b_math.yaml --log verl.log",
    short_help="Evaluate and report what another trainer trained.",
)
def adopt(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            help="Output or checkpoint of verl (FSDP) or TRL, or any Hugging Face folder.",
        ),
    ],
    config: ConfigArgument,
    log: Annotated[Path | None, typer.Option(help="Log of that training, for curves.")] = None,
    settings: Annotated[
        Path | None, typer.Option("--config", help="Its configuration, kept beside the output.")
    ] = None,
    overrides: SetOption = None,
) -> None:
    """Run the chain with a checkpoint that was trained elsewhere, in place of training.

    It is compared with the recipe's model first: tensors, shapes and tokenizer have to be the same.
    Then the chain goes on: merge, serve, evaluate, report. `dapo run` with the keys adopt.folder,
    adopt.log and adopt.config does the same, also every night.
    """
    given = {"folder": folder, "log": log, "config": settings}
    changes = [f"adopt.{name}={path}" for name, path in given.items() if path is not None]
    run(config, [*(overrides or ()), *changes])


@app.command(
    epilog="Example: dapo stage evaluate-model configs/arith_cpu.yaml --side before --force",
    short_help="Run one stage with inputs from the store.",
)
def stage(
    name: NameArgument,
    config: ConfigArgument,
    overrides: SetOption = None,
    force: ForceOption = False,
    side: SideOption = None,
) -> None:
    """Run one stage with inputs from the store, and print the path of its output.

    If the store already has the output and no Prefect server is configured, none is started.
    """
    if name not in STAGES:
        from downloads.nearest import nearest

        raise typer.BadParameter(
            f"{name!r} is not a stage{nearest(name, STAGES)}", param_hint="NAME"
        )
    given = {"force": force or None, "side": side}
    options = {option: value for option, value in given.items() if value is not None}
    if options and name == "compare":
        raise typer.BadParameter("compare always writes a new report, of before and after")
    from flows.prefect_server import named_api, provide_prefect_api
    from tasks.links import label_of, link_of
    from tasks.runs.plan import has_output
    from tasks.runs.run import Run, require_outputs

    settings = begin(config, overrides)
    store = Path(settings.store.path)
    label = None if name == "compare" else label_of(settings, name.replace("-", "_"), side)
    needs = ("evaluate_before", "evaluate_after", "train_policy")
    require_outputs(settings, needs if label is None else link_of(settings, label).needs)
    if label is not None and not force and not named_api(store) and has_output(settings, label):
        logger.info("the output is in the store: not starting a Prefect server")
        with Run.start(settings, name) as run:
            typer.echo(run.take(label).path)
        return
    wait_for_api = provide_prefect_api(store)
    from flows.single_stages import STAGE_FLOWS

    wait_for_api()
    with message_when_stopped():
        output = STAGE_FLOWS[name](str(config), tuple(overrides or ()), **options)
    if name == "compare":
        print_report(Path(output))
    else:
        typer.echo(output)


@heartbeat(lambda: "reading the recipe")
def begin(config: Path, overrides: list[str] | None) -> Config:
    """Load the configuration; from here on, log lines start with time and stage."""
    from flows.config import load_config
    from flows.console import print_chain
    from flows.prefect_settings import apply_prefect_settings

    settings = load_config(config, overrides or ())
    apply_prefect_settings()
    print_chain()
    return settings


def report_again(settings: Config) -> Path:
    """Write a new report for a chain with all outputs in the store; returns its folder."""
    from flows.notify import report_result
    from tasks.runs.history import REPORT_FOLDER
    from tasks.runs.report import repeat_chain
    from tasks.runs.run import Run

    with Run.start(settings) as run:
        report_result(run, repeat_chain(run), settings.flow.webhook)
    return run.folder / REPORT_FOLDER


@contextlib.contextmanager
def message_when_stopped() -> Iterator[None]:
    """On Ctrl-C or SIGTERM, tell the user that finished work is kept.

    During a flow run Prefect handles SIGTERM; once the run is ended it sends it again.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        typer.secho("stopped; run the same command again to continue", err=True, fg="yellow")
        raise


def print_report(folder: Path) -> None:
    """Print a run's report, verdict and HTML report's path; exit with 3 if a gate failed."""
    from flows.console import print_markdown

    print_markdown((folder / "report.md").read_text(encoding="utf-8"))
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    typer.secho(f"\n{report['verdict']}\nReport with plots: {folder / 'report.html'}", bold=True)
    exit_by_gates(report)


@app.command(
    epilog="Example: dapo plan configs/arith_cpu.yaml --set algorithm.clip_ratio_high=0.3",
    short_help="Show what a run would do and why, without running it.",
)
@heartbeat(lambda: "computing the plan")
def plan(
    config: ConfigArgument,
    overrides: SetOption = None,
    is_whole: AllOption = False,
    is_smoke: SmokeOption = False,
    is_json: JsonOption = False,
    is_memory: MemoryOption = False,
    gigabytes: GigabytesOption = None,
) -> None:
    """Show what a run would do, without running it: each stage, and why it is not cached.

    cached: the output is in the store. building: another process is producing it. resumes: an
    unfinished attempt continues. damaged: the output changed on disk and is rebuilt. stale: the
    last run with this run.name used another key, or an input has to be built. runs: not in the
    store.

    Quick checks run first: model, data, lengths, scorer, devices, disk. Anything that would fail
    the run is reported up front, all at once, with the keys to change. Warnings follow the table,
    as do missing devices, memory or clusters, so you can plan a recipe on another machine.

    --memory shows device memory per phase and, if the recipe does not fit (exit status 2), what
    saves memory. dapo simulate shows how long a step takes.
    """
    from flows.config import load_config

    settings = load_config(config, overrides or ())
    if is_memory:
        return plan_devices(settings, gigabytes, is_json)
    if gigabytes is not None:
        raise typer.BadParameter("needs --memory", param_hint="--device-gigabytes")
    from flows.tables import print_findings, print_json, print_plan  # slow imports
    from tasks.preflight.finding import WARN, count_checks
    from tasks.preflight.machine import OF_ANOTHER_MACHINE
    from tasks.preflight.run import examine
    from tasks.runs.plan import plan_chain

    findings = examine(settings, is_smoke)
    if not OF_ANOTHER_MACHINE.issuperset(finding.check for finding in findings.failed):
        findings.require()
    stages = plan_chain(settings)
    if is_json:
        print_json([vars(stage) for stage in stages])
        findings.require()
        return
    print_plan(stages, is_whole)
    shown = {"disk"} if settings.checkpoint_steps else set()
    print_findings(
        [finding for finding in findings if finding.status == WARN or finding.check in shown]
    )
    findings.require()
    typer.echo(f"preflight: {count_checks(findings)} (dapo doctor {config} shows them)")


def plan_devices(settings: Config, gigabytes: float | None, is_json: bool) -> None:
    """Print the memory plan; exit with 2 if the recipe does not fit."""
    from dataclasses import asdict

    from flows.tables import print_findings, print_json, print_memory
    from tasks.execution.retries import LASTING_EXIT_CODE
    from tasks.preflight.finding import Findings
    from tasks.preflight.memory import check_server, plan_of

    found, servers = plan_of(settings, gigabytes=gigabytes), Findings()
    check_server(settings, None, found.limit, servers)
    if is_json:
        shortages = [*found.shortages, *(finding.found for finding in servers)]
        print_json({**asdict(found), "shortages": shortages})
    else:
        print_memory(found)
        print_findings(servers)
    if servers.failed or (found.shortages and not settings.train.allow_oversubscription):
        raise typer.Exit(LASTING_EXIT_CODE)


@app.command(
    epilog="Example: dapo simulate configs/arith_cpu.yaml --from latest --output simulation",
    short_help="Simulate a training step: what engines and ranks wait for.",
)
@heartbeat(lambda: "simulating training steps")
def simulate(
    config: ConfigArgument,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="RUN",
            help="Run, or metrics.jsonl of this recipe, with times and lengths.",
        ),
    ] = None,
    mean_tokens: Annotated[
        float | None, typer.Option(min=1, help="Mean length of a response, in tokens.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps to simulate after the engines are full.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for timeline.html, timeline.png and simulate.json."),
    ] = None,
    overrides: SetOption = None,
    is_json: JsonOption = False,
) -> None:
    """Simulate training steps of a recipe and of other schedules, and name the fastest keys.

    The sampler is real; engines and ranks are simulated. Without --from, their times are estimated
    from the model, train.device_model and published response lengths. Each row changes keys of the
    fastest row above it: prompts open at a time, schedule and placement, window, speculation. Rows
    that the configuration refuses or that do not fit into memory are left out.
    """
    from flows.config import load_config
    from flows.tables import print_json, print_simulation
    from tasks.runs.simulate import describe, simulate_recipe, write_simulation

    settings = load_config(config, overrides or ())
    found = simulate_recipe(settings, source, mean_tokens, steps)
    if output is not None:
        write_simulation(found, output)
    if is_json:
        print_json(describe(found))
        return
    print_simulation(found)
    if output is not None:
        typer.echo(f"timeline: {output / 'timeline.html'}")


@config_app.command(
    "show",
    epilog="Example: dapo config show configs/arith_cpu.yaml --set run.seed=2 > mine.yaml",
    short_help="Print the resolved configuration as YAML.",
)
def config_show(config: ConfigArgument, overrides: SetOption = None) -> None:
    """Print the resolved configuration (defaults < file < --set) as YAML, itself a valid recipe.

    Standard error shows derived numbers: prompts, responses and tokens per training step, optimizer
    steps, tokens per device, devices. To hide them: 2> /dev/null.
    """
    from dapo_core.config.derived import derive
    from dapo_core.config.loading import dump_config
    from flows.config import load_config
    from flows.tables import print_derived

    settings = load_config(config, overrides or ())
    typer.echo(dump_config(settings), nl=False)
    print_derived(derive(settings))


@config_app.command(
    "explain",
    epilog="Example: dapo config explain sampler.gen_prompts train.learning_rate",
    short_help="Explain keys: meaning, default, values, and what they affect.",
)
def config_explain(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY", help="section.key, just the key, a section, or verl's key."),
    ] = None,
    is_page: Annotated[
        bool, typer.Option("--page", help="All keys, in the format of docs/keys.md.")
    ] = False,
) -> None:
    """Explain keys: meaning, default, bounds, and the stages that a change reruns."""
    from flows.keys import explanation, keys_page

    if bool(names) == is_page:
        raise typer.BadParameter("give at least one key, or --page for all", param_hint="KEY")
    if is_page:
        typer.echo(keys_page(), nl=False)
    for name in names or ():
        typer.echo("\n".join(explanation(name)))
