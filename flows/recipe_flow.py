"""What the flows have in common: names, and parameters as Prefect's page shows and its server checks them."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar, get_type_hints

from prefect import Flow, flow
from prefect.logging.handlers import PrefectConsoleHandler
from prefect.runtime import flow_run
from pydantic import Field

from flows.notify import DEFAULT_CONFIG as DEFAULT_CONFIG
from flows.notify import tell_failure
from flows.override_schema import override_schema
from tasks.poster import poster

P = ParamSpec("P")
R = TypeVar("R")

DESCRIPTIONS = {
    "config": "The recipe, a YAML file; a relative path begins in the project's folder.",
    "overrides": "Changes to it, each section.key=value, such as run.seed=2.",
    "force": "Build the output although the store has it; what was made from the old one is stale then.",
    "side": "Which model: the one before training, or the one after it.",
    "max_late_hours": "A run that begins later than this after its time is skipped.",
    "fresh_seed": "Seed each night with its date (days since 1970), so that it trains anew; else all is cached.",
}

NUM_SHOWN_CHANGES = 4  # in a flow run's name

ConfigPath = Annotated[str, Field(pattern=r"\.ya?ml$")]
Override = Annotated[str, Field(json_schema_extra=override_schema())]
Overrides = tuple[Override, ...]

for package in ("flows", "tasks", "dapo_core", "eval"):
    logger = logging.getLogger(package)
    logger.setLevel(logging.INFO)  # a worker's root logger passes warnings only
    for handler in logging.getLogger("prefect.extra").handlers:
        logger.addHandler(handler)  # as PREFECT_LOGGING_EXTRA_LOGGERS does, which not every worker has set


def outlive_reader() -> None:
    """Have lines dropped that nobody reads: rich ends a process at the first one after its worker was killed."""
    for name in ("", *logging.root.manager.loggerDict):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, PrefectConsoleHandler):
                handler.console.on_broken_pipe = functools.partial(  # type: ignore[method-assign]
                    setattr, handler.console, "quiet", True
                )


outlive_reader()


def recipe_flow(name: str) -> Callable[[Callable[P, R]], Flow[P, R]]:
    """`@flow` for a function of a recipe: its docstring gets what `DESCRIPTIONS` says of each parameter.

    Prefect takes the descriptions of a deployment's form from there.
    """

    def decorate(function: Callable[P, R]) -> Flow[P, R]:
        description = inspect.getdoc(function) or ""
        lines = [f"    {each}: {DESCRIPTIONS[each]}" for each in inspect.signature(function).parameters]
        function.__doc__ = "\n".join([description, "", "Args:", *lines])
        # As types, not as text: `serve` pickles the function without the names that the text would need.
        function.__annotations__ = get_type_hints(function, include_extras=True)
        told: dict[str, Any] = {f"on_{end}": [tell_failure] for end in ("failure", "crashed", "cancellation")}
        told["on_completion"] = [send_page]
        told["on_failure"] = [*told["on_failure"], send_page]
        return flow(name=name, description=description, flow_run_name=name_run, **told)(function)

    return decorate


def send_page(flow: Any, flow_run: Any, state: Any) -> None:
    """Have Prefect's page get what it lacks of a run that ends: at our exit Prefect's own threads are gone."""
    poster.flush()


def name_run() -> str:
    """The flow run's name in Prefect's lists: recipe, what is changed in it, and the night of a scheduled run."""
    given = flow_run.parameters
    shown = [change for change in given["overrides"] if not change.startswith("flow.webhook.")]  # may be a secret
    words = [Path(given["config"]).stem, *shown[:NUM_SHOWN_CHANGES]]
    words += [f"+{len(shown) - NUM_SHOWN_CHANGES} more"] if len(shown) > NUM_SHOWN_CHANGES else []
    if "fresh_seed" in given:
        words.append(f"{flow_run.scheduled_start_time:%Y-%m-%d}")
    words += [str(given["side"])] if "side" in given else []
    words += ["forced"] if given.get("force") else []
    return " ".join(words)
