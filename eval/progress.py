"""How far an evaluation is: a bar on a terminal, a log line every tenth otherwise."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

logger = logging.getLogger(__name__)


class EvaluationProgress:
    """Counts the responses to be asked for as they come, and their tokens. Use as a context manager.

    `on_progress` gets their number so far and in all, as each comes.
    """

    def __init__(self, num_requests: int, on_progress: Callable[[int, int], None] | None = None) -> None:
        self._num_requests = num_requests
        self._on_progress = on_progress
        self._done = 0
        self._tokens = 0
        self._start = time.monotonic()
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            columns = (
                TextColumn("evaluate"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"),
                TextColumn("left:"), TimeRemainingColumn(),
            )  # fmt: skip
            self._bar = Progress(*columns, refresh_per_second=4)
            self._task = self._bar.add_task("evaluate", total=num_requests, speed="")

    def __enter__(self) -> EvaluationProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, response_tokens: int | None) -> None:
        """Count one finished request."""
        self._done += 1
        self._tokens += response_tokens or 0
        if self._on_progress is not None:
            self._on_progress(self._done, self._num_requests)
        seconds = max(time.monotonic() - self._start, 1e-9)
        speed = self._tokens / seconds
        if self._bar is not None:
            self._bar.update(self._task, advance=1, speed=f"{speed:.0f} tokens/s")
        elif self._done * 10 // self._num_requests > (self._done - 1) * 10 // self._num_requests:
            left = seconds / self._done * (self._num_requests - self._done)
            logger.info(
                "%d of %d items done, %.0f tokens/s, about %.0f s left",
                self._done,
                self._num_requests,
                speed,
                left,
            )
