"""Shared by all flows: run names, hooks, and parameter descriptions for the Prefect UI."""

import datetime
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar
from zoneinfo import ZoneInfo

from prefect import Flow, flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.runtime import deployment, flow_run
from pydantic import Field

from flows.notify import report_failure
from tasks.execution.page import wait_until_sent

P = ParamSpec("P")
R = TypeVar("R")

DEFAULT_CONFIG = "configs/arith_cpu.yaml"
NUM_SHOWN_CHANGES = 4  # in a flow run's name
DESCRIPTIONS = {
    "config": "The recipe, a YAML file; relative paths start in the project folder.",
    "overrides": "Changed keys, each section.key=value, such as run.seed=2.",
    "force": "Rebuild the output even if it is in the store; what was made from it becomes stale.",
    "side": "Which model: before, after, a baseline's name, or step_N; empty for the recipe's own.",
    "max_late_hours": "Skip a run that starts more than this many hours late.",
    "fresh_seed": "Seed each night with its date (days since 1970); otherwise all is cached.",
}

Overrides = tuple[str, ...]
Side = Annotated[str, Field(pattern=r"^[\w-]*$")]


def recipe_flow(name: str) -> Callable[[Callable[P, R]], Flow[P, R]]:
    """Return a `@flow` decorator. Prefect shows the docstring's Args in its run form."""

    def decorate(function: Callable[P, R]) -> Flow[P, R]:
        description = inspect.getdoc(function) or ""
        lines = [
            f"    {each}: {DESCRIPTIONS[each]}" for each in inspect.signature(function).parameters
        ]
        function.__doc__ = "\n".join([description, "", "Args:", *lines])
        hooks: dict[str, Any] = {"on_completion": [complete_page]}
        for end in ("failure", "crashed", "cancellation"):
            hooks[f"on_{end}"] = [complete_page, report_failure]
        return flow(name=name, description=description, flow_run_name=name_run, **hooks)(function)

    return decorate


def complete_page(flow: Any, flow_run: Any, state: Any) -> None:
    """Prefect hook: wait until all of the run's artifacts are sent to the Prefect UI."""
    wait_until_sent()


def name_run() -> str:
    """Return the flow run's name: recipe, changed keys, and the date of a nightly run."""
    given = flow_run.parameters
    # may be secret
    shown = [change for change in given["overrides"] if not change.startswith("flow.webhook.")]
    words = [Path(given["config"]).stem, *shown[:NUM_SHOWN_CHANGES]]
    if (more := len(shown) - NUM_SHOWN_CHANGES) > 0:
        words.append(f"+{more} more")
    if "fresh_seed" in given:
        words.append(f"{scheduled_night()}")
    words += [str(given["side"])] if given.get("side") else []
    words += ["forced"] if given.get("force") else []
    return " ".join(words)


def scheduled_night() -> datetime.date:
    """Return the date of this nightly flow run, in the time zone of its deployment's schedule."""
    if (deployed := deployment.id) is None:
        return night_of(flow_run.scheduled_start_time, ())
    with get_client(sync_client=True) as client:
        return night_of(flow_run.scheduled_start_time, client.read_deployment(deployed).schedules)


def night_of(
    scheduled: datetime.datetime, schedules: Sequence[DeploymentSchedule]
) -> datetime.date:
    """Return the date in the time zone of the active schedule, else of any schedule, else in UTC.

    Two nights never share a date in local time, but can in UTC when clocks go forward: 01:30 in
    Berlin on 2026-03-29 and 2026-03-30.
    """
    first = min(schedules, key=lambda each: not each.active, default=None)
    zone = first and getattr(first.schedule, "timezone", None)
    return scheduled.astimezone(ZoneInfo(zone or "UTC")).date()
