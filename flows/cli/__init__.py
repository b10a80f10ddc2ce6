"""The `dapo` command: the whole chain, or one stage on plain paths. Commands import lazily."""

from __future__ import annotations

import errno
import gc
import importlib.metadata
import os
import re
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from flows.cli import chain, cluster, datasets, evaluation, history, migration, operating, stages

UNKNOWN_COMMAND = re.compile(r"No such command '([^']*)'\.")
UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
# From pyproject.toml's extra `chain`; evaluating, grading, comparing and reporting work without it.
CHAIN_MODULES = "peft prefect ray safetensors sqlalchemy torch transformers zlib_ng".split()
ADVICE = (
    "This environment only has the evaluation commands: eval, grade, compare, export and datasets. "
    "For all: pip install '.[chain]' in the project folder, and vLLM for your device "
    "(requirements/); `make demo` installs both for a CPU"
)


# The order of `dapo --help`. Not listed: prepare-data, fetch-model, train and track, which the
# chain runs.
GROUPS = {
    "Chain": (
        "init",
        "import-config",
        "config",
        "plan",
        "simulate",
        "run",
        "adopt",
        "stage",
        "runs",
        "export",
    ),
    "Data and models": ("datasets", "merge", "serve"),
    "Evaluation": ("eval", "grade", "compare"),
    "Operation": ("up", "down", "doctor", "cluster"),
}


class Commands(TyperGroup):
    """Lists commands by group, and adds hints to usage errors.

    `--set` for KEY=VALUE, `show` for a name after `runs` or `datasets`.
    """

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, self.commands))
        for title, names in GROUPS.items():
            rows = [
                (f"{name:{width}}", self.commands[name].get_short_help_str(80)) for name in names
            ]
            with formatter.section(title):
                formatter.write_dl(rows)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:  # the class depends on typer's version
            message, context = str(getattr(error, "message", "")), getattr(error, "ctx", None)
            command, path = getattr(context, "command", None), getattr(context, "command_path", "")
            unknown = UNKNOWN_COMMAND.fullmatch(message)
            # `config` has `show` too, but lists nothing when given alone.
            lists = getattr(command, "invoke_without_command", False)
            lists_and_shows = lists and "show" in getattr(command, "commands", ())
            if "unexpected extra argument" in message and "=" in message:
                if any("--set" in each.opts for each in getattr(command, "params", ())):
                    vars(error)["message"] = (
                        f"{message}; to change a key, use --set SECTION.KEY=VALUE"
                    )
            elif unknown and lists_and_shows:
                vars(error)["message"] = (
                    f"{message} One of them: {path} show {unknown[1]}; all: {path}"
                )
            raise


app = typer.Typer(
    name="dapo",
    cls=Commands,
    help="Train a language model with DAPO and measure whether it got better.",
    epilog="Example: dapo run configs/arith_cpu.yaml --set run.seed=2",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
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
    is_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    pass


for group in (chain, migration, history, datasets, operating, cluster, stages, evaluation):
    app.add_typer(group.app)


def main() -> None:
    """Run the command line. Known errors exit with 2 if the user must act, else with 1."""
    from dapo_core.errors import DapoError
    from downloads import DownloadError
    from durable import FULL_DISK_ERRORS
    from eval import EvaluationError
    from flows.console import print_messages
    from redaction import redact
    from tasks.execution.retries import LASTING_ERRORS, LASTING_EXIT_CODE, describe, exit_code_of

    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # nor bars while loading weights
    # nothing else belongs on standard output
    print_messages(is_error=not {"--json", "--export"}.isdisjoint(sys.argv))
    try:
        app()
    except (DapoError, EvaluationError, DownloadError) as error:
        typer.secho(redact(describe(error)), err=True, fg="red")
        sys.exit(exit_code_of(error))
    except (OSError, *LASTING_ERRORS) as error:  # a bug or a missing file: exit without retry
        if isinstance(error, OSError) and error.errno in UNWRITABLE and error.filename is not None:
            message = f"{error.filename}: {error.strerror}; choose another location"
        elif isinstance(error, OSError) and error.errno in FULL_DISK_ERRORS:
            message = f"{error}; free some space or choose another location, then rerun the command"
        elif not isinstance(error, LASTING_ERRORS):
            raise
        elif getattr(error, "name", None) in CHAIN_MODULES:
            message = f"{error}. {ADVICE}"
        else:
            message = traceback.format_exc()
        typer.secho(redact(message), err=True, fg="red")
        sys.exit(LASTING_EXIT_CODE)
    finally:
        gc.freeze()  # the final garbage collection of Prefect or torch would take a second
