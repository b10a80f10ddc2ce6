"""Reads a training run's metrics.jsonl for the report."""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from durable import read_json_lines
from eval.results.rows import ResultsError

logger = logging.getLogger(__name__)

Steps = list[dict[str, Any]]  # metrics of each training step, in order
MIN_SHARE = 0.005  # of what is shown
MAX_PROBS_DIFF = 0.01  # step 0 of verl's precision guide for NPUs
_COMPARED = ("probs_diff_mean", "log_probs_diff_mean", "probs_diff_high_ratio", "probs_diff_max")
PHASES = {  # timers of a training step
    "timing_s/gen": "generate",
    "timing_s/update_actor": "update",
    "timing_s/old_log_prob": "old log-probs",
    "timing_s/ref": "reference log-probs",
    "timing_s/weight_sync": "weight sync",
    "timing_s/turns": "turns",
    "timing_s/save_checkpoint": "checkpoint",
    "timing_s/testing": "validation",
}
_WITHOUT_SIGNAL = ("all_right", "all_wrong", "all_equal")
_GROUP_OUTCOMES = ("kept", "all_right", "all_wrong", "all_equal", "surplus")


def read_training_metrics(path: str | Path) -> Steps:
    """Read one dict per training step, ordered by step. The last line of a repeated step counts.

    Warns of damaged lines, which are left out. Raises ResultsError if the file is missing or holds
    no step.
    """
    path = Path(path)
    if not path.is_file():
        raise ResultsError(f"{path} does not exist; the report needs a training's metrics.jsonl")
    steps = [
        row
        for row in read_json_lines(path)
        if isinstance(row, dict) and isinstance(row.get("step"), int)
    ]
    by_step = {metrics["step"]: metrics for metrics in steps}
    if not by_step:
        raise ResultsError(
            f"{path} holds no training step (a JSON object with `step` on each line)"
        )
    num_lines = path.read_bytes().count(b"\n")
    if num_lines > len(steps):
        logger.warning(
            "%s: %d of %d lines are damaged and left out", path, num_lines - len(steps), num_lines
        )
    return [by_step[step] for step in sorted(by_step)]


def training_totals(steps: Steps) -> dict[str, Any]:
    """Total the steps, response tokens and seconds; None for what no step has."""
    return {
        "steps": sum(metrics["step"] > 0 for metrics in steps),  # 0 is a validation before training
        "tokens_trained": _total(steps, "perf/trained_response_tokens"),
        "tokens_generated": _total(steps, "perf/generated_tokens"),
        "seconds": _total(steps, "timing_s/step"),
        **_usage(steps),
    }


def usage_lines(train: Mapping[str, Any]) -> list[str]:
    """Return in words where a training's time and tokens went, and advice; [] if unknown."""
    lines = []
    if phases := train.get("phases"):
        parts = [f"{name} {share:.0%}" for name, share in phases.items() if share >= MIN_SHARE]
        lines.append(f"time: {', '.join(parts)}")
    if (idle := train.get("engine_idle")) is not None:
        lines.append(
            f"engines decoded nothing for {idle:.0%} of the time; on average, "
            f"{train['slots_idle']:.0%} of rollout.max_num_seqs were idle"
        )
    if fates := train.get("token_fates"):
        parts = [f"{name} {share:.0%}" for name, share in fates.items() if share >= MIN_SHARE]
        lines.append(f"response tokens: {', '.join(parts)}")
    if advice := train.get("advice"):
        lines.append(f"the simulator on the next training: {advice}")
    return lines


def _usage(steps: Steps) -> dict[str, Any]:
    """Return the share of time by phase and of tokens by fate, and of the engines' idle time."""
    seconds = _total(steps, "timing_s/step") or 0.0
    phases = {name: _total(steps, key) or 0.0 for key, name in PHASES.items()}
    if sum(phases.values()) < seconds:
        phases["other"] = seconds - sum(phases.values())
    fates = {"trained on": _tokens(steps, "kept")}
    fates |= {name.replace("_", " "): _tokens(steps, name) for name in _WITHOUT_SIGNAL}
    fates["for later steps"] = sum(_tokens(steps[-1:], name) for name in ("surplus", "carried_out"))
    return {
        "phases": _shares(phases),
        "token_fates": _shares(fates),
        "engine_idle": _mean(steps, "perf/engine_idle_ratio"),
        "slots_idle": _mean(steps, "perf/engine_idle_slot_ratio"),
    }


def _tokens(steps: Steps, fate: str) -> float:
    return _total(steps, f"sampler/{fate}_tokens") or 0.0


def _shares(parts: Mapping[str, float]) -> dict[str, float]:
    total = sum(parts.values())
    return {name: value / total for name, value in parts.items() if value > 0}


def _mean(steps: Steps, key: str) -> float | None:
    """Return the metric's mean over time; None if no step has it."""
    timed = [metrics for metrics in steps if {key, "timing_s/step"} <= metrics.keys()]
    seconds = [metrics["timing_s/step"] for metrics in timed]
    total = sum(seconds)
    return sum(map(operator.mul, seconds, (m[key] for m in timed))) / total if total else None


def skipped_steps_notes(steps: Steps) -> list[str]:
    """Return a note if training steps found no group to train on."""
    trained = [metrics for metrics in steps if metrics["step"] > 0]
    num_skipped = sum(metrics.get("sampler/kept_groups") == 0 for metrics in trained)
    if not num_skipped:
        return []
    if num_skipped == len(trained):
        return [
            f"None of the {len(trained)} training steps found a group with signal, so no weight "
            "changed: any change is noise from serving and sampling, not training."
        ]
    return [
        f"{num_skipped} of {len(trained)} training steps found no group with signal and changed no "
        "weight."
    ]


def series(steps: Steps, key: str) -> tuple[list[int], list[float]]:
    """Return (steps, values) where the metric is a finite number."""
    points = [
        (int(m["step"]), float(m[key])) for m in steps if isinstance(m.get(key), (int, float))
    ]
    finite = [(step, value) for step, value in points if math.isfinite(value)]
    return [step for step, _ in finite], [value for _, value in finite]


def with_derived(steps: Steps) -> Steps:
    """Add what plots derive from metrics.

    `sampler/kept_share`: the share of groups trained on. `rollout/fresh_kl_size`: |k1|, for a
    logarithmic axis.
    """
    return [{**metrics, **_kept_share(metrics), **_kl_size(metrics)} for metrics in steps]


@dataclass(frozen=True)
class Consistency:
    """How far engine and policy differ on tokens sampled by the step's own weights."""

    num_tokens: int
    num_high: int  # tokens whose probability differs by more than 0.1
    probs_diff: float  # mean over tokens
    log_probs_diff: float  # mean over tokens, in nats
    probs_diff_max: float

    @property
    def agrees(self) -> bool:
        """Whether the mean difference is within verl's bound for NPUs."""
        return self.probs_diff <= MAX_PROBS_DIFF

    def __str__(self) -> str:
        verb = "agree to" if self.agrees else "DIFFER by"
        return (
            f"Engine and policy {verb} {self.probs_diff:.1g} in a token's probability; "
            f"{self.num_high:,} of {self.num_tokens:,} tokens differ by more than 0.1."
        )


def consistency(steps: Steps) -> Consistency | None:
    """Combine the steps' comparisons of engine and policy; None if no step recorded one."""
    names = ("compared_tokens", *_COMPARED)
    rows = [[metrics.get(f"rollout/fresh_{name}") for name in names] for metrics in steps]
    complete = [row for row in rows if None not in row and row[0]]
    if not complete:
        return None
    counts, *columns = zip(*complete, strict=True)
    total = sum(counts)
    means = [sum(map(operator.mul, counts, column)) / total for column in columns[:-1]]
    probs_diff, log_probs_diff, high = means
    return Consistency(
        int(total), round(high * total), probs_diff, log_probs_diff, max(columns[-1])
    )


def _kl_size(metrics: dict[str, Any]) -> dict[str, float]:
    value = metrics.get("rollout/fresh_kl")
    return {} if value is None else {"rollout/fresh_kl_size": abs(value)}


def _kept_share(metrics: dict[str, Any]) -> dict[str, float]:
    counts = [metrics.get(f"sampler/{outcome}_groups") or 0 for outcome in _GROUP_OUTCOMES]
    return {"sampler/kept_share": counts[0] / sum(counts)} if any(counts) else {}


def _total(steps: Steps, key: str) -> float | None:
    _, values = series(steps, key)
    total = sum(values)
    return None if not values else int(total) if total == int(total) else total
