"""Kills a training many times, in every role, and compares its result with an undisturbed training.

Parameters and optimizer state must be bit-identical, and so must metrics.jsonl except for times and
memory. An asynchronous training depends on timing: it is compared with a replay of its recorded
draws. Prints a line per kill. Exit status 1 means that something differs.
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
from dapo_core.metrics.log import METRICS_FILE
from durable import read_json_lines
from tasks.processes import supervisor
from tasks.processes.child import SupervisedProcess, background_command, dapo_command, run_command

if TYPE_CHECKING:
    import torch

RECIPE = "configs/arith_cpu.yaml"
EXAMPLE = """examples: the 20 kills of docs/checkpoints.md, and three chosen ones
  .venv/bin/python bench/crash.py --kills 20 --seed 0
  .venv/bin/python bench/crash.py --roles rank worker group --steps 8
  .venv/bin/python bench/crash.py --asynchronous --kills 10
"""
# A checkpoint every other small step, so that most kills lose finished work.
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
ASYNCHRONOUS = (
    "run.deterministic=false",
    "rollout.schedule=asynchronous",
    "sampler.max_staleness=2",
    "train.record_draws=true",
)
OF_THE_DRAW = ("sampler/", "train/num_gen_batches", "training/epoch", "perf/generated_tokens")
Role = Literal["driver", "rank", "worker", "group", "raylet"]
RANDOM_ROLES: tuple[Role, ...] = ("driver", "rank", "worker", "group")  # as in docs/checkpoints.md
TITLES = {"rank": "ray::PolicyRank", "worker": "ray::RolloutRank"}
DEADLINE_SECONDS = 900.0
POLL_SECONDS = 0.02
SPREAD_SECONDS = 5.0  # a kill comes at most this long after its step
# Metrics that depend on the machine.
MEASURED = (
    "wall_time",
    "timing_",
    "perf/time_per_step",
    "perf/throughput",
    "perf/engine_",
    "perf/mfu",
    "perf/max_",
    "perf/cpu_",
    "perf/device_memory",
)


@dataclass(frozen=True)
class Training:
    """One `dapo train` on the given paths. Repeating the command continues it."""

    recipe: Path
    data: Path
    model: Path
    output: Path
    options: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        """The `dapo train` command."""
        paths = {"--data": self.data, "--model": self.model, "--output": self.output}
        words = [word for option, path in paths.items() for word in (option, str(path))]
        return dapo_command("train", self.recipe, *words, *self.options)

    @property
    def log_path(self) -> Path:
        return self.output.with_suffix(".log")

    def num_steps(self) -> int:
        """Training steps in metrics.jsonl."""
        return len(read_json_lines(self.output / METRICS_FILE))


@dataclass(frozen=True)
class Moment:
    """When to kill a role: `seconds` after it has a process and metrics.jsonl has the step."""

    role: Role
    after_step: int
    seconds: float


def main() -> None:
    """Train undisturbed, train through the kills, and compare."""
    arguments = _parser().parse_args()
    logging.basicConfig(level=logging.WARNING)
    rng = random.Random(arguments.seed)
    roles: list[Role] = arguments.roles or [
        rng.choice(RANDOM_ROLES) for _ in range(arguments.kills)
    ]
    moments = random_moments(roles, arguments.steps, rng)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        is_replayed = arguments.asynchronous
        undisturbed, killed = _prepare(folder, arguments.steps, is_replayed)
        if not is_replayed:
            _train(undisturbed, "undisturbed")
        began = time.monotonic()
        num_kills = train_through_kills(killed, moments)
        print(
            f"{num_kills} of {len(moments)} kills, {arguments.steps} steps in "
            f"{time.monotonic() - began:.0f} s",
            flush=True,
        )
        if is_replayed:
            _train(undisturbed, "replayed")
        ignored = OF_THE_DRAW if is_replayed else ()
        differing = differences(undisturbed.output, killed.output, ignored)
    print(
        "\n".join(differing) if differing else "parameters, optimizer and metrics are bit-identical"
    )
    sys.exit(1 if differing or num_kills < len(moments) else 0)


def _train(training: Training, title: str) -> None:
    began = time.monotonic()
    run_command(
        training.command, log_path=training.log_path, label="train", on_line=lambda line: None
    )
    print(f"{title} in {time.monotonic() - began:.0f} s", flush=True)


def random_moments(roles: Sequence[Role], num_steps: int, rng: random.Random) -> list[Moment]:
    """Draw a moment per role in the first four fifths of the training, so that every kill precedes
    its end.
    """
    last = 0.8 * num_steps / len(roles)
    return [
        Moment(role, int((number + rng.random()) * last), rng.uniform(0, SPREAD_SECONDS))
        for number, role in enumerate(roles)
    ]


def train_through_kills(training: Training, moments: Sequence[Moment]) -> int:
    """Train to the end, killing at each moment and restarting the command whenever it was killed.

    Returns the number of kills. Raises ChildProcessFailed if the command fails by itself.
    """
    pending, is_done = list(moments), False
    while not is_done:
        may_end = False
        with background_command(
            training.command, log_path=training.log_path, label="train"
        ) as process:
            is_command_killed = False
            while pending and not is_command_killed and _wait_for(pending[0], training, process):
                if _kill(pending[0], training, process):
                    role = pending.pop(0).role
                    is_command_killed = role in ("driver", "group")
                    may_end |= role == "raylet"  # Ray ends the driver unless a rank's end is seen
            exit_code = _exit_code(process)
            if exit_code and exit_code != -signal.SIGKILL and not (may_end and exit_code == 1):
                raise process.failure()
            is_done = exit_code == 0
    return len(moments) - len(pending)


def differences(expected: Path, found: Path, ignored: tuple[str, ...] = ()) -> list[str]:
    """Returns the differences between two training outputs, one per line, ignoring times, memory
    and metrics that begin with any of `ignored`.
    """
    measured = MEASURED + ignored
    lines = [f"metrics.jsonl: {text}" for text in _metric_differences(expected, found, measured)]
    checkpoints = [latest_checkpoint(output / "checkpoints") for output in (expected, found)]
    names = [checkpoint and checkpoint.name for checkpoint in checkpoints]
    if names[0] != names[1] or checkpoints[0] is None or checkpoints[1] is None:
        return [*lines, f"checkpoints: {names[0]} and {names[1]}"]
    first, second = (read_tensors(checkpoint) for checkpoint in (checkpoints[0], checkpoints[1]))
    lines += [f"{name} is in one checkpoint only" for name in sorted({*first} ^ {*second})]
    shared = sorted({*first} & {*second})
    return lines + [
        f"{name} differs" for name in shared if not _is_equal(first[name], second[name])
    ]


def read_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Returns the full tensors of a checkpoint by name."""
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
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # expected
        dcp.load(tensors, checkpoint_id=checkpoint, no_dist=True)
    return tensors


def victims(role: Role, process: SupervisedProcess) -> list[int]:
    """Returns pids of the role: one rank or worker, the command itself, or the command with all
    descendants.

    The raylet counts only once ranks exist.
    """
    tree = list(supervisor.descendants(process.pid))
    if role == "group":
        return tree
    if role == "driver":
        return tree[:1]  # the supervisor's first descendant
    if role == "raylet":
        raylets = [pid for pid in tree if _title(pid).partition("\0")[0].endswith("/raylet")]
        return raylets if victims("rank", process) else []
    return [pid for pid in tree if _title(pid).startswith(TITLES[role])][-1:]


def _metric_differences(expected: Path, found: Path, ignored: tuple[str, ...]) -> Iterator[str]:
    lines, others = (read_json_lines(output / METRICS_FILE) for output in (expected, found))
    steps = [[line["step"] for line in log] for log in (lines, others)]
    if steps[0] != steps[1]:
        yield f"steps {steps[0]} and {steps[1]}"
        return
    for line, other in zip(lines, others, strict=True):
        names = sorted(name for name in {*line, *other} if not name.startswith(ignored))
        for name in names:
            if line.get(name) != other.get(name):
                yield f"step {line['step']} {name} {line.get(name)} and {other.get(name)}"


def _is_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    import torch

    return first.dtype == second.dtype and torch.equal(first, second)


def _wait_for(moment: Moment, training: Training, process: SupervisedProcess) -> bool:
    """Wait for the moment; False if the command ended first."""

    def is_due() -> bool:
        return training.num_steps() >= moment.after_step and bool(victims(moment.role, process))

    _wait(lambda: is_due() or process.poll() is not None, process)
    time.sleep(moment.seconds)
    return process.poll() is None


def _kill(moment: Moment, training: Training, process: SupervisedProcess) -> bool:
    """Kill the role's processes, wait for their end and print them; False if the role has none."""
    step, pids = training.num_steps(), victims(moment.role, process)
    started = {pid: at for pid, at in supervisor.descendants(process.pid).items() if pid in pids}
    if not started:
        return False
    for pid in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def have_ended() -> bool:
        running = supervisor.descendants(process.pid)
        return not any(running.get(pid) == start for pid, start in started.items())

    _wait(have_ended, process)
    shown = " ".join(map(str, [*started][:3])) + (" ..." if len(started) > 3 else "")
    print(f"step {step:3d} + {moment.seconds:5.2f} s: killed {moment.role:6} {shown}", flush=True)
    return True


def _wait(condition: Callable[[], bool], process: SupervisedProcess) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {DEADLINE_SECONDS:.0f} s; last lines: {process.tail(20)}")
        time.sleep(POLL_SECONDS)


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


def _prepare(folder: Path, num_steps: int, is_replayed: bool) -> tuple[Training, Training]:
    """Prepare the recipe's data and model; returns two trainings on them.

    The second is asynchronous and the first its replay if `is_replayed`.
    """
    overrides = (*OVERRIDES, *(ASYNCHRONOUS if is_replayed else ()))
    options = [
        word
        for override in (*overrides, f"train.total_steps={num_steps}")
        for word in ("--set", override)
    ]
    data, model = folder / "data", folder / "model"
    stages: list[list[str | Path]] = [
        ["prepare-data", RECIPE, "--output", data],
        ["fetch-model", RECIPE, "--data", data / "train.parquet", "--output", model],
    ]
    for words in stages:
        run_command(
            dapo_command(*words, *options), log_path=folder / "stages.log", label=str(words[0])
        )
    more = ("--held-out", str(data / "eval.parquet"), *options, "--set", "train.max_restarts=1000")
    replay = ("--replay", str(folder / "killed")) if is_replayed else ()
    return (
        Training(Path(RECIPE), data / "train.parquet", model, folder / "alone", (*more, *replay)),
        Training(Path(RECIPE), data / "train.parquet", model, folder / "killed", more),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kills",
        type=int,
        default=20,
        help="number of kills in random roles (default: %(default)s)",
    )
    parser.add_argument(
        "--roles", nargs="+", choices=get_args(Role), help="kill these roles instead, in this order"
    )
    parser.add_argument(
        "--asynchronous",
        action="store_true",
        help="train with rollout.schedule=asynchronous, and compare with the replay",
    )
    parser.add_argument(
        "--steps", type=int, default=30, help="training steps (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of roles and moments (default: %(default)s)"
    )
    return parser


if __name__ == "__main__":
    main()
