"""Earlier nights of a recipe: the model of the last one is a baseline of tonight's run."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path

from eval.gates import LAST_NIGHT
from tasks.config import ChainConfig
from tasks.runs.history import RecordedRun, artifact_of, read_runs

logger = logging.getLogger(__name__)

NIGHTLY = "dapo-nightly"  # the name of the flow
MODEL_LABEL = "merge_checkpoint"


def last_nights(runs: Iterable[RecordedRun]) -> dict[str, RecordedRun]:
    """Of runs, newest first, each recipe's newest nightly one with a report, by the recipe's name."""
    found: dict[str, RecordedRun] = {}
    for run in runs:
        if run.flow == NIGHTLY and run.report is not None:
            found.setdefault(run.name, run)
    return found


def with_last_night(config: ChainConfig) -> tuple[str, ...]:
    """The override that adds the model of the recipe's last night to its baselines.

    Empty, and the log says why, when there is none. A baseline of the recipe's own with that name stays.
    """
    given = [one.model_dump(exclude_unset=True) for one in config.evaluate.baselines]
    if any(one["name"] == LAST_NIGHT for one in given):
        return ()
    night = last_nights(read_runs(Path(config.store.path).absolute())).get(config.run.name)
    if night is None:
        logger.info("no column %s: the store has no finished night of %s", LAST_NIGHT, config.run.name)
        return ()
    model = artifact_of(night, MODEL_LABEL)
    if model is None:
        logger.warning(
            "no column %s: the merged model of the run %s is no longer in the store; dapo gc keeps that of the "
            "newest night",
            LAST_NIGHT,
            night.id,
        )
        return ()
    entry = {"name": LAST_NIGHT, "path": model.path, "trust_remote_code": config.model.trust_remote_code}
    logger.info("%s is the model of the run %s", LAST_NIGHT, night.id)
    return (f"evaluate.baselines={json.dumps([*given, entry])}",)
