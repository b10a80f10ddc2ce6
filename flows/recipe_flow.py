"""What the flows have in common: names, hooks, and parameters as Prefect's page describes them."""

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
    "config": "The recipe, a YAML file; a relative path begins in the project's folder.",
    "overrides": "Changes to it, each section.key=value, such as run.seed=2.",
    "force": "Build the output although the store has it; what was made from the old one is stale then.",
    "side": "Which model: before, after, a baseline's name, or step_N; empty: the recipe's own.",
    "max_late_hours": "A run that begins later than this after its time is skipped.",
    "fresh_seed": "Seed each night with its date (days since 1970), so that it trains; else all is cached.",
}

ConfigPath = Annotated[str, Field(pattern=r"\.ya?ml$")]
Overrides = tuple[str, ...]
Side = Annotated[str, Field(pattern=r"^[\w-]*$")]


def recipe_flow(name: str) -> Callable[[Callable[P, R]], Flow[P, R]]:
    """`@flow` for a function of a recipe. Prefect shows the docstring's Args in the deployment's form."""

    def decorate(function: Callable[P, R]) -> Flow[P, R]:
        description = inspect.getdoc(function) or ""
        lines = [f"    {each}: {DESCRIPTIONS[each]}" for each in inspect.signature(function).parameters]
        function.__doc__ = "\n".join([description, "", "Args:", *lines])
        hooks: dict[str, Any] = {"on_completion": [complete_page]}
        hooks |= {f"on_{end}": [complete_page, report_failure] for end in ("failure", "crashed", "cancellation")}
        return flow(name=name, description=description, flow_run_name=name_run, **hooks)(function)

    return decorate


def complete_page(*_: object) -> None:
    """Hook: the run ends when Prefect's page has all of its artifacts."""
    wait_until_sent()


def name_run() -> str:
    """The flow run's name in Prefect's lists: recipe, what is changed in it, and the night of a scheduled run."""
    given = flow_run.parameters
    shown = [change for change in given["overrides"] if not change.startswith("flow.webhook.")]  # may be a secret
    words = [Path(given["config"]).stem, *shown[:NUM_SHOWN_CHANGES]]
    words += [f"+{len(shown) - NUM_SHOWN_CHANGES} more"] if len(shown) > NUM_SHOWN_CHANGES else []
    if "fresh_seed" in given:
        words.append(f"{scheduled_night()}")
    words += [str(given["side"])] if given.get("side") else []
    words += ["forced"] if given.get("force") else []
    return " ".join(words)


def scheduled_night() -> datetime.date:
    """The night of this flow run, by the schedule of its deployment."""
    if (deployed := deployment.id) is None:
        return night_of(flow_run.scheduled_start_time, ())
    with get_client(sync_client=True) as client:
        return night_of(flow_run.scheduled_start_time, client.read_deployment(deployed).schedules)


def night_of(scheduled: datetime.datetime, schedules: Sequence[DeploymentSchedule]) -> datetime.date:
    """The date in the zone of the active schedule, else of any, else in UTC.

    Nights of one clock never share a date there; in UTC they do when the clock is set forward: 01:30 in Berlin on
    2026-03-29 and on 2026-03-30.
    """
    first = min(schedules, key=lambda each: not each.active, default=None)
    zone = first and getattr(first.schedule, "timezone", None)
    return scheduled.astimezone(ZoneInfo(zone or "UTC")).date()
