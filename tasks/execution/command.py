"""Runs a stage as a child process: the `dapo` command a person would type, logged to a file."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Protocol

from redaction import redact
from tasks.artifacts.stage_key import StageKey
from tasks.execution.progress import Progress, Row, following
from tasks.processes.child import GRACE_SECONDS, dapo_command, run_command
from tasks.runs.run import Run, current_stage

logger = logging.getLogger(__name__)
page_logger = logging.getLogger(f"{__name__}.page")  # for lines that only the Prefect UI shows

METRICS_LINE = "step:"  # metric lines go to the log file only
WARNS = re.compile(r"\[supervisor\]|\b(?:WARNING|ERROR|CRITICAL|Traceback)\b|\w+Error:")


class CommandWatch(Protocol):
    """A file of JSON lines that a command writes, and what its lines say."""

    path: Path

    def on_rows(self, rows: Sequence[Row]) -> list[Progress]:
        """Show new lines; returns what to log."""


def run_dapo(
    arguments: Sequence[str | Path],
    run: Run,
    key: StageKey,
    *,
    watch: CommandWatch | None = None,
    grace_seconds: float = GRACE_SECONDS,
    locks: Sequence[int] = (),
) -> None:
    """Run `dapo ARGUMENTS`; output goes to the stage's log file, linked from the run's folder.

    Lines other than metrics are also logged here, and shown in the Prefect UI as far as `PageLines`
    admits them; so is the progress in the file of `watch`. The rest is as for `run_command`.
    """
    log_path = run.store.log_path(key.stage, key.key)
    link_log(run, log_path)
    page = PageLines(run.config.flow.log_lines_per_minute, log_path)

    def forward(line: str) -> None:
        run.record_time()
        line = redact(line)
        if line.strip() and not line.startswith(METRICS_LINE):
            logger.info("%s", line.rstrip(), extra={"send_to_api": page.admits(line)})

    def forward_progress(rows: list[Row]) -> None:
        for progress in watch.on_rows(rows) if watch else ():
            progress.log(page.admits(str(progress)))

    try:
        with following(watch.path, forward_progress) if watch else nullcontext():
            run_command(
                dapo_command(*arguments),
                log_path=log_path,
                label=key.stage,
                on_line=forward,
                grace_seconds=grace_seconds,
                locks=locks,
            )
    finally:
        page.close_minute()


def link_log(run: Run, log_path: Path) -> None:
    """Link the log of the current stage into the run's folder."""
    link = run.folder / f"{current_stage.get()}.log"
    if not link.is_symlink():  # an earlier attempt made it
        link.symlink_to(os.path.relpath(log_path, run.folder))


class PageLines:
    """Limits the lines shown in the Prefect UI to N per minute, plus N warnings."""

    def __init__(
        self, lines_per_minute: int, log_path: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.lines_per_minute = lines_per_minute
        self.log_path = log_path
        self._clock = clock
        self._minute_began = clock()
        self._num_admitted = {False: 0, True: 0}  # by whether the line is a warning
        self._num_omitted = 0

    def admits(self, line: str) -> bool:
        """True if the line goes to the page; reports the omitted lines after each minute."""
        if self._clock() - self._minute_began >= 60.0:
            self.close_minute()
            self._minute_began = self._clock()
        is_warning = WARNS.search(line) is not None
        is_admitted = self._num_admitted[is_warning] < self.lines_per_minute
        self._num_admitted[is_warning] += is_admitted
        self._num_omitted += not is_admitted
        return is_admitted

    def close_minute(self) -> None:
        """Report on the page how many lines were omitted, and reset the counts."""
        if self._num_omitted:
            said = "... %d lines omitted in this minute; all are in %s"
            page_logger.info(said, self._num_omitted, self.log_path)
        self._num_admitted, self._num_omitted = {False: 0, True: 0}, 0
