"""The `dapo` command: run or inspect the chain, or run one stage on plain paths. Heavy imports are in commands."""

from __future__ import annotations

import errno
import gc
import importlib.metadata
import os
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from flows.cli import chain, cluster, datasets, evaluation, history, migration, operating, stages

ORDER = (
    *(
        "init",
        "import-config",
        "export-config",
        "run",
        "stage",
        "plan",
        "runs",
        "compare",
        "export",
        "gc",
        "config",
        "datasets",
    ),
    *("up", "down", "doctor", "cluster"),
    *("prepare-data", "fetch-model", "train", "merge", "serve", "eval", "grade", "report", "eval-export"),
)
UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
# From pyproject.toml's extra `chain`; evaluating, grading, comparing and reporting work without it.
CHAIN_MODULES = ("math_verify", "prefect", "ray", "safetensors", "sqlalchemy", "torch", "transformers", "zlib_ng")
ADVICE = (
    "This environment only has the evaluation commands: eval, grade, report, compare and datasets. For all: "
    "pip install '.[chain]' in the project folder, and vLLM for your device (requirements/); `make demo` installs "
    "both for a CPU"
)


class Commands(TyperGroup):
    """Lists chain and run commands first, then services, then stages on plain paths."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(self.commands, key=ORDER.index)

    def invoke(self, ctx: Any) -> Any:
        """Add a hint to usage errors.

        KEY=VALUE gets `--set`; a run or dataset after `dapo runs` or `dapo datasets` gets the `show` command.
        """
        try:
            return super().invoke(ctx)
        except Exception as error:  # the class depends on typer's version
            message, context = str(getattr(error, "message", "")), getattr(error, "ctx", None)
            has_set = context is not None and any("--set" in each.opts for each in context.command.params)
            if has_set and "unexpected extra argument" in message and "=" in message:
                vars(error)["message"] = f"{message}; to change a key, use --set SECTION.KEY=VALUE"
            quoted = message.removeprefix("No such command ").removesuffix(".")  # with "Did you mean" it has a ?
            is_unknown = quoted != message and not quoted.endswith("?")
            if is_unknown and context is not None and lists_and_shows(context.command):
                path = context.command_path
                vars(error)["message"] = f"{message} One of them: {path} show {quoted[1:-1]}; all: {path}"
            raise


def lists_and_shows(command: Any) -> bool:
    """True for `runs` and `datasets`, which list by themselves and have a `show` command."""
    return bool(getattr(command, "invoke_without_command", False)) and "show" in command.commands


app = typer.Typer(
    name="dapo",
    cls=Commands,
    help="Train a language model with DAPO and measure whether it got better.",
    epilog="Example: dapo run configs/arith_cpu.yaml --set run.seed=2",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def print_version(is_wanted: bool) -> None:
    """Print the version and exit."""
    if is_wanted:
        typer.echo(f"dapo-pipeline {importlib.metadata.version('dapo-pipeline')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    pass


for group in (chain, migration, history, datasets, stages, evaluation, operating, cluster):
    app.add_typer(group.app)


def main() -> None:
    """Run the command line. Known errors print a message and exit with 2 if the user must act, else 1."""
    from dapo_core.errors import DapoError
    from downloads import DownloadError
    from durable import FULL_DISK_ERRORS
    from eval import EvaluationError
    from flows.console import print_messages
    from redaction import redact
    from tasks.retries import LASTING_ERRORS, LASTING_EXIT_CODE, describe, exit_code_of

    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # also hides bars while loading weights
    print_messages()
    try:
        app()
    except (DapoError, EvaluationError, DownloadError) as error:
        typer.secho(redact(describe(error)), err=True, fg="red")
        sys.exit(exit_code_of(error))
    except (OSError, *LASTING_ERRORS) as error:  # a bug or a missing file: exit without retry
        if isinstance(error, OSError) and error.errno in UNWRITABLE and error.filename is not None:
            typer.secho(f"{error.filename}: {error.strerror}; choose another location", err=True, fg="red")
            sys.exit(LASTING_EXIT_CODE)
        if isinstance(error, OSError) and error.errno in FULL_DISK_ERRORS:
            typer.secho(
                f"{error}; free some space or choose another location, then rerun the command", err=True, fg="red"
            )
            sys.exit(LASTING_EXIT_CODE)
        if not isinstance(error, LASTING_ERRORS):
            raise
        if getattr(error, "name", None) in CHAIN_MODULES:
            typer.secho(f"{error}. {ADVICE}", err=True, fg="red")
        else:
            traceback.print_exc()
        sys.exit(LASTING_EXIT_CODE)
    finally:
        if "prefect" in sys.modules:  # skip the final garbage collection, which takes 1 s with Prefect loaded
            gc.freeze()
