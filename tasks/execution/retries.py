"""Which errors are retried and when, and how a failed command reports them."""

from __future__ import annotations

import copy
import logging
from typing import Any

from dapo_core.machine.stopping import TrainingStopped
from redaction import redact
from tasks.processes.child import ChildProcessFailed
from tasks.serve_model.failure import ServeError

logger = logging.getLogger(__name__)

RETRY_DELAYS_SECONDS = [10.0, 20.0, 40.0]
MAX_REASON_CHARS = 500
# Permanent: a retry would meet the same file or bug. The project's own errors have an attribute
# `is_lasting`.
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
LASTING_EXIT_CODE = 2  # as for a usage error: the user must act
PASSING_EXIT_CODE = 1


def is_lasting(error: BaseException) -> bool:
    """True if the error persists until the user changes something."""
    return bool(getattr(error, "is_lasting", isinstance(error, LASTING_ERRORS)))


def exit_code_of(error: BaseException) -> int:
    """The exit code of a command that fails with this error: 2 if the user must act, otherwise 1.

    A stopped training exits with the code of its signal, 143 or 130.
    """
    if isinstance(error, TrainingStopped):
        return error.exit_code
    return LASTING_EXIT_CODE if is_lasting(error) else PASSING_EXIT_CODE


def describe(error: BaseException) -> str:
    """The error's class and message, without secrets and without the child's last lines."""
    summary = error.summary if isinstance(error, ChildProcessFailed) else ""
    return redact(f"{type(error).__name__}: {summary or error}")


def shortened(error: ChildProcessFailed | ServeError) -> ChildProcessFailed | ServeError:
    """A copy of the error with one line: its summary, and the child's last line."""
    short = copy.copy(error)
    is_child = isinstance(error, ChildProcessFailed)
    reason = str(error).rpartition("\n  | ")[2][:MAX_REASON_CHARS] if is_child else ""
    short.args = (f"{error.summary}: {reason}" if reason else error.summary,)
    return short


def may_succeed_next_time(task: Any, task_run: Any, state: Any) -> bool:
    """Prefect's retry condition; logs the failure before each retry.

    The state AwaitingRetry has no message in Prefect 3.7, so the page shows the reason through this
    log line.
    """
    from prefect.task_engine import TaskRunTimeoutError

    error, attempt = state.data, task_run.run_count
    if is_lasting(error) or isinstance(error, TaskRunTimeoutError):
        return False
    logger.warning(
        "%s: attempt %d of %d failed, retrying in %.1f s: %s",
        task_run.name,
        attempt,
        task.retries + 1,
        task.retry_delay_seconds[attempt - 1],
        redact(f"{type(error).__name__}: {error}"),
    )
    return True
