"""Console output: plain messages, or during a run one line per event with time and stage."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from heartbeat import line_shown

# Loggers hidden from the console. Prefect's repeat the run's own lines; its UI keeps them, with
# tracebacks. The last one is ours and writes to the UI only.
QUIET_LOGGERS = (
    "prefect.flow_runs",
    "prefect.task_runs",
    "prefect._internal",
    "APILogWorker",
    "EventsWorker",
    "tasks.execution.command.page",
)
STAGE_WIDTH = 16


def print_messages(is_error: bool = False) -> None:
    """Print log messages to standard output; on a terminal, show training steps as a bar.

    With `is_error`, to standard error.
    """
    output: logging.StreamHandler[TextIO] = (
        logging.StreamHandler() if is_error else StandardOutput()
    )
    if sys.stdout.isatty():
        from flows.progress import StepBar

        output.addFilter(StepBar())
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[output])
    for library in ("httpx", "httpx2"):  # used by huggingface_hub
        logging.getLogger(library).setLevel(logging.WARNING)


def print_chain() -> None:
    """Prefix log lines with time and stage, and hide Prefect's lines about the same events."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(
            logging.Formatter("%(asctime)s %(stage)s %(message)s", datefmt="%H:%M:%S")
        )
        handler.addFilter(_admit)


def print_markdown(text: str) -> None:
    """Render Markdown on a terminal; elsewhere, write it unchanged."""
    if not sys.stdout.isatty():
        sys.stdout.write(text)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(text))


class StandardOutput(logging.StreamHandler[TextIO]):
    """Writes to the current sys.stdout, which a progress bar replaces to keep lines above it.

    Prefect disables console handlers whose class name starts with an underscore.
    """

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stdout

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        line_shown()


def _admit(record: logging.LogRecord) -> bool:
    from tasks.runs.run import current_stage

    record.stage = f"{current_stage.get():<{STAGE_WIDTH}}"
    if record.name.startswith(QUIET_LOGGERS):
        return False
    return record.levelno >= logging.WARNING or not record.name.startswith("prefect")
