"""The whole chain as one Prefect flow."""

from __future__ import annotations

import logging
from typing import Any

from prefect import flow

from dapo_core.config import load_config
from flows.notify import tell_failure, tell_report
from tasks.evaluate_model import evaluate_model
from tasks.fetch_model import fetch_model
from tasks.merge_checkpoint import merge_checkpoint
from tasks.prepare_data import prepare_data
from tasks.run import Run
from tasks.train_policy import train_policy
from tasks.write_report import write_report

for package in ("flows", "tasks", "dapo_core", "eval"):
    logging.getLogger(package).setLevel(logging.INFO)  # a worker's root logger passes warnings only

DEFAULT_CONFIG = "configs/arith_cpu.yaml"


@flow(
    name="dapo-full",
    on_failure=[tell_failure],
    on_crashed=[tell_failure],
    on_cancellation=[tell_failure],
)
def dapo_full(config: str = DEFAULT_CONFIG, overrides: tuple[str, ...] = ()) -> dict[str, Any]:
    """Train a model with DAPO and report whether it got better.

    Args:
        config: The recipe, a YAML file.
        overrides: Changes to it, each `section.key=value`.
    """
    with Run.start(load_config(config, overrides)) as run:
        data = prepare_data(run)
        model = fetch_model(run, data)
        before = evaluate_model(run, data, model, "evaluate_before")
        training = train_policy(run, data, model)
        merged = merge_checkpoint(run, training)
        after = evaluate_model(run, data, merged, "evaluate_after")
        report = write_report(run, before, after, training)
    tell_report(run, report)
    return {"run": str(run.folder), "verdict": report["verdict"]}
