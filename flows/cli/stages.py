"""The stages as commands on plain paths, without Prefect; the chain runs these as child processes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flows.cli.options import ConfigArgument, SetOption

if TYPE_CHECKING:
    from flows.config import Config

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

CheckpointChoice = Literal["latest", "best"]
MergeDtype = Literal["keep", "float32", "bfloat16", "float16"]


@app.command(
    "prepare-data",
    epilog="Example: dapo prepare-data configs/arith_cpu.yaml --output data",
    short_help="Write the training and the held-out set of a recipe.",
)
def prepare_data(
    config: ConfigArgument,
    output: Annotated[Path, typer.Option(help="Folder to write to; must not hold files.")],
    overrides: SetOption = None,
) -> None:
    """Write train.parquet and the held-out set of a recipe."""
    from flows.config import load_config
    from tasks.data.prepare import build_dataset

    counts = build_dataset(load_config(config, overrides or ()), _new_folder(output))
    typer.echo(f"{output}: {counts['train_rows']} training and {counts['eval_rows']} held-out problems")


@app.command(
    "fetch-model",
    epilog="Example: dapo fetch-model configs/arith_cpu.yaml --data d/train.parquet --output m",
    short_help="Fetch the model of a recipe, or build it.",
)
def fetch_model(
    config: ConfigArgument,
    output: Annotated[Path, typer.Option(help="Model folder to write; a download continues what it holds.")],
    data: Annotated[
        Path | None, typer.Option(help="Training parquet that the warm start of model.source=recipe learns from.")
    ] = None,
    commit: Annotated[str | None, typer.Option(help="Refuse any other commit than this one.")] = None,
    overrides: SetOption = None,
) -> None:
    """Fetch the model of a recipe from its hub or web server; with model.source=recipe build and warm it up."""
    from dapo_core.errors import ConfigError
    from flows.config import load_config

    settings = load_config(config, overrides or ())
    if settings.model.source == "path":
        raise ConfigError("model.source=path has nothing to fetch; model.path is used as it is")
    if settings.model.source == "recipe":
        _build_model(settings, data, _new_folder(output))
        return
    from flows.progress import download_progress
    from tasks.fetched_model import fetch_model_files

    with download_progress() as on_progress:
        snapshot = fetch_model_files(settings.model, _folder(output), commit, on_progress)
    typer.echo(f"{output}: {snapshot.repo} at {snapshot.commit}, digests verified")


def _build_model(settings: Config, data: Path | None, folder: Path) -> None:
    # Before torch is loaded: threads that spin while they wait starve each other where cores are shared.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from dapo_core.errors import ConfigError
    from dapo_core.warm_start import build_model
    from eval.problems.files import iterate_rows

    if data is None:
        raise ConfigError("model.source=recipe learns from training rows; name their file with --data")
    rows = [dict(row) for batch in iterate_rows(data) for row in batch]
    metrics = build_model(rows, folder, settings.model.recipe, settings.run.seed)
    typer.echo(f"{folder}: {metrics['parameters']:,} parameters, final loss {metrics['final_loss']:.3f}")


@app.command(epilog="Example: dapo train configs/arith_cpu.yaml --data d/train.parquet --model m --output t")
def train(
    config: ConfigArgument,
    data: Annotated[Path, typer.Option(help="Training parquet.")],
    model: Annotated[Path, typer.Option(help="Hugging Face model folder.")],
    output: Annotated[Path, typer.Option(help="Folder for checkpoints and metrics.jsonl; one with them resumes.")],
    held_out: Annotated[
        Path | None, typer.Option(help="Held-out set for validation.every: a file that dapo eval reads.")
    ] = None,
    overrides: SetOption = None,
) -> None:
    """Train a model with DAPO. On Ctrl-C or SIGTERM it writes a last checkpoint and ends.

    Stopped, or killed at any moment, the same command continues from the last checkpoint. With train.backend=verl
    or mindspeed-* that trainer is started here; stopped, it continues from the last checkpoint that it wrote.
    """
    from flows.config import load_config
    from flows.progress import TrainingLog

    settings = load_config(config, overrides or ())
    on_step = TrainingLog(settings.train.total_steps).on_step
    if settings.train.backend != "own":
        from tasks.external.launch import Inputs
        from tasks.external.training import train_with_other

        files = Inputs(
            data.absolute(), model.absolute(), _folder(output).absolute(), (held_out or data).absolute()
        )
        other = train_with_other(settings, files, on_step, typer.echo)
        typer.echo(f"{other.path}: {other.step} training steps of {settings.train.backend}")
        return
    from tasks.processes.driver import forked_driver

    with forked_driver(settings, _folder(output)) as restarts:
        from dapo_core.training import train as train_model

        result = train_model(settings, data, model, output, on_step, held_out, restarts)
    typer.echo(f"{result.checkpoint}: {result.steps} training steps, {result.policy_version} optimizer steps")


@app.command(
    epilog="Example: dapo merge t/checkpoints/step_000040 merged --dtype bfloat16",
    short_help="Merge FSDP shards into a model folder.",
)
def merge(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="SOURCE",
            help="Checkpoint, output folder of dapo train, actor folder of verl (one of each node with shards), "
            "or a Hugging Face folder.",
        ),
    ],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="New model folder.")],
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
    config: Annotated[
        Path | None,
        typer.Option(help="Recipe of another trainer, whose own program converts Megatron's weights (external)."),
    ] = None,
) -> None:
    """Merge the FSDP shards of dapo train or verl into a folder that transformers and vLLM load."""
    from dapo_core.merge.run import merge_checkpoint
    from flows.progress import bytes_progress

    with contextlib.ExitStack() as stack:
        if config is not None:
            from flows.config import load_config
            from tasks.external.conversion import converted

            sources = stack.enter_context(converted(load_config(config), sources, target, typer.echo))
        on_bytes = stack.enter_context(bytes_progress("merge"))
        sizes = merge_checkpoint(sources, target, dtype, max_shard_bytes, on_bytes, verify_logits, checkpoint)
    typer.echo(
        f"{target}: {sizes['tensors']} tensors, {sizes['parameters']:,} parameters, {sizes['bytes']:,} bytes "
        f"in {sizes['shards']} file{'s' if sizes['shards'] > 1 else ''}"
        + (", read back from the disk, logits equal" if verify_logits else "")
    )


@app.command(
    epilog="Example: VLLM_API_KEY=secret dapo serve merged --config configs/arith_cpu.yaml --set serve.port=8000",
    short_help="Serve a model with vLLM as the evaluation does.",
)
def serve(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Hugging Face model folder.")],
    config: Annotated[Path | None, typer.Option(help="Recipe whose section serve applies.")] = None,
    overrides: SetOption = None,
) -> None:
    """Serve a model with vLLM as the evaluation does, until interrupted.

    Several servers (serve.num_servers) write to serve-PID.log files in the store's folder .logs.
    """
    from flows.config import load_config_or_defaults
    from tasks.serve_model.servers import serve_until_interrupted

    # Without a recipe there are no prompts and responses that must fit.
    lengths = [] if config else ["data.max_prompt_tokens=1", "evaluate.max_response_tokens=1"]
    settings = load_config_or_defaults(config, [*lengths, *(overrides or ())])
    log_path = Path(settings.store.path) / ".logs" / f"serve-{os.getpid()}.log"
    serve_until_interrupted(model, settings.served, log_path, dict(os.environ))


def _folder(path: Path) -> Path:
    from dapo_core.errors import ConfigError

    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {path} cannot be made: {error.strerror}; name another folder") from None
    return path


def _new_folder(path: Path) -> Path:
    from dapo_core.errors import ConfigError

    if any(_folder(path).iterdir()):
        raise ConfigError(f"--output {path} already holds files; name a new folder")
    return path
