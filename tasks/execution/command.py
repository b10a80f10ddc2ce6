"""Stages as child processes: the `dapo` command that a person would type, its output in a log file."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from redaction import redact
from tasks.artifacts.stage_key import StageKey
from tasks.processes.child import run_command
from tasks.processes.detached import DetachOptions, attach_or_start
from tasks.runs.run import Run, current_stage

logger = logging.getLogger(__name__)
page_logger = logging.getLogger(f"{__name__}.page")  # for what only Prefect's page shows

METRICS_LINE = "step:"  # whole metric lines stay in the log file
WARNS = re.compile(r"\[supervisor\]|\b(?:WARNING|ERROR|CRITICAL|Traceback)\b|\w+Error:")


def dapo_command(*words: str | Path) -> list[str]:
    """`dapo WORDS` with this interpreter, wherever the console script is installed."""
    return [sys.executable, "-m", "flows.cli", *map(str, words)]


def run_dapo(
    words: Sequence[str | Path],
    run: Run,
    key: StageKey,
    *,
    detach: DetachOptions | None = None,
    on_line: Callable[[str], None] | None = None,
) -> None:
    """Run `dapo WORDS` to its end, its output in the stage's log file, which the run's folder links to.

    Lines other than metrics also go to our log, and to Prefect's page within the limits of `PageLines`; `on_line`
    gets all of them. With `detach` the command may outlive us, and one that already runs is attached to.
    Raises ChildProcessFailed with the exit code, the last lines and the log's path.
    """
    log_path = run.store.log_path(key.stage, key.key)
    link_log(run, log_path)
    page = PageLines(run.config.flow.log_lines_per_minute, log_path)

    def pass_on(line: str) -> None:
        line = redact(line)
        if line.strip() and not line.startswith(METRICS_LINE):
            logger.info("%s", line.rstrip(), extra={"send_to_api": page.admits(line)})
        if on_line is not None:
            on_line(line)

    command = dapo_command(*words)
    try:
        if detach is None:
            run_command(command, log_path=log_path, label=key.stage, on_line=pass_on)
        else:
            attach_or_start(command, log_path=log_path, label=key.stage, options=detach, on_line=pass_on)
    finally:
        page.close_minute()


def link_log(run: Run, log_path: Path) -> None:
    """Leave a link to the log of the running stage in the run's folder."""
    link = run.folder / f"{current_stage.get()}.log"
    if not link.is_symlink():  # by an earlier attempt
        link.symlink_to(os.path.relpath(log_path, run.folder))


class PageLines:
    """Which lines of a command go to Prefect's page: N lines per minute, plus N that warn."""

    def __init__(self, lines_per_minute: int, log_path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.lines_per_minute = lines_per_minute
        self.log_path = log_path
        self._clock = clock
        self._minute_began = clock()
        self._num_admitted = {False: 0, True: 0}  # True: lines that warn
        self._num_left_out = 0

    def admits(self, line: str) -> bool:
        """Whether the line goes to the page; says there, once a minute is over, how many did not."""
        if self._clock() - self._minute_began >= 60.0:
            self.close_minute()
            self._minute_began = self._clock()
        warns = WARNS.search(line) is not None
        is_admitted = self._num_admitted[warns] < self.lines_per_minute
        self._num_admitted[warns] += is_admitted
        self._num_left_out += not is_admitted
        return is_admitted

    def close_minute(self) -> None:
        """Say on the page how many lines it lacks since the last such line."""
        if self._num_left_out:
            page_logger.info(
                "... %d lines left out in this minute; all are in %s", self._num_left_out, self.log_path
            )
        self._num_admitted, self._num_left_out = {False: 0, True: 0}, 0
