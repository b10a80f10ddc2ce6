"""Trains one recipe under each schedule, and compares time, tokens and accuracy.

Each training runs alone. Cores are divided as the recipe says, or with --share half to one rank and
half to one engine, as devices of a cluster are. Validations measure and are left out of all times;
no response is sampled for training meanwhile. The first step is left out of rates. Prints a
Markdown table.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo_core.metrics.log import METRICS_FILE
from durable import read_json_lines
from tasks.processes.child import dapo_command, run_command

EXAMPLE = """examples:
  .venv/bin/python bench/schedules.py --share --steps 40 --target 0.7 --set validation.every=2
  .venv/bin/python bench/schedules.py --recipe configs/smollm2_cpu.yaml --seeds 1
"""
SCHEDULES: dict[str, Sequence[str]] = {
    "synchronous": ("rollout.schedule=synchronous",),
    "asynchronous": ("rollout.schedule=asynchronous",),
    "asynchronous, 1 step": ("rollout.schedule=asynchronous", "sampler.max_staleness=1"),
}
HEADERS = (
    "schedule",
    "seconds a step",
    "tokens/s trained",
    "engines idle",
    "slots idle",
    "mean age",
    "accuracy at the end",
    "seconds to the target",
)


@dataclass(frozen=True)
class Outcome:
    """What a training took, and reached."""

    step_seconds: float  # mean, without validations
    tokens_per_second: float  # response tokens trained on
    idle: float  # share of time in which the engine decoded nothing
    slots_idle: float
    age: float  # mean optimizer steps between sampling and training on a token
    accuracy: float  # of the last validation
    target_seconds: float | None  # of steps until a validation reached the target; None: never


def main() -> None:
    """Prepare the recipe once, and train it under each schedule and seed."""
    arguments = _parser().parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shared = [word for change in arguments.set for word in ("--set", change)]
        data, model = folder / "data", folder / "model"
        recipe = arguments.recipe
        stages: list[list[str | Path]] = [
            ["prepare-data", recipe, "--output", data],
            ["fetch-model", recipe, "--data", data / "train.parquet", "--output", model],
        ]
        for words in stages:
            command = dapo_command(*words, *shared)
            run_command(command, log_path=folder / "stages.log", label=str(words[0]))
        print("| " + " | ".join(HEADERS) + " |\n" + "|---" * len(HEADERS) + "|")
        for schedule, keys in SCHEDULES.items():
            outcomes: list[Outcome] = []
            for seed in range(arguments.seeds):
                changes = [*keys, f"run.seed={seed}", f"train.total_steps={arguments.steps}"]
                changes += _cores() if arguments.share else []
                output = folder / f"{len(outcomes)}_{keys[-1]}"
                words = [word for change in changes for word in ("--set", change)]
                paths: list[str | Path] = [
                    "--data",
                    data / "train.parquet",
                    "--model",
                    model,
                    "--output",
                    output,
                ]
                paths += ["--held-out", data / "eval.parquet"]
                began = time.monotonic()
                command = dapo_command("train", recipe, *paths, *shared, *words)
                log_path = output.with_suffix(".log")
                run_command(command, log_path=log_path, label="train", on_line=lambda line: None)
                outcomes.append(
                    outcome_of(read_json_lines(output / METRICS_FILE), arguments.target)
                )
                print(f"{schedule}, seed {seed}: {time.monotonic() - began:.0f} s", flush=True)
            print(row_of(schedule, outcomes), flush=True)


def outcome_of(steps: Sequence[dict[str, Any]], target: float) -> Outcome:
    """Return what a training's metrics say."""
    later = [line for line in steps if line["step"] > 1]
    seconds = list(map(_training_seconds, later))

    def mean(name: str) -> float:
        pairs = zip(later, seconds, strict=True)
        return sum(line.get(name, 0.0) * spent for line, spent in pairs) / sum(seconds)

    spent, target_seconds, accuracy = 0.0, None, float("nan")
    for line in steps:
        spent += _training_seconds(line)
        accuracy = line.get("validation/accuracy", accuracy)
        if target_seconds is None and accuracy >= target:
            target_seconds = spent
    return Outcome(
        statistics.mean(seconds),
        sum(line["perf/trained_response_tokens"] for line in later) / sum(seconds),
        mean("perf/engine_idle_ratio"),
        mean("perf/engine_idle_slot_ratio"),
        mean("sampler/staleness/mean"),
        accuracy,
        target_seconds,
    )


def _training_seconds(line: Mapping[str, float]) -> float:
    if line["step"] == 0:  # a validation alone
        return 0.0
    return line["timing_s/step"] - line.get("timing_s/testing", 0.0)


def row_of(schedule: str, outcomes: Sequence[Outcome]) -> str:
    """Return the table's row: means over seeds; times to the target of those that reached it."""

    def mean(name: str) -> float:
        return statistics.mean(getattr(outcome, name) for outcome in outcomes)

    reached = [each.target_seconds for each in outcomes if each.target_seconds is not None]
    cells = [
        schedule,
        f"{mean('step_seconds'):.2f}",
        f"{mean('tokens_per_second'):,.0f}",
        f"{mean('idle'):.0%}",
        f"{mean('slots_idle'):.0%}",
        f"{mean('age'):.2f}",
        f"{mean('accuracy'):.1%}",
        f"{statistics.mean(reached):.0f} ({len(reached)} of {len(outcomes)})" if reached else "",
    ]
    return "| " + " | ".join(cells) + " |"


def _cores() -> list[str]:
    """Overrides that give one rank and one engine half of the cores each."""
    half = max(len(os.sched_getaffinity(0)) // 2, 1)
    return [
        "train.num_ranks=1",
        "rollout.num_workers=1",
        f"train.threads_per_rank={half}",
        f"rollout.threads_per_worker={half}",
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="configs/arith_cpu.yaml", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=30, help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=3, help="seeds from 0 (default: %(default)s)")
    parser.add_argument(
        "--target", type=float, default=0.6, help="validation accuracy (default: %(default)s)"
    )
    parser.add_argument(
        "--share", action="store_true", help="one rank and one engine, with half of the cores each"
    )
    parser.add_argument("--set", action="append", default=[], help="override of the recipe")
    return parser


if __name__ == "__main__":
    main()
