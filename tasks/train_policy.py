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


@task(
    name="train-policy",
    cache_policy=NO_CACHE,
    retries=1,
    retry_delay_seconds=RETRY_DELAY_SECONDS,
    retry_condition_fn=may_succeed_next_time,
)
def train_policy(run: Run, data: Artifact, model: Artifact) -> Artifact:
    """The training output: checkpoints/step_NNNNNN and metrics.jsonl.

    A failed or killed attempt is continued from its last checkpoint by the next one with the same key.
    """
    key = TRAIN_POLICY.key(run.config, train_policy_inputs(run.config, data, model))

    def build(folder: Path) -> Mapping[str, Any]:
        words: list[str | Path] = ["train", run.config_path]
        words += ["--data", Path(data.path) / TRAIN_FILE, "--model", model.path, "--output", folder]
        if run.config.validation.every:
            words += ["--held-out", eval_file(data)]
        if (task_run.run_count or 1) > 1:  # this attempt goes on with what the one before earned
            words += ["--set", "checkpoint.resume=auto"]
        run_dapo(words, run.store, key)
        return last_metrics(folder)

    return run.produce("train_policy", key, build, resumable=True)


def last_metrics(folder: Path) -> dict[str, float]:
    """What the manifest shows of a training: the last step's headline numbers."""
    last = read_metrics(folder / METRICS_FILE)[-1]
    names = ("step", "critic/score/mean", "sampler/accuracy", "response_length/mean", "perf/throughput")
    return {name: last[name] for name in names if name in last}
