"""A training run's metrics.jsonl as the report shows it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from durable import read_json_lines
from eval.results import ResultsError

Steps = list[dict[str, Any]]  # the metrics of each training step, in order
# What training counts as the outcome of a group.
_OUTCOMES = ("kept", "all_right", "all_wrong", "all_equal", "surplus", "stale", "aborted")


def read_training_metrics(path: str | Path) -> Steps:
    """One dict per training step, ordered by step; of a step that was trained again, the last line counts.

    Raises ResultsError when the file is missing or holds no step.
    """
    path = Path(path)
    if not path.is_file():
        raise ResultsError(f"{path} does not exist: the training metrics of the report must be a metrics.jsonl")
    steps = [row for row in read_json_lines(path) if isinstance(row, dict) and isinstance(row.get("step"), int)]
    by_step = {metrics["step"]: metrics for metrics in steps}
    if not by_step:
        raise ResultsError(f"{path} holds no training step (a JSON object with `step` on each line)")
    return [by_step[step] for step in sorted(by_step)]


def training_totals(steps: Steps) -> dict[str, Any]:
    """{steps, tokens_trained, tokens_generated, seconds}: response tokens trained on and generated, kept or not.

    A total is None when no step carries its key.
    """
    return {
        "steps": sum(metrics["step"] > 0 for metrics in steps),  # 0 is a validation before training
        "tokens_trained": _total(steps, "perf/trained_response_tokens"),
        "tokens_generated": _total(steps, "perf/generated_tokens"),
        "seconds": _total(steps, "timing_s/step"),
    }


def skipped_steps_notes(steps: Steps) -> list[str]:
    """A caveat when training steps found nothing to train on, else nothing."""
    trained = [metrics for metrics in steps if metrics["step"] > 0]
    num_skipped = sum(metrics.get("sampler/kept_groups") == 0 for metrics in trained)
    if not num_skipped:
        return []
    if num_skipped == len(trained):
        return [
            f"None of the {len(trained)} training steps found a group with signal, so no weight changed: any "
            f"change is noise of serving and sampling, not training."
        ]
    return [f"{num_skipped} of {len(trained)} training steps found no group with signal and changed no weight."]


def series(steps: Steps, key: str) -> tuple[list[int], list[float]]:
    """(steps, values) where the metric is a finite number."""
    points = [(int(m["step"]), float(m[key])) for m in steps if isinstance(m.get(key), (int, float))]
    finite = [(step, value) for step, value in points if math.isfinite(value)]
    return [step for step, _ in finite], [value for _, value in finite]


def with_kept_share(steps: Steps) -> Steps:
    """The steps with `sampler/kept_share`: groups trained on, of all groups that the step decided on."""
    return [{**metrics, **_kept_share(metrics)} for metrics in steps]


def _kept_share(metrics: dict[str, Any]) -> dict[str, float]:
    counts = [metrics.get(f"sampler/{outcome}_groups") or 0 for outcome in _OUTCOMES]
    return {"sampler/kept_share": counts[0] / sum(counts)} if any(counts) else {}


def _total(steps: Steps, key: str) -> float | None:
    _, values = series(steps, key)
    total = sum(values)
    return None if not values else int(total) if total == int(total) else total
