"""DAPO training, as the child process `dapo train`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import task_run

from dapo_core.metrics import METRICS_FILE, read_metrics
from tasks.artifacts import Artifact
from tasks.command import run_dapo
from tasks.retries import RETRY_DELAY_SECONDS, may_succeed_next_time
from tasks.run import Run
from tasks.stages import TRAIN_FILE, TRAIN_POLICY, eval_file, train_policy_inputs
from tasks.training_limit import shown_as_training
from tasks.training_lock import hold_for_training


@task(
    name="train-policy",
    cache_policy=NO_CACHE,
    retries=1,
    retry_delay_seconds=RETRY_DELAY_SECONDS,
    retry_condition_fn=may_succeed_next_time,
)
def train_policy(run: Run, data: Artifact, model: Artifact, gives_way: bool = False) -> Artifact:
    """The training output: checkpoints/step_NNNNNN and metrics.jsonl.

    A failed or killed attempt is continued from its last checkpoint by the next one with the same key. While
    another training holds the cluster's lock, waits; or raises RunSkipped when it `gives_way`.
    """
    key = TRAIN_POLICY.key(run.config, train_policy_inputs(run.config, data, model))

    def build(folder: Path) -> Mapping[str, Any]:
        words: list[str | Path] = ["train", run.config_path]
        words += ["--data", Path(data.path) / TRAIN_FILE, "--model", model.path, "--output", folder]
        if run.config.validation.every:
            words += ["--held-out", eval_file(data)]
        words += resume_words(run.config.checkpoint.resume, task_run.run_count or 1)
        with hold_for_training(run, key, gives_way) as held, shown_as_training():
            run_dapo(words, run.store, key, held=held)
        return last_metrics(folder)

    return run.produce("train_policy", key, build, resumable=True)


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
