"""Partial rollouts over real parts: unfinished groups outlive a weight update, a checkpoint and the process."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from dapo_core.arithmetic import generate_problems, write_parquet
from dapo_core.checkpoint.folder import latest_checkpoint
from dapo_core.checkpoint.state import TrainerState, read_state
from dapo_core.sampler import FATES
from dapo_core.training import train
from flows.config import Config, resolve_config
from tests.tiny_models import build_tiny_qwen3

MAX_RESPONSE_TOKENS = 24


def _config(total_steps: int, ray_address: str) -> Config:
    """One group of four a step; five rows in the engine, so that a group is half-way when another finishes."""
    return resolve_config(
        {
            "data": {"source": "arithmetic", "max_prompt_tokens": 400},
            "model": {"source": "recipe"},
            "reward": {"overlong": {"enabled": False}, "num_processes": 1},
            "sampler": {"gen_prompts": 20, "dynamic": False, "in_flight": "carry_over"},
            "rollout": {
                "engine": "hf",
                "group_size": 4,
                "max_num_seqs": 5,
                "max_response_tokens": MAX_RESPONSE_TOKENS,
                "threads_per_worker": 1,
            },
            "train": {
                "train_prompts": 1,
                "mini_prompts": 1,
                "micro_batch_tokens": 1024,
                "total_steps": total_steps,
                "ray_address": ray_address,
            },
            "checkpoint": {"save_every": 1, "asynchronous": False},
            "serve": {"max_model_len": 512},
            "evaluate": {"max_response_tokens": 24},
        }
    )


def _num_tokens(state: TrainerState) -> int:
    """Response tokens that wait for the next step."""
    return sum(item.num_response_tokens for _, item in [*state.surplus, *state.unfinished])


@pytest.fixture(scope="module")
def steps(
    ray_address: str, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[dict[str, float], TrainerState]]:
    """Metrics and state of three steps, the last one by a second call."""
    folder = tmp_path_factory.mktemp("carry_over")
    write_parquet(generate_problems(40, 1, 1, seed=0)[0], folder / "train.parquet")
    model = build_tiny_qwen3(folder / "model")
    steps: list[tuple[dict[str, float], TrainerState]] = []

    def note(step: int, metrics: dict[str, float]) -> None:
        checkpoint = latest_checkpoint(folder / "run" / "checkpoints")
        assert isinstance(checkpoint, Path)
        steps.append((metrics, read_state(checkpoint)))

    for total_steps in (2, 3):
        train(_config(total_steps, ray_address), folder / "train.parquet", model, folder / "run", note)
    return steps


def test_unfinished_groups_are_trained_on_by_the_next_steps(
    steps: list[tuple[dict[str, float], TrainerState]],
) -> None:
    assert [state.step for _, state in steps] == [1, 2, 3]
    for (_, before), (_, after) in itertools.pairwise(steps):
        begun = [(born, request) for born, request in before.unfinished if request.num_response_tokens]
        assert begun
        for born, request in begun:
            assert request.policy_version == born - 1  # one optimizer step a training step
        later = {request.group_id: request for _, request in after.unfinished}
        went_on = [request for _, request in begun if request.group_id in later]
        for request in went_on:
            for old, new in zip(request.responses, later[request.group_id].responses, strict=True):
                assert new.response_ids[: len(old.response_ids)] == old.response_ids
    assert all(metrics["sampler/kept_groups"] == 1 for metrics, _ in steps)
    assert steps[0][0]["train/num_gen_batches"] == 1
    assert steps[-1][1].prompt_position == 20  # nothing fresh was drawn: all came from the first step's twenty


def test_every_token_is_booked_across_steps_and_processes(
    steps: list[tuple[dict[str, float], TrainerState]],
) -> None:
    carried_in = 0
    for metrics, state in steps:
        fates = sum(metrics[f"sampler/{fate}_tokens"] for fate in FATES)
        assert metrics["perf/generated_tokens"] + carried_in == fates + metrics["sampler/carried_out_tokens"]
        carried_in = _num_tokens(state)
        assert carried_in == metrics["sampler/surplus_tokens"] + metrics["sampler/carried_out_tokens"]
        assert metrics["sampler/aborted_groups"] == 0
