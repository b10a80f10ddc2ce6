"""Which errors a second attempt can mend, and how a child process tells that to its parent."""

from __future__ import annotations

import logging
from typing import Any

from dapo_core.errors import (
    CheckpointError,
    ChildProcessFailed,
    ConfigError,
    DataError,
    ModelError,
    NotEnoughSignal,
    RewardError,
    RunSkipped,
    ServeError,
    StoreError,
)
from eval.errors import BenchmarkError, ComparisonError, ResultsError

logger = logging.getLogger(__name__)

RETRY_DELAY_SECONDS = 10
# The next attempt would find the same file, key or full disk.
LASTING_ERRORS = (
    BenchmarkError,
    CheckpointError,
    ComparisonError,
    ConfigError,
    DataError,
    ModelError,
    NotEnoughSignal,
    ResultsError,
    RewardError,
    RunSkipped,
    ServeError,
    StoreError,
)
LASTING_EXIT_CODE = 2  # as of a usage error, which also waits for the user
PASSING_EXIT_CODE = 1


def is_lasting(error: BaseException) -> bool:
    """Whether the error stays until the user changes something; of a child process, its exit code says so."""
    if isinstance(error, ChildProcessFailed):
        return error.exit_code == LASTING_EXIT_CODE
    return isinstance(error, LASTING_ERRORS)


def exit_code_of(error: BaseException) -> int:
    """The exit status of a command that ends with the error: 2 when the user must act, 1 otherwise."""
    return LASTING_EXIT_CODE if is_lasting(error) else PASSING_EXIT_CODE


def describe(error: BaseException) -> str:
    """The error for people who saw a child's lines pass: its class and message, without those lines."""
    return f"{type(error).__name__}: {getattr(error, 'summary', '') or error}"


def may_succeed_next_time(task: Any, task_run: Any, state: Any) -> bool:
    """Prefect's question before another attempt; says on the log what failed when the answer is yes."""
    error = state.data
    if is_lasting(error):
        return False
    logger.warning("%s; another attempt in %d s", describe(error), RETRY_DELAY_SECONDS)
    return True
