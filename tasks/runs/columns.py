"""The models that a report compares beside before and after: baselines, and checkpoints along the way."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

from dapo_core.errors import DapoError
from downloads import DownloadError
from eval import EvaluationError
from redaction import redact
from tasks.artifacts.artifact import Artifact
from tasks.links import BASELINE_EVALUATION
from tasks.runs.run import Run

logger = logging.getLogger(__name__)


@dataclass
class Columns:
    """The evaluations of these models; the columns of those that could not be asked are absent."""

    baselines: dict[str, Artifact] = field(default_factory=dict)  # by name
    checkpoints: dict[int, Artifact] = field(default_factory=dict)  # by training step
    absent: dict[str, str] = field(default_factory=dict)  # a baseline's name or "step N" -> why

    @contextlib.contextmanager
    def one(self, name: str) -> Iterator[None]:
        """The block that asks one model: its failure costs the run this column alone."""
        try:
            yield
        except (DapoError, EvaluationError, DownloadError) as error:
            logger.error("the report will have no column %s: %s", name, error)
            self.absent[name] = redact(f"{type(error).__name__}: {error}")


def take_columns(run: Run) -> Columns:
    """The evaluations that the store has; the others are absent."""
    columns = Columns()
    for baseline in run.config.evaluate.baselines:
        with columns.one(baseline.name):
            columns.baselines[baseline.name] = run.take(f"{BASELINE_EVALUATION}{baseline.name}")
    for step in run.config.checkpoint_steps:
        with columns.one(f"step {step}"):
            columns.checkpoints[step] = run.take(f"evaluate_step_{step}")
    return columns
