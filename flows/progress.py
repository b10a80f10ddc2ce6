"""Progress of long commands: a bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import atexit
import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

logger = logging.getLogger(__name__)

TELL_SECONDS = 30.0
STEP_LINE = re.compile(r"(?P<what>[a-z ]+) step (?P<done>\d+)(?:/| of )(?P<total>\d+): (?P<state>.*)")


class TrainingProgress:
    """What a person wants to see of each training step."""

    def __init__(self, total_steps: int) -> None:
        self.total_steps = total_steps
        self.started = time.monotonic()
        self.first_step: int | None = None
        self.bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[state]}"),
            console=Console(),
            disable=not Console().is_terminal,
        )

    def __enter__(self) -> TrainingProgress:
        self.bar.start()
        self.task = self.bar.add_task("training", total=self.total_steps, state="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        """Show a finished training step."""
        state = describe_step(metrics)
        self.bar.update(self.task, completed=step, state=state)
        if self.bar.disable:
            logger.info("training step %d/%d: %s%s", step, self.total_steps, state, self._remaining(step))

    def _remaining(self, step: int) -> str:
        if self.first_step is None or step <= self.first_step:  # a restart goes back to a checkpoint
            self.first_step, self.started = step, time.monotonic()
            return ""
        pace = (time.monotonic() - self.started) / (step - self.first_step)
        return f", about {pace * (self.total_steps - step):.0f} s left"


class StepBar(logging.Filter):
    """Turns the step lines of child processes into a bar; every other line passes and stays above it."""

    def __init__(self) -> None:
        super().__init__()
        self.bar: Progress | None = None
        atexit.register(self.close)  # a bar left open leaves the terminal without a cursor

    def filter(self, record: logging.LogRecord) -> bool:
        match = STEP_LINE.fullmatch(record.getMessage())
        if match is None:
            if record.levelno >= logging.WARNING:  # the stage that the bar belongs to may have failed
                self.close()
            return True
        done, total = int(match["done"]), int(match["total"])
        if self.bar is None:
            self.bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[state]}"),
            )
            self.task = self.bar.add_task(match["what"], total=total, state="")
            self.bar.start()
        self.bar.update(self.task, completed=done, state=match["state"], refresh=True)
        if done == total:
            self.close()
        return False

    def close(self) -> None:
        """Leave the bar as it stands, so that another can begin."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def describe_step(metrics: dict[str, float]) -> str:
    """One step in a phrase: share right among everything sampled, length, groups kept, seconds."""
    parts = [f"right {metrics['sampler/accuracy']:.1%}"]
    if "response_length/mean" in metrics:
        parts.append(f"length {metrics['response_length/mean']:.0f} tokens")
    parts.append(f"kept {metrics['sampler/kept_groups']:.0f} groups")
    parts.append(f"{metrics['timing_s/step']:.1f} s")
    return ", ".join(parts)


@contextmanager
def bytes_progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Yield `on_progress(bytes_done, bytes_in_all)`; without a terminal a line each 10 % or TELL_SECONDS."""
    console = Console()
    tenths, told_at = 0, time.monotonic()
    with Progress(
        TextColumn(label), BarColumn(), DownloadColumn(), console=console, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(label, total=None)

        def on_progress(done: int, total: int) -> None:
            nonlocal tenths, told_at
            bar.update(task, completed=done, total=total)
            is_due = 10 * done >= (tenths + 1) * total or time.monotonic() - told_at >= TELL_SECONDS
            if bar.disable and is_due:
                tenths, told_at = 10 * done // total if total else 10, time.monotonic()
                logger.info("%s: %s of %s", label, decimal(done), decimal(total))

        yield on_progress
