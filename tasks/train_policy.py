"""DAPO training, as the child process `dapo train`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect.runtime import task_run

from dapo_core.metrics import METRICS_FILE
from durable import read_json_lines
from tasks.artifacts import Artifact
from tasks.page import StageProgress
from tasks.processes.cancellation import is_worker_restart
from tasks.processes.detached import DetachOptions
from tasks.runs.run import Run
from tasks.stage_command import run_dapo
from tasks.stage_task import stage_task
from tasks.stages import TRAIN_FILE, TRAIN_POLICY, eval_file, train_policy_inputs
from tasks.training_lock import hold, training_lock_path


@stage_task(
    "train-policy",
    hours=lambda limits: limits.train_policy_hours,
    afterwards="run it again: it continues from its last checkpoint",
)
def train_policy(run: Run, data: Artifact, model: Artifact, gives_way: bool = False) -> Artifact:
    """The training output: checkpoints/step_NNNNNN and metrics.jsonl.

    The next attempt with the same key continues a failed or killed one from its last checkpoint, and attaches to a
    training that still runs. Waits while another training holds the cluster's lock; with `gives_way` the first
    attempt raises RunSkipped instead (a later one would lose hours of work).
    """
    attempt = task_run.run_count or 1
    key = TRAIN_POLICY.key(run.config, train_policy_inputs(run.config, data, model))

    def build(folder: Path) -> Mapping[str, Any]:
        words: list[str | Path] = ["train", run.config_path]
        words += ["--data", Path(data.path) / TRAIN_FILE, "--model", model.path, "--output", folder]
        if run.config.validation.every:
            words += ["--held-out", eval_file(data)]
        words += resume_words(run.config.checkpoint.resume, attempt)
        detach = DetachOptions(
            unwatched_seconds=60 * run.config.flow.unwatched_minutes,
            stop_seconds=run.config.flow.stop_seconds,
            goes_on_after=is_worker_restart,
            lock=lambda: hold(
                training_lock_path(run.config), run.folder.name, key.key, gives_way and attempt == 1
            ),
        )
        progress = StageProgress(run, "train_policy", folder)
        run_dapo(words, run, key, detach=detach, on_line=progress.on_line)
        return last_metrics(folder)

    return run.produce("train_policy", key, build, resumable=TRAIN_POLICY.is_resumable)


def resume_words(resume: str, attempt: int) -> list[str]:
    """Options for a later attempt to continue the one before, which checkpoint.resume=never would move aside.

    A path stays: without a checkpoint of its own, the next attempt begins from it again.
    """
    return ["--set", "checkpoint.resume=auto"] if resume == "never" and attempt > 1 else []


def last_metrics(folder: Path) -> dict[str, float]:
    """The last step's headline numbers, for the manifest."""
    last = read_json_lines(folder / METRICS_FILE)[-1]
    names = ("step", "critic/score/mean", "sampler/accuracy", "response_length/mean", "perf/throughput")
    return {name: last[name] for name in names if name in last}
