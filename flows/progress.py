"""Progress of long commands: a bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as ProgressBar

from downloads import Progress as Download
from durable import append_json_line
from heartbeat import SECONDS, heartbeat, line_shown
from tasks.execution.progress import Progress

DOWNLOAD_SECONDS = 2.0


class StepBar(logging.Filter):
    """Shows logged progress as a bar; other lines pass and stay above it."""

    def __init__(self) -> None:
        super().__init__()
        self.bar: ProgressBar | None = None
        atexit.register(self.close)  # an open bar hides the terminal's cursor

    def filter(self, record: logging.LogRecord) -> bool:
        progress: Progress | None = getattr(record, "progress", None)
        if progress is None:
            if record.levelno >= logging.WARNING:  # the bar's stage may have failed
                self.close()
            return True
        if self.bar is None:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            self.bar = ProgressBar(*columns, TextColumn("{task.fields[state]}"))
            self.task = self.bar.add_task(progress.what, total=progress.total, state="")
            self.bar.start()
        self.bar.update(self.task, completed=progress.done, state=progress.state, refresh=True)
        line_shown()
        if progress.done == progress.total:
            self.close()
        return False

    def close(self) -> None:
        """Stop the bar where it is, so that another can start."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def reporter(file: Path | None) -> Callable[[Progress], None]:
    """A function that logs progress, or appends it to a file that the caller follows."""
    if file is None:
        return Progress.log

    def report(now: Progress) -> None:
        append_json_line(file, asdict(now))
        line_shown()

    return report


@contextmanager
def bytes_progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Yield `on_progress(bytes_done, total_bytes)`, a bar on a terminal, else log lines."""
    console, reached = Console(), (0, 0)
    columns = (TextColumn(label), BarColumn(), DownloadColumn())
    bar = ProgressBar(*columns, console=console, disable=not console.is_terminal)
    task = bar.add_task(label, total=None)

    def on_progress(done: int, total: int) -> None:
        nonlocal reached
        reached = done, total
        bar.update(task, completed=done, total=total)

    def describe() -> str:
        done, total = map(decimal, reached)
        return f"{label}: {done} of {total}" if reached[1] else f"{label}: preparing"

    with heartbeat(describe) if bar.disable else bar:
        yield on_progress


def download_progress(report: Callable[[Progress], None]) -> Callable[[Download], None]:
    """A callback for downloads that reports each percent, at most every 2 s, at least every 7 s."""
    began, reported_at, percent = time.monotonic(), 0.0, -1
    first_bytes: int | None = None

    def on_progress(now: Download) -> None:
        nonlocal reported_at, percent, first_bytes
        first_bytes = now.bytes_done if first_bytes is None else first_bytes
        reached = 100 * now.bytes_done // now.total_bytes if now.total_bytes else 0
        is_over = now.num_done == now.num_files
        silence = time.monotonic() - reported_at
        is_due = silence >= SECONDS or (reached > percent and silence >= DOWNLOAD_SECONDS)
        if not (is_due or is_over):
            return
        percent, reported_at = reached, time.monotonic()
        rate = (now.bytes_done - first_bytes) / max(reported_at - began, 1e-3)
        parts = [
            f"{now.num_done} of {now.num_files} files",
            f"{decimal(now.bytes_done)} of {decimal(now.total_bytes)}",
            f"{decimal(int(rate))}/s",
        ]
        if rate and not is_over:
            parts.append(f"about {(now.total_bytes - now.bytes_done) / rate:.0f} s left")
        report(Progress("download percent", reached, 100, ", ".join(parts)))

    return on_progress
