"""Stages as child processes: the `dapo` command that a person would type, its output in a log file."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tasks.artifacts import StageKey
from tasks.processes.child import run_command
from tasks.processes.watched_command import Outlive, watch_command
from tasks.runs.run import Run, current_stage

logger = logging.getLogger(__name__)
page_logger = logging.getLogger(f"{__name__}.page")  # for what only Prefect's page needs to say

METRICS_LINE = "step:"  # whole metric lines stay in the log file
NOTEWORTHY = re.compile(r"\[supervisor\]|\b(?:WARNING|ERROR|CRITICAL|Traceback)\b|\w+Error:")


def dapo_command(*words: str | Path) -> list[str]:
    """`dapo WORDS` with this interpreter, wherever the console script is installed."""
    return [sys.executable, "-m", "flows.cli", *map(str, words)]


def run_dapo(
    words: Sequence[str | Path],
    run: Run,
    key: StageKey,
    *,
    outlive: Outlive | None = None,
    on_line: Callable[[str], None] | None = None,
) -> None:
    """Run `dapo WORDS` to its end, its lines into the stage's log file, a link to which is in the run's folder.

    Lines go to our log as well, but for metrics, and of these so many to Prefect's page as `PageLines` says;
    `on_line` gets all. With `outlive` the command may outlive us, and is attached to when it runs already.
    Raises ChildProcessFailed with the exit code, the last lines and the log's path.
    """
    log_path = run.store.log_path(key.stage, key.key)
    link_log(run, log_path)
    page = PageLines(run.config.flow.log_lines_per_minute, log_path)

    def tell(line: str) -> None:
        if line.strip() and not line.startswith(METRICS_LINE):
            logger.info("%s", line.rstrip(), extra={"send_to_api": page.admits(line)})
        if on_line is not None:
            on_line(line)

    command = dapo_command(*words)
    try:
        if outlive is None:
            run_command(command, log_path=log_path, label=key.stage, on_line=tell)
        else:
            watch_command(command, log_path=log_path, label=key.stage, outlive=outlive, on_line=tell)
    finally:
        page.close_minute()


def link_log(run: Run, log_path: Path) -> None:
    """Leave a link to the log of the running stage in the run's folder."""
    link = run.folder / f"{current_stage.get()}.log"
    if not link.is_symlink():  # by an earlier attempt
        link.symlink_to(os.path.relpath(log_path, run.folder))


class PageLines:
    """Which lines of a command go to Prefect's page: so many in a minute, and as many again that warn."""

    def __init__(self, lines_per_minute: int, log_path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.lines_per_minute = lines_per_minute
        self.log_path = log_path
        self._clock = clock
        self._minute_began = clock()
        self._num_admitted = {False: 0, True: 0}  # of lines that warn: True
        self._num_left_out = 0

    def admits(self, line: str) -> bool:
        """Whether the line goes to the page; says there, once a minute is over, how many did not."""
        if self._clock() - self._minute_began >= 60.0:
            self.close_minute()
            self._minute_began = self._clock()
        is_noteworthy = NOTEWORTHY.search(line) is not None
        is_admitted = self._num_admitted[is_noteworthy] < self.lines_per_minute
        self._num_admitted[is_noteworthy] += is_admitted
        self._num_left_out += not is_admitted
        return is_admitted

    def close_minute(self) -> None:
        """Say on the page how many lines it lacks since it was last said."""
        if self._num_left_out:
            words = "... %d lines left out in this minute; all are in %s"
            page_logger.info(words, self._num_left_out, self.log_path)
        self._num_admitted, self._num_left_out = {False: 0, True: 0}, 0
