"""Kills a training many times, in every role, and compares what it ends with to a training that was left alone.

Parameters and optimizer state must be equal in every bit, and metrics.jsonl in every number that is neither a time
nor the memory of a process. Prints a line for each kill; exit status 1 when anything differs.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from dapo_core.checkpoint.folder import latest_checkpoint
from dapo_core.metrics import METRICS_FILE
from durable import read_json_lines
from tasks.execution.command import dapo_command
from tasks.processes import supervisor
from tasks.processes.child import SupervisedProcess, background_command, run_command

if TYPE_CHECKING:
    import torch

RECIPE = "configs/arith_cpu.yaml"
EXAMPLE = """examples: the 20 kills of the documentation, and three chosen ones
  .venv/bin/python bench/crash.py --kills 20 --seed 0
  .venv/bin/python bench/crash.py --roles rank worker group --steps 8
"""
# Small steps; a checkpoint at each other one, so that most kills cost work that was done already.
OVERRIDES = (
    "run.deterministic=true",
    "data.arithmetic.num_train=2000",
    "data.arithmetic.num_eval=64",
    "model.recipe.num_steps=60",
    "sampler.dynamic=false",
    "checkpoint.save_every=2",
    "validation.every=5",
    "checkpoint.keep_best=1",
    "train.restart_delay_seconds=0.1",
)
Role = Literal["driver", "rank", "worker", "group", "raylet"]
RANDOM_ROLES: tuple[Role, ...] = ("driver", "rank", "worker", "group")  # those of the documentation's table
TITLES = {"rank": "ray::_PolicyRank", "worker": "ray::_RolloutRank"}
DEADLINE_SECONDS = 900.0
POLL_SECONDS = 0.02
# These depend on the machine.
MEASURED = (
    "wall_time",
    "timing_",
    "perf/time_per_step",
    "perf/throughput",
    "perf/mfu",
    "perf/max_",
    "perf/cpu_",
    "perf/device_memory",
)


@dataclass(frozen=True)
class Training:
    """One `dapo train` on the given paths; the same command continues it."""

    recipe: Path
    data: Path
    model: Path
    output: Path
    options: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        """What a person would type."""
        paths = {"--data": self.data, "--model": self.model, "--output": self.output}
        words = [word for option, path in paths.items() for word in (option, str(path))]
        return dapo_command("train", self.recipe, *words, *self.options)

    @property
    def log_path(self) -> Path:
        return self.output.with_suffix(".log")

    def num_steps(self) -> int:
        """Training steps that metrics.jsonl has."""
        return len(read_json_lines(self.output / METRICS_FILE))


@dataclass(frozen=True)
class Moment:
    """Kill the role `seconds` after metrics.jsonl has the step and the role has a process."""

    role: Role
    after_step: int
    seconds: float


def main() -> None:
    """Train undisturbed, train through the kills, compare."""
    arguments = _parser().parse_args()
    logging.basicConfig(level=logging.WARNING)
    chance = random.Random(arguments.seed)
    roles: list[Role] = arguments.roles or [chance.choice(RANDOM_ROLES) for _ in range(arguments.kills)]
    moments = random_moments(roles, arguments.steps, arguments.spread_seconds, chance)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        alone, killed = _prepare(folder, arguments.steps)
        began = time.monotonic()
        run_command(alone.command, log_path=alone.log_path, label="train", on_line=lambda line: None)
        print(f"undisturbed: {arguments.steps} steps in {time.monotonic() - began:.0f} s", flush=True)
        began = time.monotonic()
        num_kills = train_through_kills(killed, moments)
        print(f"{num_kills} of {len(moments)} kills, {arguments.steps} steps in {time.monotonic() - began:.0f} s")
        found = differences(alone.output, killed.output)
    print("\n".join(found) if found else "parameters, optimizer and metrics are equal in every bit")
    sys.exit(1 if found or num_kills < len(moments) else 0)


def random_moments(
    roles: Sequence[Role], num_steps: int, spread_seconds: float, chance: random.Random
) -> list[Moment]:
    """A moment for each role, in the first four fifths of the training, so that each kill comes before its end."""
    last = 0.8 * num_steps / len(roles)
    return [
        Moment(role, int((number + chance.random()) * last), chance.uniform(0, spread_seconds))
        for number, role in enumerate(roles)
    ]


def train_through_kills(training: Training, moments: Sequence[Moment]) -> int:
    """Train to the end with kills on the way, and start the command again whenever it was killed.

    Returns the number of kills. Raises ChildProcessFailed when the command ends by itself with an error.
    """
    waiting = list(moments)
    is_done = False
    while not is_done:
        with background_command(training.command, log_path=training.log_path, label="train") as process:
            is_command_killed = False
            while waiting and not is_command_killed and _wait_for(waiting[0], training, process):
                if _strike(waiting[0], training, process):
                    is_command_killed = waiting.pop(0).role in ("driver", "group")
            exit_code = _exit_code(process)
            if exit_code and exit_code != -signal.SIGKILL:
                raise process.failure()
            is_done = exit_code == 0
    return len(moments) - len(waiting)


def differences(expected: Path, found: Path) -> list[str]:
    """The differences between two training outputs, a line each, without times and memory."""
    lines = [f"metrics.jsonl: {text}" for text in _metric_differences(expected, found)]
    checkpoints = [latest_checkpoint(output / "checkpoints") for output in (expected, found)]
    names = [checkpoint and checkpoint.name for checkpoint in checkpoints]
    if names[0] != names[1] or checkpoints[0] is None or checkpoints[1] is None:
        return [*lines, f"checkpoints: {names[0]} and {names[1]}"]
    first, second = (read_tensors(checkpoint) for checkpoint in (checkpoints[0], checkpoints[1]))
    lines += [f"{name} is in one checkpoint only" for name in sorted({*first} ^ {*second})]
    shared = sorted({*first} & {*second})
    return lines + [f"{name} differs" for name in shared if not _is_equal(first[name], second[name])]


def read_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, by name."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    stored = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(tensor.size, dtype=tensor.properties.dtype)
        for name, tensor in stored.items()
        if isinstance(tensor, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as intended
        dcp.load(tensors, checkpoint_id=checkpoint, no_dist=True)
    return tensors


def victims(role: Role, process: SupervisedProcess) -> list[int]:
    """Pids of the role: one rank or worker, the command itself, or the command and everything below it.

    A raylet counts once ranks start.
    """
    below = list(supervisor.descendants(process.pid))
    if role == "group":
        return below
    if role == "driver":
        return below[:1]  # the first below the supervisor is the command
    if role == "raylet":
        raylets = [pid for pid in below if _title(pid).partition("\0")[0].endswith("/raylet")]
        return raylets if victims("rank", process) else []
    return [pid for pid in below if _title(pid).startswith(TITLES[role])][-1:]


def _metric_differences(expected: Path, found: Path) -> Iterator[str]:
    lines, others = (read_json_lines(output / METRICS_FILE) for output in (expected, found))
    steps = [[line["step"] for line in own] for own in (lines, others)]
    if steps[0] != steps[1]:
        yield f"steps {steps[0]} and {steps[1]}"
        return
    for line, other in zip(lines, others, strict=True):
        names = sorted(name for name in {*line, *other} if not name.startswith(MEASURED))
        for name in names:
            if line.get(name) != other.get(name):
                yield f"step {line['step']} {name} {line.get(name)} and {other.get(name)}"


def _is_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    import torch

    return first.dtype == second.dtype and torch.equal(first, second)


def _wait_for(moment: Moment, training: Training, process: SupervisedProcess) -> bool:
    """Wait for the moment; False when the command ended before."""

    def has_come() -> bool:
        return training.num_steps() >= moment.after_step and bool(victims(moment.role, process))

    came = _wait(lambda: has_come() or process.poll() is not None, process)
    time.sleep(moment.seconds)
    return came and process.poll() is None


def _strike(moment: Moment, training: Training, process: SupervisedProcess) -> bool:
    """Kill now, wait until they are gone, and print what was killed; False when the role has no process."""
    step, pids = training.num_steps(), victims(moment.role, process)
    started = {pid: at for pid, at in supervisor.descendants(process.pid).items() if pid in pids}
    if not started:
        return False
    for pid in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def are_gone() -> bool:
        below = supervisor.descendants(process.pid)
        return not any(below.get(pid) == start for pid, start in started.items())

    _wait(are_gone, process)
    shown = " ".join(map(str, [*started][:3])) + (" ..." if len(started) > 3 else "")
    print(f"step {step:3d} + {moment.seconds:5.2f} s: killed {moment.role:6} {shown}", flush=True)
    return True


def _wait(condition: Callable[[], bool], process: SupervisedProcess) -> bool:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {DEADLINE_SECONDS:.0f} s; last lines: {process.tail(20)}")
        time.sleep(POLL_SECONDS)
    return True


def _exit_code(process: SupervisedProcess) -> int:
    _wait(lambda: process.poll() is not None, process)
    code = process.poll()
    assert code is not None
    return code


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _prepare(folder: Path, num_steps: int) -> tuple[Training, Training]:
    """The recipe's data and model, and two trainings on them."""
    options = [word for override in (*OVERRIDES, f"train.total_steps={num_steps}") for word in ("--set", override)]
    data, model = folder / "data", folder / "model"
    stages: list[list[str | Path]] = [
        ["prepare-data", RECIPE, "--output", data],
        ["fetch-model", RECIPE, "--data", data / "train.parquet", "--output", model],
    ]
    for words in stages:
        run_command(dapo_command(*words, *options), log_path=folder / "stages.log", label=str(words[0]))
    more = ("--held-out", str(data / "eval.parquet"), *options, "--set", "train.max_restarts=1000")
    return (
        Training(Path(RECIPE), data / "train.parquet", model, folder / "alone", more),
        Training(Path(RECIPE), data / "train.parquet", model, folder / "killed", more),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20, help="in random roles (default: %(default)s)")
    parser.add_argument("--roles", nargs="+", choices=get_args(Role), help="these instead, in this order")
    parser.add_argument("--steps", type=int, default=30, help="training steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of roles and moments (default: %(default)s)")
    parser.add_argument(
        "--spread-seconds", type=float, default=5.0, help="most seconds after a step (default: %(default)s)"
    )
    parser.add_argument("--folder", type=Path, help="for scratch (default: the system's temporary folder)")
    return parser


if __name__ == "__main__":
    main()
