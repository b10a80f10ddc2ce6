"""Progress of long commands: a bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import atexit
import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as ProgressBar

from downloads import Progress

logger = logging.getLogger(__name__)

LOG_SECONDS = 30.0
DOWNLOAD_LOG_SECONDS = 2.0
STEP_LINE = re.compile(
    r"(?P<what>[a-z ]+) (?:step|percent) (?P<done>\d+)(?:/| of )(?P<total>\d+): (?P<state>.*)"
)

STEP_PARTS = {
    "sampler/accuracy": "right {:.1%}",
    "critic/score/mean": "score {:.3f}",
    "response_length/mean": "length {:.0f} tokens",
    "sampler/kept_groups": "kept {:.0f} groups",
    "timing_s/step": "{:.1f} s",
}


class TrainingLog:
    """Logs a line per training step, which `StepBar` and the Prefect UI show as a bar."""

    def __init__(self, total_steps: int) -> None:
        self.total_steps = total_steps
        self.first_step: int | None = None
        self.began = 0.0

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        """Log a finished training step; 0 is the validation before training."""
        if step == 0:
            words = "validated before training"
            if "validation/accuracy" in metrics:
                words = (
                    f"accuracy {metrics['validation/accuracy']:.1%} on held-out problems before "
                    "training"
                )
            logger.info("training step 0/%d: %s", self.total_steps, words)
            return
        shown = {name: text for name, text in STEP_PARTS.items() if name in metrics}
        if "sampler/kept_groups" in shown:  # missing from other trainers
            shown.pop("critic/score/mean", None)
        parts = [text.format(metrics[name]) for name, text in shown.items()]
        if (
            self.first_step is None or step <= self.first_step
        ):  # a restart resumes from a checkpoint
            self.first_step, self.began = step, time.monotonic()
        else:
            pace = (time.monotonic() - self.began) / (step - self.first_step)
            parts.append(f"about {pace * (self.total_steps - step):.0f} s left")
        logger.info("training step %d/%d: %s", step, self.total_steps, ", ".join(parts))


class StepBar(logging.Filter):
    """Shows step lines as a bar; other lines pass and stay above it."""

    def __init__(self) -> None:
        super().__init__()
        self.bar: ProgressBar | None = None
        atexit.register(self.close)  # an open bar hides the terminal's cursor

    def filter(self, record: logging.LogRecord) -> bool:
        match = STEP_LINE.fullmatch(record.getMessage())
        if match is None:
            if record.levelno >= logging.WARNING:  # the bar's stage may have failed
                self.close()
            return True
        done, total = int(match["done"]), int(match["total"])
        if self.bar is None:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            self.bar = ProgressBar(*columns, TextColumn("{task.fields[state]}"))
            self.task = self.bar.add_task(match["what"], total=total, state="")
            self.bar.start()
        self.bar.update(self.task, completed=done, state=match["state"], refresh=True)
        if done == total:
            self.close()
        return False

    def close(self) -> None:
        """Stop the bar where it is, so that another can start."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


@contextmanager
def bytes_progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Yield `on_progress(bytes_done, total_bytes)`; without a terminal, logs every 10 % or
    LOG_SECONDS.
    """
    console = Console()
    tenths, logged_at = 0, time.monotonic()
    with ProgressBar(
        TextColumn(label),
        BarColumn(),
        DownloadColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task(label, total=None)

        def on_progress(done: int, total: int) -> None:
            nonlocal tenths, logged_at
            bar.update(task, completed=done, total=total)
            is_due = (
                10 * done >= (tenths + 1) * total or time.monotonic() - logged_at >= LOG_SECONDS
            )
            if bar.disable and is_due:
                tenths, logged_at = 10 * done // total if total else 10, time.monotonic()
                logger.info("%s: %s of %s", label, decimal(done), decimal(total))

        yield on_progress


@contextmanager
def download_progress() -> Iterator[Callable[[Progress], None]]:
    """Yield a callback for downloads: a bar on a terminal, else a log line per percent, at most
    every 2 s.

    `StepBar` and the Prefect UI show these lines as a bar.
    """
    console = Console()
    began, logged_at, percent = time.monotonic(), 0.0, -1
    first_bytes: int | None = None
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with ProgressBar(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("download", total=None)

        def on_progress(now: Progress) -> None:
            nonlocal logged_at, percent, first_bytes
            first_bytes = now.bytes_done if first_bytes is None else first_bytes
            files = f"{now.num_done} of {now.num_files} files"
            bar.update(
                task, description=files, completed=now.bytes_done, total=now.total_bytes or None
            )
            reached = 100 * now.bytes_done // now.total_bytes if now.total_bytes else 0
            is_over = now.num_done == now.num_files
            is_due = reached > percent and time.monotonic() - logged_at >= DOWNLOAD_LOG_SECONDS
            if not bar.disable or not (is_due or is_over):
                return
            percent, logged_at = reached, time.monotonic()
            rate = (now.bytes_done - first_bytes) / max(logged_at - began, 1e-3)
            left = (
                f", about {(now.total_bytes - now.bytes_done) / rate:.0f} s left"
                if rate and not is_over
                else ""
            )
            sizes = (
                f"{decimal(now.bytes_done)} of {decimal(now.total_bytes)}, {decimal(int(rate))}/s"
            )
            logger.info("download percent %d of 100: %s, %s%s", reached, files, sizes, left)

        yield on_progress
