"""What the commands print: plain messages, or in a run of the chain one line per event with time and stage."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

# Loggers of Prefect that repeat what a run's own lines say; its page keeps them, tracebacks included. The last is
# ours, about the page only.
QUIET_LOGGERS = (
    "prefect.flow_runs",
    "prefect.task_runs",
    "prefect._internal",
    "APILogWorker",
    "EventsWorker",
    "tasks.stage_command.page",
)
STAGE_WIDTH = 16


def print_messages() -> None:
    """Send our messages, as they are, to standard output, and steps to a bar where that is a terminal."""
    output = StandardOutput()
    if sys.stdout.isatty():
        from flows.progress import StepBar

        output.addFilter(StepBar())
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[output])
    logging.getLogger("httpx").setLevel(logging.WARNING)


def print_chain() -> None:
    """Have the lines of a run begin with time and stage, without Prefect's lines about the same events."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(stage)s %(message)s", datefmt="%H:%M:%S"))
        handler.addFilter(_admit)


def print_markdown(text: str) -> None:
    """Show Markdown on a terminal; where standard output is none, write it as it is."""
    if not sys.stdout.isatty():
        sys.stdout.write(text)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(text))


class StandardOutput(logging.StreamHandler[TextIO]):
    """Writes to what sys.stdout is at the time, which a progress bar replaces to keep lines above itself.

    Prefect takes the console away from a handler whose class name begins with an underscore.
    """

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stdout


def _admit(record: logging.LogRecord) -> bool:
    from tasks.runs.run import current_stage

    record.stage = f"{current_stage.get():<{STAGE_WIDTH}}"
    if record.name.startswith(QUIET_LOGGERS):
        return False
    return record.levelno >= logging.WARNING or not record.name.startswith("prefect")
