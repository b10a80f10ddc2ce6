"""Serve a model and evaluate it on every held-out item."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eval.problems.benchmarks import load_set
from tasks.artifacts import Artifact
from tasks.evaluation_settings import evaluate_servers
from tasks.page import StageProgress
from tasks.runs.run import Run
from tasks.serve_model.servers import serve_model
from tasks.stage_command import link_log
from tasks.stage_task import stage_task
from tasks.stages import EVALUATE_MODEL, eval_file, evaluate_model_inputs

logger = logging.getLogger(__name__)


@stage_task(
    "evaluate-model",
    task_run_name="{label}",
    hours=lambda limits: limits.evaluate_model_hours,
    afterwards="run it again: it asks only for what is missing",
)
def evaluate_model(run: Run, data: Artifact, model: Artifact, label: str) -> Artifact:
    """The results directory (results.jsonl, settings.json, summary.json) of one model, recorded as `label`.

    A failed attempt keeps its answers; the next one with the same key asks only for what is missing.
    """
    settings = run.config.evaluate
    key = EVALUATE_MODEL.key(run.config, evaluate_model_inputs(run.config, data, model))

    def build(folder: Path) -> Mapping[str, Any]:
        log_path = run.store.log_path(key.stage, key.key)
        link_log(run, log_path)
        evaluation_set = load_set(eval_file(data), settings.benchmark, settings.prompt, settings.api)
        with serve_model(model.path, run.config.serve, log_path=log_path) as servers:
            urls = ", ".join(server.base_url for server in servers)
            logger.info("%s serves on %s; asking %d items", servers[0].model, urls, len(evaluation_set.items))
            on_progress = StageProgress(run, label).on_progress
            summary = evaluate_servers(evaluation_set, servers, settings, folder, model.digest, on_progress)
        commands = [server.command for server in servers]
        return {"accuracy": summary.accuracy, "n": summary.n, "serve_commands": commands}

    return run.produce(label, key, build, resumable=EVALUATE_MODEL.is_resumable)
