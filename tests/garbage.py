"""Runs for garbage collection tests."""

import os
import time
from pathlib import Path

from tasks.runs.collect_garbage import Unused, collect_garbage
from tasks.runs.run import Run
from tests.recorded_runs import Outcome, record_run, small_config

NOW = 0.0  # margin at which everything is old enough


def collect(store: Path, keep_runs: int = 1, **options: bool) -> list[Unused]:
    return collect_garbage(store, keep_runs, margin_seconds=NOW, **options)


def nights(store: Path, *weights: str) -> list[Run]:
    """One run per word; they differ in training and later stages."""
    runs = []
    for step, word in enumerate(weights, start=60):
        config = small_config(store, f"train.total_steps={step}")
        runs.append(
            record_run(config, Outcome(weights=word, after="rrrw"[step % 4 :] + "w" * (step % 4)))
        )
    return runs


def keys(items: list[Unused], is_left: bool = False) -> set[str]:
    return {item.attempt.short_key for item in items if bool(item.kept_reason) == is_left}


def stored_keys(store: Path) -> set[str]:
    return {path.parents[1].name for path in store.glob("*_*/*/*/manifest.json")}


def own_of(run: Run) -> set[str]:
    """The keys that only this run built: training, merge, evaluation after."""
    return {
        run.stages[label].key[:16]
        for label in ("train_policy", "merge_checkpoint", "evaluate_after")
    }


def make_old(*paths: Path, days: float = 2) -> None:
    """Make the paths and everything below look unchanged for days."""
    then = time.time() - days * 86400
    for path in paths:
        for each in (path, *path.rglob("*")):
            os.utime(each, (then, then), follow_symlinks=False)
