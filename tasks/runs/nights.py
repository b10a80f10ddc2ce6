"""Earlier nightly runs of a recipe; the model of the last one is a baseline of the next."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from eval import EvaluationError
from eval.report.gates import LAST_NIGHT
from eval.report.history import make_history
from eval.report.pages import plain_p, points
from eval.results.statistics import SIGNIFICANCE
from eval.results.suite import describe_suite
from tasks.config import ChainConfig
from tasks.runs.history import RecordedRun, artifact_of, read_runs

logger = logging.getLogger(__name__)

NIGHTLY = "dapo-nightly"  # name of the flow
MODEL_LABEL = "merge_checkpoint"


def describe_change(change: Mapping[str, Any], than: str) -> str:
    """Describe a change with figures; "better" or "worse" only if p < 0.05."""
    word = "better than" if change["difference"] > 0 else "worse than"
    if change["p"] >= SIGNIFICANCE:
        word = "not significantly different from"
    return f"{word} {than} ({points(change['difference'])} points, p {plain_p(change['p'])})"


def since_first_night(store: Path, recipe: str, after: str) -> str:
    """Describe how `after`'s headline compares with the recipe's first nightly run.

    Empty for the first run, for different problems or settings, and if both are the same
    measurement.
    """
    nights = [night for night in read_runs(store) if is_night(night) and night.name == recipe]
    if not nights:
        return ""
    try:
        history = make_history([nights[-1].folder, after], describe_suite(after).headline)
    except EvaluationError as error:
        logger.warning("cannot compare with the first nightly run %s: %s", nights[-1].id, error)
        return ""
    # A series that starts before that run does not describe the change since.
    pairs = (series for series in history if series.points[0].label == nights[-1].id)
    change = next((series.to_first[-1] for series in pairs), None)
    if change is None:
        return ""
    return describe_change(vars(change), f"the first night, {nights[-1].id[:8]}")


def is_night(run: RecordedRun) -> bool:
    """True for a nightly run with a report."""
    return run.flow == NIGHTLY and run.report is not None


def last_nights(runs: Iterable[RecordedRun]) -> dict[str, RecordedRun]:
    """The newest nightly run with a report of each recipe, by name; `runs` are newest first."""
    found: dict[str, RecordedRun] = {}
    for run in runs:
        if is_night(run):
            found.setdefault(run.name, run)
    return found


def with_last_night(config: ChainConfig) -> tuple[str, ...]:
    """The override that adds the model of the last nightly run to the baselines.

    Empty if there is none (the reason is logged), or if the recipe defines a baseline of that name.
    """
    given = [one.model_dump(exclude_unset=True) for one in config.evaluate.baselines]
    if any(one["name"] == LAST_NIGHT for one in given):
        return ()
    night = last_nights(read_runs(Path(config.store.path).absolute())).get(config.run.name)
    if night is None:
        logger.info(
            "no column %s: the store has no finished nightly run of %s", LAST_NIGHT, config.run.name
        )
        return ()
    model = artifact_of(night, MODEL_LABEL)
    if model is None:
        logger.warning(
            "no column %s: the model of the run %s is no longer in the store; dapo runs gc keeps "
            "that of the newest nightly run",
            LAST_NIGHT,
            night.id,
        )
        return ()
    trusts = config.model.trust_remote_code
    entry = {"name": LAST_NIGHT, "path": model.path, "trust_remote_code": trusts}
    logger.info("%s is the model of the run %s", LAST_NIGHT, night.id)
    return (f"evaluate.baselines={json.dumps([*given, entry])}",)
