"""A training on a task with wrong long responses: which groups it trains on and carries over."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dapo_core.checkpoint.folder import latest_checkpoint
from dapo_core.checkpoint.state import TrainerState, read_state
from dapo_core.draw.account import FATES, Draw
from dapo_core.draw.groups import Group
from dapo_core.draw.sampler import Sampler
from dapo_core.training import train
from tests.in_process import without_ray
from tests.trainings import World, config_of

NUM_STEPS = 4
TRAIN_PROMPTS = 4
SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": 0, "acc": len(solution_str) < 120}
"""


@dataclass
class Seen:
    """The draws of a training, and how each step ended."""

    draws: list[Draw] = field(default_factory=list)
    finished: list[Group] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    states: list[TrainerState] = field(default_factory=list)

    @property
    def kept(self) -> list[Group]:
        return [group for draw in self.draws for group in draw.groups]


def _train(world: World, folder: Path, calls: Sequence[int]) -> Seen:
    """Train to each number of steps in a separate call, with weights that hardly change."""
    (folder / "scorer.py").write_text(SCORER)
    seen = Seen()
    draw, record = Sampler.draw, Sampler._record

    def drawing(sampler: Sampler, step: int, *rest: Any) -> Draw:
        seen.draws.append(draw(sampler, step, *rest))
        return seen.draws[-1]

    def recording(sampler: Sampler, finished: Sequence[Group], *rest: object) -> None:
        seen.finished += finished
        record(sampler, finished, *rest)  # type: ignore[arg-type]

    def note(step: int, metrics: dict[str, float]) -> None:
        seen.metrics.append(metrics)
        checkpoint = latest_checkpoint(folder / "run" / "checkpoints")
        assert checkpoint is not None
        seen.states.append(read_state(checkpoint))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sampler, "draw", drawing)
        patch.setattr(Sampler, "_record", recording)
        for total_steps in calls:
            config = config_of(
                run={"deterministic": False},
                custom_reward={"path": str(folder / "scorer.py")},
                sampler={"gen_prompts": 4 * TRAIN_PROMPTS, "dynamic": True, "window": 0},
                rollout={"group_size": 2, "max_response_tokens": 240},
                train={
                    **{
                        "num_ranks": 1,
                        "train_prompts": TRAIN_PROMPTS,
                        "mini_prompts": TRAIN_PROMPTS,
                    },
                    **{"learning_rate": 1e-9, "total_steps": total_steps},
                },
                checkpoint={"asynchronous": False},
            )
            with without_ray():
                train(config, world.data, world.model, folder / "run", note)
    return seen


@pytest.fixture(scope="module")
def stream(world: World, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return _train(world, tmp_path_factory.mktemp("stream"), (NUM_STEPS - 1, NUM_STEPS))


def _has_signal(group: Group) -> bool:
    return len({rollout.acc for rollout in group.rollouts}) == 2


def test_a_step_trains_on_the_first_groups_with_signal_however_long(stream: Seen) -> None:
    with_signal = sorted(
        (group for group in stream.finished if _has_signal(group)), key=lambda group: group.group_id
    )
    num_kept = NUM_STEPS * TRAIN_PROMPTS
    assert [group.group_id for group in stream.kept] == [
        group.group_id for group in with_signal[:num_kept]
    ]


def test_unfinished_groups_resume_with_the_version_of_each_token(stream: Seen) -> None:
    num_continued = 0
    for before, after in zip(stream.states, stream.draws[1:], strict=False):
        begun = {
            request.group_id: request
            for request in before.unfinished
            if request.num_response_tokens
        }
        for group in after.groups:
            if group.group_id not in begun:
                continue
            request = begun[group.group_id]
            for old, spans, rollout in zip(
                request.responses, request.versions, group.rollouts, strict=True
            ):
                num_old = len(old.response_ids)
                assert rollout.response_ids[:num_old].tolist() == old.response_ids.tolist()
                assert rollout.versions[: len(spans)] == spans
                assert sum(count for _, count in rollout.versions) == len(rollout.response_ids)
                num_continued += len(rollout.versions) > len(spans) > 0
    assert num_continued > 0
    staleness = [line["sampler/staleness/max"] for line in stream.metrics]
    assert staleness[0] == 0
    assert 0 < max(staleness) <= 3  # one optimizer step a training step; max_staleness is 3


def test_every_token_is_accounted_for_across_steps(stream: Seen) -> None:
    carried_in = 0
    for metrics, state in zip(stream.metrics, stream.states, strict=True):
        fates = sum(metrics[f"sampler/{fate}_tokens"] for fate in FATES)
        assert (
            metrics["perf/generated_tokens"] + carried_in
            == fates + metrics["sampler/carried_out_tokens"]
        )
        carried_in = sum(item.num_response_tokens for item in [*state.surplus, *state.unfinished])
        assert (
            carried_in == metrics["sampler/surplus_tokens"] + metrics["sampler/carried_out_tokens"]
        )
