"""Training and held-out problems: generated, or taken from the user's files and checked."""

from __future__ import annotations

from tasks.artifacts import Artifact
from tasks.dataset import build_dataset
from tasks.runs.run import Run
from tasks.stage_task import stage_task
from tasks.stages import PREPARE_DATA, prepare_data_inputs


@stage_task("prepare-data", hours=lambda limits: limits.prepare_data_hours)
def prepare_data(run: Run) -> Artifact:
    """The artifact with train.parquet and eval.parquet (or eval.jsonl), from the store when it is there."""
    key = PREPARE_DATA.key(run.config, prepare_data_inputs(run.config))
    return run.produce("prepare_data", key, lambda folder: build_dataset(run.config, folder))
