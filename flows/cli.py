"""`dapo`: run the chain, look at it, or run one stage on plain paths. Heavy imports stay inside the commands."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

logger = logging.getLogger(__name__)

app = typer.Typer(
    name="dapo",
    help="Train a language model with DAPO and know whether it got better.",
    epilog="Example: dapo run configs/arith_cpu.yaml --set run.seed=2",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
config_app = typer.Typer(help="Look at configurations.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(config_app, name="config")

CheckpointChoice = Literal["latest", "best"]
DATASETS = ("math500", "aime24", "aime25", "amc23", "gsm8k", "olympiadbench", "minerva", "arithmetic", "choice")
MergeDtype = Literal["keep", "float32", "bfloat16", "float16"]
ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="Recipe, such as configs/arith_cpu.yaml.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change a key; repeatable.")
]


def main() -> None:
    """Run the command line; an error of ours ends with its message and status 2 when the user must act, else 1."""
    from dapo_core.errors import DapoError
    from eval.errors import EvaluationError
    from flows.console import print_messages
    from tasks.retries import describe, exit_code_of

    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # also those of loading a model's weights
    print_messages()
    try:
        app()
    except (DapoError, EvaluationError) as error:
        typer.secho(describe(error), err=True, fg="red")
        sys.exit(exit_code_of(error))


@app.command(epilog="Example: dapo run configs/arith_cpu.yaml --set run.seed=2")
def run(config: ConfigArgument, overrides: SetOption = None) -> None:
    """Run the whole chain as the Prefect flow dapo-full and print the report."""
    from dapo_core.config import load_config
    from flows.console import print_chain, print_markdown
    from flows.prefect_settings import apply_prefect_settings
    from tasks.run import check_start

    check_start(load_config(config, overrides or ()))
    apply_prefect_settings()
    print_chain()
    logger.info("starting Prefect")
    from flows.prefect_server import provide_prefect_api

    wait_for_api = provide_prefect_api()
    from flows.dapo_full import dapo_full

    wait_for_api()
    result = dapo_full(str(config), tuple(overrides or ()))
    report = Path(result["run"]) / "report"
    print_markdown((report / "report.md").read_text(encoding="utf-8"))
    typer.secho(f"\n{result['verdict']}\nReport with plots: {report / 'report.html'}", bold=True)


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


@app.command("prepare-data", epilog="Example: dapo prepare-data configs/arith_cpu.yaml --output data")
def prepare_data(
    config: ConfigArgument,
    output: Annotated[Path, typer.Option(help="Folder to write to; must not hold files.")],
    overrides: SetOption = None,
) -> None:
    """Write train.parquet and the held-out set of a recipe."""
    from dapo_core.config import load_config
    from tasks.dataset import build_dataset

    counts = build_dataset(load_config(config, overrides or ()), _new_folder(output))
    typer.echo(f"{output}: {counts['train_rows']} training and {counts['eval_rows']} held-out problems")


@app.command(
    "fetch-model", epilog="Example: dapo fetch-model configs/arith_cpu.yaml --data d/train.parquet --output m"
)
def fetch_model(
    config: ConfigArgument,
    data: Annotated[Path, typer.Option(help="Training parquet that the warm start learns from.")],
    output: Annotated[Path, typer.Option(help="Model folder to write.")],
    overrides: SetOption = None,
) -> None:
    """Build and warm up the model of a recipe."""
    from dapo_core.config import load_config
    from dapo_core.data import read_rows
    from dapo_core.errors import ConfigError
    from dapo_core.warm_start import WarmStartRecipe, build_model

    settings = load_config(config, overrides or ())
    if settings.model.source != "recipe":
        raise ConfigError(
            f"model.source={settings.model.source} has nothing to build; model.path is used as it is"
        )
    recipe = WarmStartRecipe(**settings.model.recipe.model_dump())
    metrics = build_model(read_rows(data), output, recipe, settings.run.seed)
    typer.echo(f"{output}: {metrics['parameters']:,} parameters, final loss {metrics['final_loss']:.3f}")


@app.command(epilog="Example: dapo train configs/arith_cpu.yaml --data d/train.parquet --model m --output t")
def train(
    config: ConfigArgument,
    data: Annotated[Path, typer.Option(help="Training parquet.")],
    model: Annotated[Path, typer.Option(help="Hugging Face model folder.")],
    output: Annotated[Path, typer.Option(help="Folder for checkpoints and metrics.jsonl; one with them resumes.")],
    held_out: Annotated[
        Path | None, typer.Option(help="Held-out set that validation.every asks: parquet, or MATH-500 jsonl.")
    ] = None,
    overrides: SetOption = None,
) -> None:
    """Train a model with DAPO. Killed at any moment, the same command continues from the last checkpoint."""
    from dapo_core.config import load_config
    from dapo_core.trainer import train as train_model
    from flows.progress import TrainingProgress

    settings = load_config(config, overrides or ())
    with TrainingProgress(settings.train.total_steps) as progress:
        result = train_model(settings, data, model, output, progress.on_step, held_out)
    typer.echo(f"{result.checkpoint}: {result.steps} training steps, {result.policy_version} optimizer steps")


@app.command(epilog="Example: dapo merge t/checkpoints/step_000040 merged --dtype bfloat16")
def merge(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="SOURCE",
            help="Checkpoint, output folder of dapo train, or actor folder of verl; one of each node with shards.",
        ),
    ],
    target: Annotated[Path, typer.Argument(help="New model folder.")],
    dtype: Annotated[MergeDtype, typer.Option(help="keep: as trained, which is float32.")] = "keep",
    checkpoint: Annotated[
        CheckpointChoice,
        typer.Option(help="Of an output folder: the last one, or that of the highest validation/accuracy."),
    ] = "latest",
    max_shard_bytes: Annotated[int, typer.Option(min=1024, help="Size of an output file.")] = 5_000_000_000,
    verify_logits: Annotated[
        bool,
        typer.Option(
            "--verify-logits", help="Also run the merged and the unmerged weights; takes memory for one."
        ),
    ] = False,
) -> None:
    """Merge FSDP shards, ours or verl's, into a Hugging Face folder that transformers and vLLM load."""
    from dapo_core.merge import merge_checkpoint
    from flows.progress import bytes_progress

    with bytes_progress("merge") as on_file:
        sizes = merge_checkpoint(sources, target, dtype, max_shard_bytes, on_file, verify_logits, checkpoint)
    typer.echo(
        f"{target}: {sizes['tensors']} tensors, {sizes['parameters']:,} parameters, {sizes['bytes']:,} bytes "
        f"in {sizes['shards']} file{'s' if sizes['shards'] > 1 else ''}, read back and verified"
        + (", logits equal" if verify_logits else "")
    )


@app.command(
    epilog="Example: VLLM_API_KEY=secret dapo serve merged --config configs/arith_cpu.yaml --set serve.port=8000"
)
def serve(
    model: Annotated[Path, typer.Argument(help="Hugging Face model folder.")],
    config: Annotated[Path | None, typer.Option(help="Recipe whose section serve applies.")] = None,
    overrides: SetOption = None,
) -> None:
    """Serve a model with vLLM as the evaluation does, until interrupted.

    Several servers (serve.num_servers) write to serve-PID.log files in the store's folder .logs.
    """
    from dapo_core.config import load_config_or_defaults
    from tasks.serve_model import serve_until_interrupted

    # Without a recipe there are no prompts and responses that must fit.
    lengths = [] if config else ["data.max_prompt_tokens=1", "evaluate.max_response_tokens=1"]
    settings = load_config_or_defaults(config, [*lengths, *(overrides or ())])
    log_path = Path(settings.store.path) / ".logs" / f"serve-{os.getpid()}.log"
    serve_until_interrupted(model, settings.serve, log_path, dict(os.environ))


@app.command(
    "eval",
    epilog="Example: dapo eval --base-url http://127.0.0.1:8000 --dataset math500 --output before. "
    "Two servers, four samples, own file: dapo eval --base-url http://a:8000 --base-url http://b:8000 "
    "--data d/eval.parquet --output before --set evaluate.num_samples=4 --set evaluate.temperature=0.6. "
    "As AISBench's guide: dapo eval --base-url http://127.0.0.1:8000 --dataset math500 --output before "
    "--set evaluate.api=completions",
)
def evaluate(
    base_url: Annotated[
        list[str],
        typer.Option(help="Address of an OpenAI-compatible server; several of one model share the work."),
    ],
    output: Annotated[Path, typer.Option(help="Results folder; an unfinished one is continued.")],
    dataset: Annotated[
        str | None, typer.Option(help=f"Known set whose rows are counted: {', '.join(DATASETS)}.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|SOURCE",
            help="Parquet, jsonl or json; or hf:ORG/NAME/FILE, modelscope:ORG/NAME/FILE, https://..., each with "
            "#sha256=DIGEST. Most datasets have a source of their own.",
        ),
    ] = None,
    model_name: Annotated[str, typer.Option(help="Served model name.")] = "policy",
    config: Annotated[Path | None, typer.Option(help="Recipe whose section evaluate applies.")] = None,
    overrides: SetOption = None,
) -> None:
    """Ask a served model every held-out item; the API key is read from VLLM_API_KEY."""
    from dapo_core.config import load_config_or_defaults
    from eval.run import evaluate as run_evaluation
    from tasks.evaluation_settings import endpoint_of, limits_of, sampling_of, served_model_identity, set_of
    from tasks.serve_model import API_KEY_VARIABLE, Server

    chosen = [f"evaluate.benchmark={dataset}"] if dataset is not None else []
    settings = load_config_or_defaults(config, [*(overrides or ()), *chosen]).evaluate
    evaluation_set = set_of(data, settings)
    servers = [Server(url, model_name, os.environ.get(API_KEY_VARIABLE, "")) for url in base_url]
    summary = run_evaluation(
        evaluation_set,
        [endpoint_of(server) for server in servers],
        sampling_of(settings),
        output,
        limits=limits_of(settings),
        model_digest=served_model_identity(servers),
        max_failed_ratio=settings.max_failed_ratio,
    )
    typer.echo(
        f"{output}: accuracy {summary.accuracy:.1%} of {summary.n} (AISBench's rule "
        f"{summary.aisbench['accuracy']:.1%}), no answer {summary.no_answer_rate:.1%}, "
        f"truncated {summary.truncated_rate:.1%}, failed requests {summary.request_failed_rate:.1%}"
    )


@app.command(epilog="Example: dapo grade before/results.jsonl")
def grade(
    results: Annotated[Path, typer.Argument(help="Results folder of dapo eval, or its results.jsonl.")],
) -> None:
    """Grade the responses of an evaluation again, without asking the model, and say which verdicts changed."""
    from eval.regrade import describe, regrade

    typer.echo(describe(regrade(results)))


@app.command(epilog="Example: dapo report --before before --after after --metrics t/metrics.jsonl --output report")
def report(
    before: Annotated[Path, typer.Option(help="Results folder of dapo eval.")],
    after: Annotated[Path, typer.Option(help="Results folder of dapo eval.")],
    output: Annotated[Path, typer.Option(help="Folder for report.json, report.md and report.html.")],
    metrics: Annotated[Path | None, typer.Option(help="metrics.jsonl of the training between the two.")] = None,
    title: Annotated[str, typer.Option(help="Heading of the report.")] = "Before/after report",
) -> None:
    """Compare two evaluations item by item and write the report."""
    from eval.report import REPORT_PAGE, render_markdown, write_report
    from flows.console import print_markdown

    content = write_report(before, after, metrics, output, stages={}, artifacts={}, title=title)
    print_markdown(render_markdown(content))
    typer.secho(f"\nReport with plots: {output / REPORT_PAGE}\n{content['verdict']}", bold=True)


@app.command(epilog="Example: dapo compare before after; dapo compare --history monday tuesday .dapo")
def compare(
    results: Annotated[
        list[Path],
        typer.Argument(
            metavar="RESULTS", help="BEFORE and AFTER, results folders of dapo eval; any number with --history."
        ),
    ],
    is_history: Annotated[
        bool,
        typer.Option(
            "--history",
            help="Runs over time: results folders, reports, stores of runs. Prints a table, writes history.html.",
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for report.json, report.md and report.html, or for history.html (default: .)."),
    ] = None,
) -> None:
    """Compare evaluations of the same items: two of them pair by pair, or with --history many over time."""
    if is_history:
        _print_history(results, output or Path())
        return
    if len(results) != 2:
        raise typer.BadParameter(f"BEFORE and AFTER are needed, {len(results)} given; for more, add --history")
    if output is not None:
        report(results[0], results[1], output)
        return
    from eval.compare import compare as compare_results
    from eval.report import make_report, render_markdown
    from flows.console import print_markdown

    content = make_report(compare_results(*results), [], {}, {}, "Before/after comparison")
    print_markdown(render_markdown(content))
    typer.secho(f"\n{content['verdict']}", bold=True)


def _print_history(paths: list[Path], output: Path) -> None:
    from eval.history import HISTORY_PAGE, write_history
    from flows.console import print_markdown

    print_markdown(write_history(paths, output))
    typer.secho(f"\nHistory with a plot: {output / HISTORY_PAGE}", bold=True)


def _new_folder(path: Path) -> Path:
    from dapo_core.errors import ConfigError

    if path.exists() and any(path.iterdir()):
        raise ConfigError(f"--output {path} already holds files; name a new folder")
    path.mkdir(parents=True, exist_ok=True)
    return path


if __name__ == "__main__":
    main()
