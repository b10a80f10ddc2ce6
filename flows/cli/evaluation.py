"""`dapo eval`, `grade` and `compare`."""

from __future__ import annotations

import datetime
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.options import (
    BaselineOption,
    GateOption,
    SetOption,
    StoreOption,
    exit_by_gates,
    read_baselines,
)
from flows.services import DEFAULT_STORE

if TYPE_CHECKING:
    from eval.report.suite_report import Models
    from eval.results.summary import Summary
    from tasks.config.evaluate import EvaluateConfig
    from tasks.runs.history import RecordedRun

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

SidesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SIDE",
        help="BEFORE and AFTER: results folders of dapo eval, or runs by id (or its start or end), "
        "or latest, latest~1; or two logs of lm-eval, inspect_ai, evalscope, AISBench or NeMo "
        "Evaluator, or two tables (csv, jsonl ...) with item and score. With --history, any "
        "number; default: every run in the store. To compare trainings: any number of runs and "
        "logs (a metrics file, or a console log of verl or MindSpeed).",
    ),
]
HistoryOption = Annotated[
    bool,
    typer.Option("--history", help="Compare over time: results folders, reports, runs, stores."),
]
PageOption = Annotated[
    Path | None,
    typer.Option(help="Folder for report.json, .md and .html; or history.html; or trainings.html."),
]
SelectOption = Annotated[
    str | None,
    typer.Option(
        "--benchmark",
        "--score",
        help="With --history: one benchmark of suites. With other programs' logs: the score to "
        "compare, if they have several; NAME:lower if lower is better.",
    ),
]
MetricsOption = Annotated[
    Path | None, typer.Option(help="metrics.jsonl of the training in between, for its curves.")
]


@app.command(
    "eval",
    epilog="Example: dapo eval --base-url http://127.0.0.1:8000 --dataset math500 --output before. "
    "Four samples, your own file: dapo eval --base-url http://127.0.0.1:8000 --data d/eval.parquet "
    "--output before --set evaluate.num_samples=4 --set evaluate.temperature=0.6. As in AISBench's "
    "guide: dapo eval --base-url http://127.0.0.1:8000 --dataset math500 --output before --set "
    "evaluate.api=completions",
    short_help="Evaluate a served model.",
)
def evaluate(
    base_url: Annotated[str, typer.Option(help="URL of an OpenAI-compatible server.")],
    output: Annotated[
        Path, typer.Option(help="Results folder; an unfinished evaluation in it is resumed.")
    ],
    dataset: Annotated[
        str | None,
        typer.Option(
            help="Registered dataset, checked for completeness; dapo datasets lists them."
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|SOURCE",
            help="Parquet, jsonl, json, csv or arrow; hf:ORG/NAME@REVISION/FILE, modelscope:..., "
            "https://...#sha256=DIGEST. Registered datasets have a default source.",
        ),
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(
            help="Benchmarks to run together, each into its folder; dapo datasets lists suites."
        ),
    ] = None,
    model_name: Annotated[str, typer.Option(help="Served model name.")] = "policy",
    config: Annotated[
        Path | None,
        typer.Option(
            help="Recipe whose `evaluate` section and benchmarks to use unless others are given."
        ),
    ] = None,
    overrides: SetOption = None,
) -> None:
    """Evaluate a served model on a dataset or suite; the API key comes from VLLM_API_KEY.

    Exit status 3 if a gate of evaluate.gates fails; gates that compare two models are only named.
    """
    from eval.endpoint import Endpoint
    from eval.requests.run import evaluate_all
    from flows.config import load_config_or_defaults
    from tasks.evaluation.served_model import served_folder, served_model_identity
    from tasks.evaluation.settings import benchmarks_into, limits_of, load_sets
    from tasks.serve_model.command import API_KEY_VARIABLE

    chosen = _chosen(dataset, data, suite, overrides or ())
    recipe = load_config_or_defaults(config, [*chosen, *(overrides or ())])
    settings, limits = recipe.evaluate, limits_of(recipe.evaluate)
    with tempfile.TemporaryDirectory() as work:
        sets = load_sets(recipe, Path(work), data, dataset)
        server = Endpoint(base_url, model_name, os.environ.get(API_KEY_VARIABLE, ""))
        identity, folder = served_model_identity(server), served_folder(server)
        benchmarks = benchmarks_into(output, settings, sets, folder)
        summaries = evaluate_all(benchmarks, server, limits=limits, model_digest=identity)
    for one, summary in zip(benchmarks, summaries, strict=True):
        _print_summary(one.output_dir, summary)
    _check_gates(output, settings, config if chosen else None)


def _check_gates(output: Path, settings: EvaluateConfig, replaced: Path | None) -> None:
    """Print the outcome of evaluate.gates; exit with 3 if one failed.

    Options replaced the benchmarks of the recipe `replaced`; its gates are only named.
    """
    from flows.config import load_config_or_defaults

    if replaced and (
        dropped := set(load_config_or_defaults(replaced).evaluate.gates) - set(settings.gates)
    ):
        typer.echo(
            f"Gates not checked: {'; '.join(sorted(dropped))} (for the benchmarks of {replaced})."
        )
    if not settings.gates:
        return
    from eval.report.gates import BEFORE, LAST_NIGHT, describe_gates
    from eval.report.suite_report import check_own_gates

    columns = (BEFORE, *(one.name for one in settings.baselines), LAST_NIGHT)
    results = check_own_gates(output, settings.gates, columns)
    for sentence in describe_gates(results):
        typer.secho(sentence, bold=True)
    exit_by_gates({"is_failed": any(result.is_passed is False for result in results)})


def _print_summary(folder: Path, summary: Summary) -> None:
    aisbench = f" (AISBench's rule {summary.aisbench['accuracy']:.1%})" if summary.aisbench else ""
    typer.echo(
        f"{folder}: accuracy {summary.accuracy:.1%} of {summary.n}{aisbench}, "
        f"no answer {summary.no_answer_rate:.1%}, truncated {summary.truncated_rate:.1%}, "
        f"failed requests {summary.request_failed_rate:.1%}"
    )


def _chosen(
    dataset: str | None, data: str | None, suite: str | None, overrides: Sequence[str]
) -> list[str]:
    """Return the overrides for the options; they replace the recipe's benchmarks and gates."""
    options = {"--dataset": dataset, "--data": data, "--suite": suite}
    given = [name for name, value in options.items() if value is not None]
    if not given:
        return []
    if suite is not None and len(given) > 1:
        raise typer.BadParameter(
            "cannot be combined with --dataset or --data", param_hint="--suite"
        )
    if any(override.partition("=")[0].strip() == "evaluate.benchmarks" for override in overrides):
        raise typer.BadParameter(
            "cannot be combined with --set evaluate.benchmarks, which names others; remove one of "
            "the two",
            param_hint=given[0],
        )
    from eval.problems.registry import find_suite

    benchmarks = find_suite(suite) if suite is not None else ()
    return [
        "evaluate.headline=null",
        "evaluate.gates=[]",
        f"evaluate.benchmarks=[{', '.join(benchmarks)}]",
    ]


@app.command(
    epilog="Example: dapo grade before/results.jsonl",
    short_help="Regrade the responses of an evaluation.",
)
def grade(
    results: Annotated[
        Path,
        typer.Argument(
            metavar="RESULTS",
            help="Results folder of dapo eval (benchmark or suite), or a results.jsonl; with "
            "--output, lm-eval's samples_*.jsonl, inspect_ai's log (.eval, .json) or AISBench's "
            "predictions: file or folder.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="Import another program's responses into this results folder."),
    ] = None,
) -> None:
    """Regrade stored responses, without asking the model, and list the verdicts that changed.

    With --output, import another program's responses; the folder can be compared and reported like
    any other.
    """
    if output is not None:
        from eval.logs.foreign import import_log

        _print_summary(output, import_log(results, output))
        return
    from dapo_core.errors import ConfigError
    from eval.logs.regrade import describe, regrade
    from eval.results.suite import SUITE_FILE, read_suite
    from tasks.artifacts.artifact import MANIFEST_NAME

    if ((results if results.is_dir() else results.parent) / MANIFEST_NAME).is_file():
        raise ConfigError(
            f"{results} is an artifact in the store, which new verdicts would damage; copy it "
            f"(cp -r) and grade the copy"
        )
    is_suite = (results / SUITE_FILE).is_file()
    for folder in read_suite(results).values() if is_suite else [results]:
        typer.echo(describe(regrade(folder)))


def _compare(
    models: Models, gates: list[str] | None, metrics: Path | None, output: Path | None
) -> None:
    """Print the report on two evaluations, also into `output`; exit with 3 if a gate failed."""
    from eval.report.report import REPORT_PAGE, Provenance, render_markdown
    from eval.report.suite_report import write_suite_report
    from flows.console import print_markdown

    content = write_suite_report(
        models, metrics, output, Provenance(title="Before/after report"), gates or ()
    )
    if not content["is_one_evaluation"]:
        print_markdown(render_markdown(content))
        typer.echo("")
    if output is not None:
        typer.secho(f"Report with plots: {output / REPORT_PAGE}", bold=True)
    typer.secho(content["verdict"], bold=True)
    exit_by_gates(content)


@app.command(
    epilog="Example: dapo compare before after; dapo compare latest~1 latest; "
    "dapo compare before.csv after.csv --gate 'gsm8k >= before - 1'; dapo compare --history; dapo "
    "compare verl.log latest --output trainings",
    short_help="Compare evaluations, runs, or training logs.",
)
def compare(
    sides: SidesArgument = None,
    is_history: HistoryOption = False,
    output: PageOption = None,
    store: StoreOption = DEFAULT_STORE,
    baselines: BaselineOption = None,
    gates: GateOption = None,
    select: SelectOption = None,
    metrics: MetricsOption = None,
) -> None:
    """Compare two evaluations of the same items, item by item, or with --history many over time.

    A run stands for its evaluation after training. For two runs, differing configuration keys are
    listed too. If any side is a training log, training metrics and curves are compared instead.
    """
    from eval.logs.scored import program_of
    from tasks.runs.history import find_evaluation, find_run

    given = sides or []
    if not is_history and any(program_of(Path(side)) for side in given):
        if baselines or metrics:
            raise typer.BadParameter(
                "does not apply to other programs' logs", param_hint="--baseline, --metrics"
            )
        _print_logs(given, select, gates, output)
        return
    if is_history:
        paths = [
            Path(side) if Path(side).exists() else find_run(store, side, "report").folder
            for side in given
        ]
        _print_history(paths or [store], output, select)
        return
    if any(Path(side).is_file() for side in given):
        if baselines or gates or select:
            raise typer.BadParameter(
                "--baseline, --gate and --benchmark do not apply to training logs"
            )
        _print_trainings(given, store, output)
        return
    _require_two(given)
    if select is not None:
        raise typer.BadParameter("applies with --history only", param_hint="--benchmark")
    (before, run_before), (after, run_after) = (find_evaluation(store, side) for side in given)
    _print_runs_compared({"before": run_before, "after": run_after})
    from eval.report.suite_report import Models

    models = Models(before, after, read_baselines(baselines))
    _compare(models, gates, metrics, output)


def _require_two(sides: list[str]) -> None:
    if len(sides) != 2:
        raise typer.BadParameter(
            f"needs BEFORE and AFTER, got {len(sides)}; add --history for more"
        )


def _print_logs(
    sides: list[str], score: str | None, gates: list[str] | None, output: Path | None
) -> None:
    """Print the comparison of two logs of other programs; exit with 3 if a gate failed."""
    from eval.logs.scored import compare_logs
    from flows.console import print_markdown

    _require_two(sides)
    before, after = sides
    result = compare_logs(before, after, score).check(gates or ())
    print_markdown(result.markdown())
    typer.echo("")
    if output is not None:
        result.write(output)
        typer.secho(f"Report: {output / 'report.html'}", bold=True)
    typer.secho(result.verdict, bold=True)
    exit_by_gates({"is_failed": result.is_failed})


def _print_runs_compared(runs: dict[str, RecordedRun | None]) -> None:
    """Print which runs are compared and how their configurations differ."""
    from tasks.runs.history import changed_keys

    found = {side: run for side, run in runs.items() if run is not None}
    for side, run in found.items():
        began = datetime.datetime.fromtimestamp(run.started_at)
        typer.echo(
            f"- {side}: run {run.id} of {run.name}, {began:%Y-%m-%d %H:%M}, as evaluated after "
            "training"
        )
    if len(found) == 2:
        changes = changed_keys(found["before"], found["after"])
        typer.echo("- configuration: " + ("; ".join(map(str, changes)) or "the same in both"))
    if found:
        typer.echo("")


def _print_trainings(sides: list[str], store: Path, output: Path | None) -> None:
    from flows.console import print_markdown
    from tasks.runs.compare_trainings import compare_trainings, render_markdown, write_page
    from tasks.runs.history import find_training_log

    names = [Path(side).name for side in sides]
    labels = names if len(set(names)) == len(sides) else sides
    paths = map(find_training_log, [store] * len(sides), sides)
    trainings = compare_trainings(dict(zip(labels, paths, strict=True)))
    print_markdown(render_markdown(trainings))
    if output is not None:
        typer.secho(f"\nTrainings with plots: {write_page(trainings, output)}", bold=True)


def _print_history(paths: list[Path], output: Path | None, benchmark: str | None) -> None:
    from eval.report.history import make_history, render_markdown, write_page
    from flows.console import print_markdown

    history = make_history(paths, benchmark)
    print_markdown(render_markdown(history))
    if output is not None:
        typer.secho(f"\nHistory with a plot: {write_page(history, output)}", bold=True)
