"""Reading a training run's metrics.jsonl for the report."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from eval.results import ResultsError

logger = logging.getLogger(__name__)

Steps = list[dict[str, Any]]  # one dict of metrics per training step, in order
_FATES = ("kept", "all_right", "all_wrong", "surplus", "stale", "aborted")  # of a group, as training counts them


def read_training_metrics(path: str | Path) -> Steps:
    """One dict per training step, ordered by step.

    A step trained again after a resume counts once, as last written. Raises ResultsError when the file is
    missing or holds no step.
    """
    path = Path(path)
    if not path.is_file():
        raise ResultsError(f"{path} does not exist: the training metrics of the report must be a metrics.jsonl")
    by_step: dict[int, dict[str, Any]] = {}
    torn = 0
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                metrics = json.loads(line)
                by_step[int(metrics["step"])] = metrics
            except (ValueError, KeyError, TypeError):
                torn += bool(line.strip())
    if torn:
        logger.warning("%s: %d unreadable lines are left out of the report", path, torn)
    if not by_step:
        raise ResultsError(f"{path} holds no training step (a JSON object with `step` on each line)")
    return [by_step[step] for step in sorted(by_step)]


def training_totals(steps: Steps) -> dict[str, Any]:
    """{steps, tokens_trained, tokens_generated, seconds}: response tokens trained on and generated, kept or not.

    A total is None when no step carries its key.
    """
    return {
        "steps": len(steps),
        "tokens_trained": _total(steps, "perf/trained_response_tokens"),
        "tokens_generated": _total(steps, "perf/generated_tokens"),
        "seconds": _total(steps, "timing_s/step"),
    }


def series(steps: Steps, key: str) -> tuple[list[int], list[float]]:
    """(steps, values) where the metric is a finite number."""
    points = [(int(m["step"]), m[key]) for m in steps if isinstance(m.get(key), (int, float))]
    finite = [(step, float(value)) for step, value in points if abs(value) != float("inf") and value == value]
    return [step for step, _ in finite], [value for _, value in finite]


def with_kept_share(steps: Steps) -> Steps:
    """The steps with `sampler/kept_share`: groups trained on, of all whose fate the step decided."""
    return [{**metrics, **_kept_share(metrics)} for metrics in steps]


def _kept_share(metrics: dict[str, Any]) -> dict[str, float]:
    counts = [metrics.get(f"sampler/{fate}_groups") for fate in _FATES]
    total = sum(count for count in counts if isinstance(count, (int, float)))
    return (
        {"sampler/kept_share": metrics["sampler/kept_groups"] / total} if counts[0] is not None and total else {}
    )


def _total(steps: Steps, key: str) -> float | None:
    _, values = series(steps, key)
    if not values:
        return None
    total = sum(values)
    return int(total) if total == int(total) else total
