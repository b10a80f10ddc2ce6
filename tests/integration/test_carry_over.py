"""Partial rollouts: unfinished groups survive a weight update, a checkpoint and the process."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from dapo_core.checkpoint.folder import latest_checkpoint
from dapo_core.checkpoint.state import TrainerState, read_state
from dapo_core.sampler import FATES
from dapo_core.training import train
from flows.config import Config
from tests.trainings import World, config_of


def _config(total_steps: int, ray_address: str) -> Config:
    """One group of four a step, and five rows in the engine: a group is half done when another finishes."""
    train = {"num_ranks": 1, "train_prompts": 1, "mini_prompts": 1, "total_steps": total_steps}
    return config_of(
        run={"deterministic": False},
        reward={"overlong": {"enabled": False}},
        sampler={"gen_prompts": 20, "in_flight": "carry_over"},
        rollout={"max_num_seqs": 5},
        train={**train, "ray_address": ray_address},
        checkpoint={"asynchronous": False},
    )


def _num_tokens(state: TrainerState) -> int:
    """Response tokens carried into the next step."""
    return sum(item.num_response_tokens for _, item in [*state.surplus, *state.unfinished])


@pytest.fixture(scope="module")
def steps(
    world: World, ray_address: str, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[dict[str, float], TrainerState]]:
    """Metrics and state of three steps, the last one by a second call."""
    folder = tmp_path_factory.mktemp("carry_over")
    steps: list[tuple[dict[str, float], TrainerState]] = []

    def note(step: int, metrics: dict[str, float]) -> None:
        checkpoint = latest_checkpoint(folder / "run" / "checkpoints")
        assert isinstance(checkpoint, Path)
        steps.append((metrics, read_state(checkpoint)))

    for total_steps in (2, 3):
        train(_config(total_steps, ray_address), world.data, world.model, folder / "run", note)
    return steps


def test_unfinished_groups_are_trained_in_the_next_steps(
    steps: list[tuple[dict[str, float], TrainerState]],
) -> None:
    assert [state.step for _, state in steps] == [1, 2, 3]
    for (_, before), (_, after) in itertools.pairwise(steps):
        begun = [(drawn_at, request) for drawn_at, request in before.unfinished if request.num_response_tokens]
        assert begun
        for drawn_at, request in begun:
            assert request.policy_version == drawn_at - 1  # one optimizer step a training step
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
