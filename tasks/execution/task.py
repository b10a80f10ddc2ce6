"""Turns a stage into a Prefect task with retries, a time limit and an entry in the Prefect UI."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from prefect import State, Task
from prefect.cache_policies import NO_CACHE
from prefect.states import Completed
from prefect.task_engine import TaskRunTimeoutError

from dapo_core.errors import DapoError
from tasks.artifacts.artifact import Artifact
from tasks.artifacts.stage_key import SHORT_KEY_LENGTH
from tasks.execution.page import show_stage
from tasks.execution.retries import RETRY_DELAYS_SECONDS, may_succeed_next_time, shortened
from tasks.processes.child import ChildProcessFailed
from tasks.runs.run import Run, RunSkipped
from tasks.serve_model.failure import ServeError

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
StageFunction = Callable[Concatenate[Run, P], Artifact]

# The artifact store decides what is cached; Prefect's cache would not notice a deleted artifact.
RETRIED: dict[str, Any] = {
    "cache_policy": NO_CACHE,
    "retries": len(RETRY_DELAYS_SECONDS),
    "retry_delay_seconds": RETRY_DELAYS_SECONDS,
    "retry_condition_fn": may_succeed_next_time,
}


def retried_task(name: str) -> Callable[[Callable[P, R]], Task[P, R]]:
    """Decorate a function as a task that is retried after transient errors."""
    return lambda function: Task(function, name=name, task_run_name=function.__name__, **RETRIED)


class StageTimedOut(DapoError, TimeoutError):
    """A stage exceeded its limit in flow.time_limits."""


class StageTask(Task[Concatenate[Run, P], State[Artifact | RunSkipped]]):
    """A task whose final state describes the outcome; calling it returns the artifact.

    Raises RunSkipped if the stage was skipped (Prefect counts the task as completed), and
    StageTimedOut if it exceeds its limit in flow.time_limits.
    """

    def __call__(  # type: ignore[override]
        self, run: Run, *args: P.args, **kwargs: P.kwargs
    ) -> Artifact:
        key = f"{self.fn.__name__}_hours"
        hours: float | None = getattr(run.config.flow.time_limits, key)
        limited = self.with_options(timeout_seconds=None if hours is None else 3600 * hours)
        try:
            state: State[Artifact | RunSkipped] = limited(run, *args, **kwargs)
        except TaskRunTimeoutError:
            raise StageTimedOut(
                f"flow.time_limits.{key}={hours:g}: the stage was stopped; raise it, or run it "
                "again: training and evaluations continue where they stopped"
            ) from None
        outcome = state.result()
        if isinstance(outcome, RunSkipped):
            raise outcome
        return outcome


def stage_task(name: str) -> Callable[[StageFunction[P]], StageTask[P]]:
    """Decorate a stage function: it takes the run, artifacts, and `label`, which names the link."""

    def decorate(function: StageFunction[P]) -> StageTask[P]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def run_stage(run: Run, *args: P.args, **kwargs: P.kwargs) -> State[Artifact | RunSkipped]:
            bound = signature.bind(run, *args, **kwargs)
            bound.apply_defaults()
            label = bound.arguments["label"]
            try:
                artifact = function(run, *args, **kwargs)
            except RunSkipped as reason:  # not a failure; `__call__` raises it for the flow
                return Completed(name="Skipped", message=str(reason), data=reason)
            except (ChildProcessFailed, ServeError) as error:  # a state message is one line
                if not error.summary:
                    raise
                if isinstance(error, ServeError):  # the lines of a command are in the log already
                    logger.error("%s", error)
                raise shortened(error) from None
            show_stage(run, label, artifact)
            return _state(run, label, artifact)

        return StageTask(run_stage, name=name, task_run_name="{label}", **RETRIED)

    return decorate


def _state(run: Run, label: str, artifact: Artifact) -> State[Artifact | RunSkipped]:
    manifest, record = artifact.manifest(), run.stages[label]
    key = artifact.key[:SHORT_KEY_LENGTH]
    message = f"built in {manifest['seconds']:.1f} s on {manifest['ended_at'][:10]}, key {key}"
    return Completed(
        name="Cached" if record.cached else "Completed", message=message, data=artifact
    )
