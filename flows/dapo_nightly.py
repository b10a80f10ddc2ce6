"""The whole chain on a schedule, skipped if it starts too late or another training is running."""

import datetime
import logging
from typing import Annotated, Any

from prefect.runtime import flow_run
from prefect.states import Completed, State
from pydantic import Field

from flows.config import load_config
from flows.dapo_full import outcome, run_chain
from flows.recipe_flow import DEFAULT_CONFIG, Overrides, recipe_flow, scheduled_night
from tasks.execution.training_lock import check_free, hold, nightly_lock_path, training_lock_path
from tasks.preflight.run import require_ready
from tasks.runs.nights import with_last_night
from tasks.runs.run import Run, RunSkipped

logger = logging.getLogger(__name__)

EPOCH = datetime.date(1970, 1, 1)


@recipe_flow("dapo-nightly")
def dapo_nightly(
    config: str = DEFAULT_CONFIG,
    overrides: Overrides = (),
    max_late_hours: Annotated[float, Field(gt=0)] = 3.0,
    fresh_seed: bool = True,
) -> dict[str, Any] | State[Any]:
    """Train and report like dapo-full, beside last night's model; skipped if late or locked."""
    scheduled = flow_run.scheduled_start_time
    changes = (*overrides, *(seed_of_night(scheduled_night()) if fresh_seed else ()))
    settings = load_config(config, (*changes, *with_last_night(load_config(config, changes))))
    require_ready(settings)
    try:
        with Run.start(settings, flow="dapo-nightly") as run:
            if flow_run.run_count == 1:  # a retry of a run that started in time is never too late
                check_in_time(
                    scheduled, datetime.datetime.now(datetime.timezone.utc), max_late_hours
                )
            with hold(nightly_lock_path(settings), run.folder.name, skips_if_locked=True):
                check_free(training_lock_path(settings), settings)
                return outcome(run_chain(run, settings.flow.webhook, skips_if_locked=True))
    except RunSkipped as reason:
        logger.warning("%s", reason)
        return Completed(name="Skipped", message=str(reason))


def seed_of_night(night: datetime.date) -> tuple[str, ...]:
    """Return the override that seeds a run with its night's date, also if late or retried."""
    return (f"run.seed={(night - EPOCH).days}",)


def check_in_time(
    scheduled: datetime.datetime, now: datetime.datetime, max_late_hours: float
) -> None:
    """Raise RunSkipped if the run starts too late, for example after hours without a worker."""
    late_hours = (now - scheduled).total_seconds() / 3600
    if late_hours > max_late_hours:
        due = f"{scheduled:%Y-%m-%d %H:%M %Z}"
        raise RunSkipped(
            f"The run was skipped because it started {late_hours:.1f} hours late, due {due}; "
            f"max_late_hours is {max_late_hours:g}"
        )
