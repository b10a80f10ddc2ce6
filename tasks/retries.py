"""Which errors a second attempt can mend, when it begins, and how a child process tells that to its parent."""

from __future__ import annotations

import copy
import logging
import random
import signal
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
    ServerDied,
    StageTimedOut,
    StoreError,
    TrainingStopped,
)
from eval import InputError

logger = logging.getLogger(__name__)

NUM_RETRIES = 3
FIRST_DELAY_SECONDS = 10.0
MOST_REASON_CHARS = 500
JITTER = 0.3  # share of a delay that chance adds or takes away
# The next attempt would find the same file, key or full disk, or our own mistake.
LASTING_ERRORS = (
    CheckpointError,
    ConfigError,
    DataError,
    InputError,
    ModelError,
    NotEnoughSignal,
    RewardError,
    RunSkipped,
    ServeError,
    StageTimedOut,
    StoreError,
    TrainingStopped,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
    AssertionError,
    AttributeError,
    ImportError,
    NameError,
    TypeError,
)
PASSING_ERRORS = (ServerDied,)  # of a lasting kind, but not lasting themselves
LASTING_EXIT_CODE = 2  # as of a usage error, which also waits for the user
PASSING_EXIT_CODE = 1
STOPPED_EXIT_CODES = tuple(
    code for stop in (signal.SIGINT, signal.SIGTERM) for code in (128 + stop, -stop)
)  # of a child that somebody asked to end: not a failure that another attempt should undo


def is_lasting(error: BaseException) -> bool:
    """Whether the error stays until the user changes something; of a child process, its exit code says so."""
    if isinstance(error, ChildProcessFailed):
        return error.exit_code == LASTING_EXIT_CODE or error.exit_code in STOPPED_EXIT_CODES
    return isinstance(error, LASTING_ERRORS) and not isinstance(error, PASSING_ERRORS)


def exit_code_of(error: BaseException) -> int:
    """The exit status of a command that ends with the error: 2 when the user must act, 1 otherwise.

    A training that was stopped ends as its signal would have it, 143 or 130.
    """
    if isinstance(error, TrainingStopped):
        return error.exit_code
    return LASTING_EXIT_CODE if is_lasting(error) else PASSING_EXIT_CODE


def describe(error: BaseException) -> str:
    """The error for people who saw a child's lines pass: its class and message, without those lines."""
    said = error.summary if isinstance(error, ChildProcessFailed) else ""
    return f"{type(error).__name__}: {said or error}"


def shortened(error: ChildProcessFailed | ServeError) -> ChildProcessFailed | ServeError:
    """The same error with a short message: its summary, and of a child process the last line it wrote."""
    short = copy.copy(error)
    reason = (
        str(error).rpartition("\n  | ")[2][:MOST_REASON_CHARS] if isinstance(error, ChildProcessFailed) else ""
    )
    short.args = (f"{error.summary}: {reason}" if reason else error.summary,)
    return short


def draw_delays() -> list[float]:
    """Seconds before each retry: doubled each time, with chance in it so that runs do not come back in step.

    Drawn here because Prefect's retry_jitter_factor is read for flow runs only, and so that a log line can name
    the delay that is really kept.
    """
    return [
        round(FIRST_DELAY_SECONDS * 2**number * random.uniform(1 - JITTER, 1 + JITTER), 1)
        for number in range(NUM_RETRIES)
    ]


def may_succeed_next_time(task: Any, task_run: Any, state: Any) -> bool:
    """Prefect's question before another attempt; says on the log what failed when the answer is yes.

    The state AwaitingRetry has no message in Prefect 3.7, so this line is where its page tells the reason.
    """
    error, attempt = state.data, task_run.run_count
    if is_lasting(error):
        return False
    delay = task.retry_delay_seconds[attempt - 1]
    logger.warning(
        "%s: attempt %d of %d failed, the next one begins in %.1f s: %s: %s",
        task_run.name,
        attempt,
        task.retries + 1,
        delay,
        type(error).__name__,
        error,
    )
    return True
