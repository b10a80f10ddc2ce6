"""Which errors are worth another attempt, when it begins, and what a failed command reports."""

from __future__ import annotations

import copy
import logging
from typing import Any

from dapo_core.stopping import TrainingStopped
from redaction import redact
from tasks.processes.child import ChildProcessFailed
from tasks.serve_model.failure import ServeError

logger = logging.getLogger(__name__)

RETRY_DELAYS_SECONDS = [10.0, 20.0, 40.0]
MAX_REASON_CHARS = 500
# The next attempt would find the same file or bug. Classes of this project have an attribute `is_lasting`.
LASTING_ERRORS = (
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
LASTING_EXIT_CODE = 2  # as of a usage error, which also waits for the user
PASSING_EXIT_CODE = 1


def is_lasting(error: BaseException) -> bool:
    """Whether the error stays until the user changes something."""
    return bool(getattr(error, "is_lasting", isinstance(error, LASTING_ERRORS)))


def exit_code_of(error: BaseException) -> int:
    """The exit status of a command that ends with the error: 2 when the user must act, 1 otherwise.

    A training that was stopped ends as its signal would have it, 143 or 130.
    """
    if isinstance(error, TrainingStopped):
        return error.exit_code
    return LASTING_EXIT_CODE if is_lasting(error) else PASSING_EXIT_CODE


def describe(error: BaseException) -> str:
    """The error's class and message without secrets, and without a child's last lines, which were shown before."""
    summary = error.summary if isinstance(error, ChildProcessFailed) else ""
    return redact(f"{type(error).__name__}: {summary or error}")


def shortened(error: ChildProcessFailed | ServeError) -> ChildProcessFailed | ServeError:
    """The same error with its summary as message, and of a child process the last line it wrote."""
    short = copy.copy(error)
    is_child = isinstance(error, ChildProcessFailed)
    reason = str(error).rpartition("\n  | ")[2][:MAX_REASON_CHARS] if is_child else ""
    short.args = (f"{error.summary}: {reason}" if reason else error.summary,)
    return short


def may_succeed_next_time(task: Any, task_run: Any, state: Any) -> bool:
    """Prefect's question before another attempt; logs what failed when the answer is yes.

    The state AwaitingRetry has no message in Prefect 3.7, so this line is where its page shows the reason.
    """
    error, attempt = state.data, task_run.run_count
    if is_lasting(error):
        return False
    logger.warning(
        "%s: attempt %d of %d failed, the next one begins in %.1f s: %s",
        task_run.name,
        attempt,
        task.retries + 1,
        task.retry_delay_seconds[attempt - 1],
        redact(f"{type(error).__name__}: {error}"),
    )
    return True
