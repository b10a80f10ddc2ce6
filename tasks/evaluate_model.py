"""Serve a model and ask it every held-out item."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from eval.benchmark import load_items
from eval.run import evaluate
from tasks.artifacts import Artifact
from tasks.evaluation_settings import endpoint_of, sampling_of
from tasks.run import Run
from tasks.serve_model import serve_model
from tasks.stages import EVALUATE_MODEL, eval_file, evaluate_model_inputs


@task(name="evaluate-model", cache_policy=NO_CACHE, retries=1, retry_delay_seconds=10)
def evaluate_model(run: Run, data: Artifact, model: Artifact, label: str) -> Artifact:
    """The results directory (results.jsonl, settings.json, summary.json) of one model, recorded as `label`.

    Answers of a failed attempt are kept: the next one with the same key asks only for what is missing.
    """
    key = EVALUATE_MODEL.key(run.config, evaluate_model_inputs(data, model))
    logger = get_run_logger()

    def build(folder: Path) -> Mapping[str, Any]:
        log_path = run.store.log_path(key.stage, key.key)
        items = load_items(eval_file(data))
        with serve_model(model.path, run.config.serve, log_path=log_path) as server:
            logger.info("%s serves on %s; asking %d items", server.model, server.base_url, len(items))
            summary = evaluate(
                items,
                endpoint_of(server, run.config.evaluate),
                sampling_of(run.config.evaluate),
                folder,
                model_digest=model.digest,
                max_failed_ratio=run.config.evaluate.max_failed_ratio,
            )
        logger.info("%s: accuracy %.1f %% of %d", label, 100 * summary.accuracy, summary.n)
        return {"accuracy": summary.accuracy, "n": summary.n}

    return run.produce(label, key, build, resumable=True)
