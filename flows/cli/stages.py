"""Stage commands on plain paths, without Prefect; the chain runs them as child processes."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flows.cli.options import ConfigArgument, SetOption, StoreOption
from flows.services import DEFAULT_STORE
from heartbeat import heartbeat

if TYPE_CHECKING:
    from flows.config import Config
    from tasks.execution.progress import Progress

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

CheckpointChoice = Literal["latest", "best"]
MergeDtype = Literal["keep", "float32", "bfloat16", "float16"]


@app.command(
    "prepare-data",
    epilog="Example: dapo prepare-data configs/arith_cpu.yaml --output data",
    short_help="Write a recipe's training and held-out problems.",
)
@heartbeat(lambda: "preparing the data")
def prepare_data(
    config: ConfigArgument,
    output: Annotated[Path, typer.Option(help="Output folder; must be empty or new.")],
    overrides: SetOption = None,
) -> None:
    """Write train.parquet and the held-out problems of a recipe."""
    from flows.config import load_config
    from tasks.data.prepare import build_dataset

    settings = load_config(config, overrides or ())
    with _new_folder(output):
        counts = build_dataset(settings, output)
    typer.echo(
        f"{output}: {counts['train_rows']} training and {counts['eval_rows']} held-out problems"
    )


@app.command(
    "fetch-model",
    epilog="Example: dapo fetch-model configs/arith_cpu.yaml --data d/train.parquet --output m",
    short_help="Fetch or build a recipe's model.",
)
@heartbeat(lambda: "reading the recipe")
def fetch_model(
    config: ConfigArgument,
    output: Annotated[
        Path, typer.Option(help="Model folder to write; an unfinished download in it is resumed.")
    ],
    data: Annotated[
        Path | None,
        typer.Option(help="Training parquet for the warm start of model.source=recipe."),
    ] = None,
    commit: Annotated[str | None, typer.Option(help="Fail unless the commit is this one.")] = None,
    progress: Annotated[
        Path | None, typer.Option(hidden=True, help="Append progress here, for a caller.")
    ] = None,
    overrides: SetOption = None,
) -> None:
    """Fetch a recipe's model; with model.source=recipe, build and warm-start it."""
    from flows.config import load_config
    from flows.progress import download_progress, reporter

    settings, report = load_config(config, overrides or ()), reporter(progress)
    if settings.model.source == "recipe":
        with _new_folder(output):
            _build_model(settings, data, output, report)
        return
    from tasks.fetched_model import fetch_model_files, link_model_folder, model_name

    if settings.model.source == "path":
        with _new_folder(output):
            link_model_folder(settings.model, output)
        typer.echo(f"{output}: the files of {settings.model.path}")
        return
    with _output_folder(output), heartbeat(lambda: f"fetching {model_name(settings.model)}"):
        on_progress = download_progress(report)
        snapshot = fetch_model_files(settings.model, output, commit, on_progress)
    typer.echo(f"{output}: {snapshot.repo} at {snapshot.commit}, digests verified")


@heartbeat(lambda: "building the model and its tokenizer")
def _build_model(
    settings: Config, data: Path | None, folder: Path, report: Callable[[Progress], None]
) -> None:
    from dapo_core.machine.environment import brief_spinning, set_defaults

    set_defaults(brief_spinning(os.environ))  # before torch is imported
    from dapo_core.demo.warm_start import build_model
    from dapo_core.errors import ConfigError
    from eval.problems.files import iterate_rows
    from tasks.execution.progress import Progress

    def on_step(step: int, num_steps: int, loss: float) -> None:
        report(Progress("warm start step", step, num_steps, f"loss {loss:.3f}"))

    if data is None:
        raise ConfigError("model.source=recipe needs training rows; give their file with --data")
    rows = list(map(dict, iterate_rows(data)))
    metrics = build_model(
        rows, folder, settings.model.recipe, settings.run.seed, data.parent, on_step=on_step
    )
    typer.echo(
        f"{folder}: {metrics['parameters']:,} parameters, {metrics['steps']} steps, "
        f"final loss {metrics['final_loss']:.3f}"
    )


@app.command(
    epilog="Example: dapo train configs/arith_cpu.yaml --data d/train.parquet --model m --output t"
)
def train(
    config: ConfigArgument,
    data: Annotated[Path, typer.Option(help="Training parquet.")],
    model: Annotated[Path, typer.Option(help="Hugging Face model folder.")],
    output: Annotated[
        Path, typer.Option(help="Folder for checkpoints and metrics.jsonl; resumes if it has them.")
    ],
    held_out: Annotated[
        Path | None,
        typer.Option(help="Held-out problems for validation.every: a file that dapo eval reads."),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(help="Output of a training with train.record_draws: train on its draws."),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Log no progress; metrics.jsonl has it.")
    ] = False,
    overrides: SetOption = None,
) -> None:
    """Train a model with DAPO. On Ctrl-C or SIGTERM it writes a last checkpoint and exits.

    After a stop or a kill, the same command resumes from the last checkpoint.
    """
    from dapo_core.errors import counted
    from flows.config import load_config

    settings = load_config(config, overrides or ())
    tracked = partial(_reported, settings, output, quiet, _track_words(config, overrides))
    with heartbeat(lambda: "loading torch and Ray"):
        from dapo_core.training import train as train_model
        from tasks.fetched_model import require_additions

    require_additions(settings.model, model)
    with tracked() as on_step:
        result = train_model(settings, data, model, output, on_step, held_out, replay=replay)
    steps = counted(result.steps, "training step")
    updates = counted(result.policy_version, "optimizer step")
    typer.echo(f"{result.checkpoint}: {steps}, {updates}")


@contextlib.contextmanager
def _reported(
    settings: Config, output: Path, is_quiet: bool, words: list[str]
) -> Iterator[Callable[[int, dict[str, float]], None]]:
    """Run the recipe's trackers beside a training; yields what to call after each step.

    Leaves no output folder if the training's checks fail.
    """
    from tasks.execution.progress import StepProgress
    from tasks.tracking.processes import tracking

    steps = StepProgress(settings.train.total_steps)
    trackers_of = tracking(settings.train.trackers, output, [str(output), *words])
    with _output_folder(output), trackers_of as trackers:

        def on_step(step: int, metrics: dict[str, float]) -> None:
            if not is_quiet:
                steps.after(step, metrics).log()
            trackers.check()

        yield on_step


def _track_words(config: Path | None, overrides: list[str] | None) -> list[str]:
    """Options of `dapo track` for a configuration."""
    changes = [word for change in overrides or () for word in ("--set", change)]
    return [*(["--config", str(config)] if config else ()), *changes]


@app.command(
    epilog="Example: dapo track latest; dapo track t --config configs/arith_cpu.yaml",
    short_help="Send a training's metrics to its trackers.",
)
def track(
    training: Annotated[
        str,
        typer.Argument(
            metavar="TRAINING",
            help="Run (id, its start or end, folder, latest), or, with --config, the output folder "
            "of dapo train.",
        ),
    ],
    config: Annotated[Path | None, typer.Option(help="Recipe of an output folder.")] = None,
    store: StoreOption = DEFAULT_STORE,
    tracker: Annotated[str | None, typer.Option(hidden=True, help="Only this one, here.")] = None,
    overrides: SetOption = None,
) -> None:
    """Send a training's metrics, responses and results to the trackers in train.trackers.

    Follows a training in progress until it ends. What was sent before is not sent again. `dapo
    train` runs this beside each training with trackers, and the chain once more after its report.
    """
    from dapo_core.errors import ConfigError
    from flows.config import load_config
    from tasks.runs.history import CONFIG_FILE, find_run, read_report, training_folder
    from tasks.tracking.processes import Trackers, require_trackers
    from tasks.tracking.tracker import send_training

    report = None
    if config is None:
        run = find_run(store, training)
        folder, report = training_folder(run), read_report(run)
    else:
        folder = Path(training)
    settings = load_config(config or run.folder / CONFIG_FILE, overrides or ())
    if tracker is not None:
        from tasks.runs.report import results_of

        results = results_of(report, settings) if report else {}
        send_training(settings, tracker, folder, results)
        return
    if not settings.train.trackers:
        raise ConfigError(
            "train.trackers is empty: name trackers with --set 'train.trackers=[...]'"
        )
    require_trackers(settings.train.trackers)
    with Trackers(folder) as trackers:
        words = [training, *_track_words(config, overrides), "--store", str(store)]
        trackers.start(settings.train.trackers, words)
        if not trackers.wait(math.inf):
            raise typer.Exit(1)


@app.command(
    epilog="Example: dapo merge t/checkpoints/step_000040 merged --dtype bfloat16",
    short_help="Merge FSDP shards into a model folder.",
)
def merge(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="SOURCE",
            help="Checkpoint, output folder of dapo train, actor folder of verl (one per node with "
            "shards), or a Hugging Face folder.",
        ),
    ],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="New model folder.")],
    dtype: Annotated[MergeDtype, typer.Option(help="keep: as trained (float32).")] = "keep",
    checkpoint: Annotated[
        CheckpointChoice,
        typer.Option(
            help="For an output folder: the last, or the one with the highest validation/accuracy."
        ),
    ] = "latest",
    max_shard_bytes: Annotated[
        int, typer.Option(min=1024, help="Maximum size of an output file.")
    ] = 5_000_000_000,
    verify_logits: Annotated[
        bool,
        typer.Option(
            "--verify-logits",
            help="Also compare logits of merged and unmerged weights; needs memory for one model.",
        ),
    ] = False,
    base: Annotated[
        Path | None, typer.Option(help="Base model of an adapter, if it has moved.")
    ] = None,
) -> None:
    """Merge FSDP shards of dapo train or verl into a folder that transformers and vLLM can load."""
    from dapo_core.merge.run import merge_checkpoint
    from flows.progress import bytes_progress

    with bytes_progress("merge") as on_bytes:
        sizes = merge_checkpoint(
            sources, target, dtype, max_shard_bytes, on_bytes, verify_logits, checkpoint, base
        )
    typer.echo(
        f"{target}: {sizes['tensors']} tensors, {sizes['parameters']:,} parameters, "
        f"{sizes['bytes']:,} bytes in {sizes['shards']} file{'s' if sizes['shards'] > 1 else ''}"
        + (", read back and logits equal" if verify_logits else "")
    )


@app.command(
    epilog="Example: VLLM_API_KEY=secret dapo serve merged --set serve.port=8000",
    short_help="Serve a model with vLLM, as for an evaluation.",
)
@heartbeat(lambda: "checking the model folder")
def serve(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Hugging Face model folder.")],
    config: Annotated[
        Path | None, typer.Option(help="Recipe whose `serve` section to use.")
    ] = None,
    overrides: SetOption = None,
) -> None:
    """Serve a model with vLLM, as for an evaluation, until interrupted."""
    from flows.config import load_config_or_defaults
    from tasks.serve_model.servers import serve_until_interrupted

    # Without a recipe, no prompt and response lengths have to fit.
    lengths = [] if config else ["data.max_prompt_tokens=1", "evaluate.max_response_tokens=1"]
    settings = load_config_or_defaults(config, [*lengths, *(overrides or ())])
    serve_until_interrupted(model, settings.served, os.environ)


@contextlib.contextmanager
def _output_folder(path: Path) -> Iterator[None]:
    """Create an output folder, and remove it if the block fails before any file is in it."""
    from dapo_core.errors import ConfigError

    is_created = not path.exists()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot create --output {path}: {error.strerror}; choose another folder"
        ) from None
    try:
        yield
    except BaseException:
        if is_created and not any(each.is_file() for each in path.rglob("*")):
            shutil.rmtree(path)
        raise


@contextlib.contextmanager
def _new_folder(path: Path) -> Iterator[None]:
    from dapo_core.errors import ConfigError

    with _output_folder(path):
        if any(path.iterdir()):
            raise ConfigError(f"--output {path} is not empty; choose a new folder")
        yield
