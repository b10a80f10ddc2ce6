"""DAPO training, as the child process `dapo train`."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect.runtime import task_run

from dapo_core.metrics import METRICS_FILE, read_metrics
from tasks.artifacts import Artifact
from tasks.page import StageProgress
from tasks.processes.cancellation import is_worker_restart
from tasks.processes.dapo_command import run_dapo
from tasks.processes.watched_command import Outlive
from tasks.runs.run import Run
from tasks.stage_task import stage_task
from tasks.stages import TRAIN_FILE, TRAIN_POLICY, eval_file, train_policy_inputs
from tasks.training_lock import hold_for_training


@stage_task(
    "train-policy",
    hours=lambda limits: limits.train_policy_hours,
    afterwards="run it again: it continues from its last checkpoint",
)
def train_policy(run: Run, data: Artifact, model: Artifact, gives_way: bool = False) -> Artifact:
    """The training output: checkpoints/step_NNNNNN and metrics.jsonl.

    A failed or killed attempt is continued from its last checkpoint by the next one with the same key; a training
    that outlived those who started it is attached to. While another training holds the cluster's lock, waits; or
    raises RunSkipped when it `gives_way`, which only its first attempt does: a later one has hours to lose.
    """
    attempt = task_run.run_count or 1
    key = TRAIN_POLICY.key(run.config, train_policy_inputs(run.config, data, model))

    def build(folder: Path) -> Mapping[str, Any]:
        words: list[str | Path] = ["train", run.config_path]
        words += ["--data", Path(data.path) / TRAIN_FILE, "--model", model.path, "--output", folder]
        if run.config.validation.every:
            words += ["--held-out", eval_file(data)]
        words += resume_words(run.config.checkpoint.resume, attempt)
        with contextlib.ExitStack() as stack:
            outlive = Outlive(
                unwatched_seconds=60 * run.config.flow.unwatched_minutes,
                stop_seconds=run.config.flow.stop_seconds,
                is_left=is_worker_restart,
                held=lambda: [stack.enter_context(hold_for_training(run, key, gives_way and attempt == 1))],
                work=folder.name,
            )
            run_dapo(words, run, key, outlive=outlive, on_line=StageProgress(run, "train_policy", folder).on_line)
        return last_metrics(folder)

    return run.produce("train_policy", key, build, resumable=TRAIN_POLICY.is_resumable)


def resume_words(resume: str, attempt: int) -> list[str]:
    """What has a later attempt go on with what the one before it earned, which `never` would move aside.

    A path stays: as long as there is no checkpoint of its own, the next attempt begins from it again.
    """
    return ["--set", "checkpoint.resume=auto"] if resume == "never" and attempt > 1 else []


def last_metrics(folder: Path) -> dict[str, float]:
    """What the manifest shows of a training: the last step's headline numbers."""
    last = read_metrics(folder / METRICS_FILE)[-1]
    names = ("step", "critic/score/mean", "sampler/accuracy", "response_length/mean", "perf/throughput")
    return {name: last[name] for name in names if name in last}
