"""An engine over two processes, colocated with ranks: syncs, rollouts, and a dead process."""

from contextlib import ExitStack
from pathlib import Path

import pytest
import ray
import torch

import dapo_core.cluster.actors
from dapo_core.algorithm.batch import Batch
from dapo_core.cluster.start import Cluster, start_cluster
from dapo_core.draw.groups import GroupRequest
from dapo_core.draw.prompts import Prompt
from dapo_core.errors import WorkerDied
from dapo_core.machine.timers import PhaseTimer
from dapo_core.metrics.engine_checks import probe_difference
from dapo_core.model.inputs import ModelInput
from dapo_core.turns import Turns
from tests.batches import random_batch
from tests.integration.test_dead_workers import SCORER, killed_within, take_groups, update
from tests.trainings import World, config_of

REQUESTS = [
    GroupRequest(number, Prompt(number, ModelInput((5, 6)), "arithmetic", "1"), 1)
    for number in range(4)
]


def _require_sync(cluster: Cluster, turns: Turns, batch: Batch, version: int) -> None:
    """Update, sync, and check that the engine computes with the new weights."""
    timer, probe = PhaseTimer(), batch.select([0])
    turns.enter("update", timer)
    update(cluster, batch)
    turns.enter("publish", timer)
    cluster.weights.send(version)
    log_probs = cluster.policy.log_probs(probe, 1.0).log_probs
    turns.enter("generate", timer)
    assert probe_difference(cluster.rollouts.log_probs, probe, log_probs, [torch.float32]) < 1e-5


def test_an_engine_over_two_processes(
    ray_address: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # only a ping detects a dead follower
    monkeypatch.setattr(dapo_core.cluster.actors, "PING_SECONDS", 0.5)
    (tmp_path / "scorer.py").write_text(SCORER)
    config = config_of(
        train={"ray_address": ray_address, "placement": "colocated"},
        rollout={"engine": "vllm", "tensor_parallel": 2, "memory_gigabytes": 0.1},
        custom_reward={"path": str(tmp_path / "scorer.py")},
    )
    assert config.num_devices == config.train.num_ranks
    batch = random_batch(num_groups=4, group_size=4)
    shared_memory = {*Path("/dev/shm").iterdir()}
    with ExitStack() as stack:
        stack.enter_context(pytest.raises(WorkerDied, match=r"^engine part 0 of 1 \(pid .*\) died"))
        cluster = stack.enter_context(start_cluster(config, world.model))
        assert not [
            path for path in {*Path("/dev/shm").iterdir()} - shared_memory if "cpushm" in path.name
        ]
        turns = Turns(cluster.policy, cluster.rollouts, config.train)
        _require_sync(cluster, turns, batch, 1)
        # pretend that parts are on another node
        for version, is_local in enumerate([[False, False], [True, False]], 2):
            cluster.weights.connect(
                is_local, lambda number=version: f"file://{tmp_path}/meet_{number}"
            )
            _require_sync(cluster, turns, batch, version)
        cluster.rollouts.submit(REQUESTS)
        groups = []
        while len(groups) < len(REQUESTS):
            groups += cluster.rollouts.finished()
        assert {group.rollouts[0].versions[0][0] for group in groups} == {3}
        cluster.rollouts.submit(REQUESTS)
        follower = cluster.rollouts.actors._actors[-1]
        with killed_within(ray.get(follower.handle.place.remote())):
            take_groups(cluster.rollouts)
