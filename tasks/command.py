"""Stages as child processes: the `dapo` command that a person would type, its output in a log file."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from tasks.artifacts import ArtifactStore, StageKey
from tasks.process import run_command

logger = logging.getLogger(__name__)

METRICS_LINE = "step:"  # whole metric lines stay in the log file


def dapo_command(*words: str | Path) -> list[str]:
    """`dapo WORDS` with this interpreter, wherever the console script is installed."""
    return [sys.executable, "-m", "flows.cli", *map(str, words)]


def run_dapo(words: Sequence[str | Path], store: ArtifactStore, key: StageKey, held: Sequence[int] = ()) -> None:
    """Run `dapo WORDS` to its end, its lines into the stage's log file and, but for metrics, to our log.

    Its processes hold the descriptors `held`, locks, as long as one of them lives.
    Raises ChildProcessFailed with the exit code, the last lines and the log's path.
    """

    def tell(line: str) -> None:
        if line.strip() and not line.startswith(METRICS_LINE):
            logger.info("%s", line.rstrip())

    log_path = store.log_path(key.stage, key.key)
    run_command(dapo_command(*words), log_path=log_path, label=key.stage, on_line=tell, held=held)
