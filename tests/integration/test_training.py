"""Training end to end over real parts: Ray, two FSDP2 ranks over gloo, an engine, checkpoints, a SIGKILL."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.distributed.checkpoint.format_utils import _load_state_dict
from torch.distributed.checkpoint.state_dict_loader import _EmptyStateDictLoadPlanner

from dapo_core.arithmetic import generate_problems, write_parquet
from dapo_core.checkpoint import TrainerState, read_state
from dapo_core.config import Config, resolve_config
from dapo_core.errors import NotEnoughSignal, RolloutError
from dapo_core.metrics import METRICS_FILE, read_metrics
from dapo_core.trainer import TrainResult, train
from dapo_core.warm_start import WarmStartRecipe, build_model
from tasks import supervisor
from tasks.command import dapo_command
from tasks.process import background_command

UNINTERRUPTED_STEPS = 4
TOTAL_STEPS = 5
OPTIMIZER_STEPS = 2  # per training step: train_prompts / mini_prompts
NUM_PROBLEMS = 200
DEADLINE_SECONDS = 120.0

SETTINGS: dict[str, dict[str, Any]] = {
    "run": {"seed": 3, "deterministic": True},  # what a step keeps must not hang on speed: runs are compared
    "data": {"source": "arithmetic", "max_prompt_tokens": 96},
    "model": {"source": "recipe"},
    "reward": {"overlong": {"buffer_tokens": 8}},
    # Without dynamic sampling every group is kept, so a barely trained model will do; 6 prompts drawn for 4
    # needed leave surplus groups, which checkpoints must carry.
    "sampler": {"gen_prompts": 6, "dynamic": False},
    "rollout": {"engine": "hf", "group_size": 4, "max_response_tokens": 24, "threads_per_worker": 1},
    "train": {
        "num_ranks": 2,
        "train_prompts": 4,
        "mini_prompts": 2,
        "micro_batch_tokens": 512,
        "learning_rate": 1e-3,
        "warmup_steps": 6,  # longer than the interrupted part, so the schedule's position must survive as well
        "save_every": 1,
        "keep_last": 2,
    },
    "serve": {"max_model_len": 192},
    "evaluate": {"max_response_tokens": 24},
}


@dataclass(frozen=True)
class World:
    """Training data and a model that has begun to learn it."""

    data: Path
    model: Path


@dataclass(frozen=True)
class Run:
    """A training output and what was seen of it: before it was continued, and at the end."""

    folder: Path
    first: TrainResult
    first_metrics: list[dict[str, float]]
    first_state: TrainerState
    checkpoints: list[list[str]]  # after each of the first steps
    last: TrainResult
    told: list[int]  # steps that the callback of the continued run got


def settings(**changes: dict[str, Any]) -> dict[str, Any]:
    return {name: {**section, **changes.get(name, {})} for name, section in SETTINGS.items()}


def config_of(**changes: dict[str, Any]) -> Config:
    return resolve_config(settings(**changes))


def checkpoint_names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    rows = generate_problems(NUM_PROBLEMS, 1, 1, seed=0)[0]
    write_parquet(rows, folder / "train.parquet")
    recipe = WarmStartRecipe(hidden_size=32, num_heads=2, head_dim=16, num_steps=20, batch_size=8, num_threads=1)
    build_model(rows, folder / "model", recipe, seed=0)
    return World(folder / "train.parquet", folder / "model")


@pytest.fixture(scope="module")
def run(world: World, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Four steps in one go, then one more by a second call on the same output."""
    folder = tmp_path_factory.mktemp("run")
    checkpoints: list[list[str]] = []
    first = train(
        config_of(train={"total_steps": UNINTERRUPTED_STEPS}),
        world.data,
        world.model,
        folder,
        lambda step, metrics: checkpoints.append(checkpoint_names(folder)),
    )
    first_metrics, first_state = read_metrics(folder / METRICS_FILE), read_state(first.checkpoint)
    told: list[int] = []
    last = train(
        config_of(train={"total_steps": TOTAL_STEPS}),
        world.data,
        world.model,
        folder,
        lambda step, metrics: told.append(step),
    )
    return Run(folder, first, first_metrics, first_state, checkpoints, last, told)


def test_each_step_s_numbers_fit_each_other(run: Run) -> None:
    assert [line["step"] for line in run.first_metrics] == [1, 2, 3, 4]
    carried_in = 0.0
    for line in run.first_metrics:
        phases = ("gen", "adv", "old_log_prob", "update_actor", "weight_sync", "save_checkpoint")
        spent = sum(line[f"timing_s/{phase}"] for phase in phases)
        assert spent <= line["timing_s/step"]
        assert spent == pytest.approx(line["timing_s/step"], rel=0.05, abs=0.03)
        num_responses = 16  # 4 prompts x 4 responses
        num_tokens = num_responses * (line["prompt_length/mean"] + line["response_length/mean"])
        assert line["perf/total_num_tokens"] == pytest.approx(num_tokens)
        assert line["perf/trained_response_tokens"] == line["sampler/kept_tokens"]
        assert line["perf/throughput"] == pytest.approx(num_tokens / line["timing_s/step"] / 2)  # 2 ranks
        fates = ("kept", "all_right", "all_wrong", "surplus", "stale", "aborted")
        went = sum(line[f"sampler/{fate}_tokens"] for fate in fates)
        assert line["perf/generated_tokens"] + carried_in == went
        carried_in = line["sampler/surplus_tokens"]
        assert sum(line[f"reward/{verdict}_ratio"] for verdict in ("right", "wrong", "no_answer")) == 1.0
        # the anchor is the policy that sampled, except for surplus, which is one step old
        if line["train/num_gen_batches"] == 1.0 and line["step"] == 1:
            assert line["rollout/probs_diff_max"] < 1e-4
        assert line["actor/grad_norm"] > 0
        assert line["actor/skipped_updates"] == 0


def test_engine_and_policy_agree_after_every_step(run: Run) -> None:
    lines = read_metrics(run.folder / METRICS_FILE)
    assert [line["policy_version"] for line in lines] == [2, 4, 6, 8, 10]
    assert max(line["weight_sync/probe_difference"] for line in lines) < 1e-4


def test_the_last_checkpoints_are_kept(run: Run) -> None:
    assert run.checkpoints == [
        ["step_000001"],
        ["step_000001", "step_000002"],
        ["step_000002", "step_000003"],
        ["step_000004"],  # a finished output holds one, whatever train.keep_last says
    ]
    assert run.first.checkpoint.name == "step_000004"
    assert checkpoint_names(run.folder) == ["step_000005"]


def test_a_second_call_continues_at_the_next_step(run: Run) -> None:
    assert run.told == [5]
    assert (run.last.steps, run.last.policy_version) == (TOTAL_STEPS, TOTAL_STEPS * OPTIMIZER_STEPS)
    lines = read_metrics(run.folder / METRICS_FILE)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines[:4] == run.first_metrics
    # 1/6 of the rate per optimizer step of warm-up: steps 2, 4, 6, 8, 10 end training steps 1 to 5
    assert [line["actor/lr"] for line in lines] == pytest.approx([2e-3 / 6, 4e-3 / 6, 1e-3, 1e-3, 1e-3])
    before, after = run.first_state, read_state(run.last.checkpoint)
    num_drawn = int(6 * lines[4]["train/num_gen_batches"])
    assert after.prompt_position == before.prompt_position + num_drawn
    assert lines[4]["training/epoch"] == pytest.approx(after.prompt_position / NUM_PROBLEMS)


def read_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of parameters and optimizer, whole."""
    state: dict[str, Any] = {}
    _load_state_dict(
        state,
        storage_reader=torch.distributed.checkpoint.FileSystemReader(checkpoint),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    flat: dict[str, torch.Tensor] = {}
    waiting = [("", state)]
    while waiting:
        prefix, node = waiting.pop()
        for name, value in node.items():
            if isinstance(value, dict):
                waiting.append((f"{prefix}{name}/", value))
            elif isinstance(value, torch.Tensor):
                flat[prefix + name] = value
    return flat


def kill_after_two_steps(world: World, folder: Path, recipe: Path) -> None:
    """`dapo train` as a stage runs it, killed in its third step or soon after; all its processes are gone."""
    recipe.write_text(yaml.safe_dump(settings(train={"total_steps": 1000})))
    words: list[str | Path] = ["train", recipe, "--data", world.data, "--model", world.model, "--output", folder]
    with background_command(dapo_command(*words), log_path=recipe.with_suffix(".log"), label="train") as process:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while len(read_metrics(folder / METRICS_FILE)) < 2:
            assert process.poll() is None, process.failure()
            assert time.monotonic() < deadline, process.tail(20)
            time.sleep(0.01)
        below = supervisor.descendants(process.pid)
        assert len(below) >= 6  # the command, Ray's own processes, two ranks, one rollout worker
        os.kill(next(iter(below)), signal.SIGKILL)  # the first below the supervisor is the command
        wait_until_gone(below, seconds=30)
        assert process.failure().args[0].startswith("train was killed by SIGKILL")


def is_alive(pid: int, start_time: str) -> bool:
    fields = supervisor._stat_fields(pid)
    return bool(fields) and fields[0] != "Z" and fields[19] == start_time


def wait_until_gone(processes: dict[int, str], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while living := {pid for pid, start_time in processes.items() if is_alive(pid, start_time)}:
        assert time.monotonic() < deadline, f"processes {living} are still there after {seconds} s"
        time.sleep(0.1)


def test_a_killed_run_continues_to_the_same_weights_bit_for_bit(run: Run, world: World, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    kill_after_two_steps(world, folder, tmp_path / "recipe.yaml")
    texts = (folder / METRICS_FILE).read_text().splitlines(keepends=True)
    num_done = len(texts)
    assert 2 <= num_done < TOTAL_STEPS
    # as if the kill had come between the last checkpoint and its line
    (folder / METRICS_FILE).write_text("".join(texts[:-1]) + texts[-1][:40])
    told: list[int] = []
    result = train(
        config_of(train={"total_steps": TOTAL_STEPS}),
        world.data,
        world.model,
        folder,
        lambda step, metrics: told.append(step),
    )
    assert told[0] >= num_done + 1
    assert told == list(range(told[0], TOTAL_STEPS + 1))
    lines, expected = read_metrics(folder / METRICS_FILE), read_metrics(run.folder / METRICS_FILE)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    for line, whole in zip(lines, expected, strict=True):
        for name in ("training/epoch", "actor/pg_loss", "actor/grad_norm", "perf/total_num_tokens"):
            assert line[name] == whole[name], (line["step"], name)
    ours, theirs = read_tensors(result.checkpoint), read_tensors(run.last.checkpoint)
    assert len(ours) > 50
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_an_error_ends_every_process_and_names_what_to_change(world: World, tmp_path: Path) -> None:
    """The barely trained model gets every answer wrong."""
    before = supervisor.descendants(os.getpid())
    config = config_of(
        sampler={"dynamic": True, "max_num_gen_batches": 2}, train={"total_steps": 1, "num_ranks": 1}
    )
    with pytest.raises(NotEnoughSignal, match=r"^2 draws of 6 prompts gave 0 groups .* and 12 all wrong"):
        train(config, world.data, world.model, tmp_path)
    started = {pid: at for pid, at in supervisor.descendants(os.getpid()).items() if pid not in before}
    wait_until_gone(started, seconds=10)
    assert read_metrics(tmp_path / METRICS_FILE) == []


def test_a_worker_s_error_arrives_as_what_it_is(world: World, tmp_path: Path) -> None:
    config = config_of(rollout={"memory_gigabytes": 1e-6}, train={"total_steps": 1, "num_ranks": 1})
    with pytest.raises(
        RolloutError, match=r"^one sequence of 120 tokens needs \d+ bytes of cache, 1073 are there"
    ):
        train(config, world.data, world.model, tmp_path)
