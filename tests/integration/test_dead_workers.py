"""Killed or hanging processes are named, end calls in time, and training can restart."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import ray
from ray.exceptions import (
    ActorUnavailableError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)

import dapo_core.cluster.actors
from dapo_core.algorithm.batch import Batch
from dapo_core.cluster.actors import Actors, death_reason
from dapo_core.cluster.connection import connected_to_ray
from dapo_core.cluster.rollout_group import RolloutGroup
from dapo_core.cluster.start import Cluster, start_cluster
from dapo_core.draw.groups import GroupRequest
from dapo_core.draw.prompts import Prompt
from dapo_core.errors import CheckpointError, DataError, RolloutError, WorkerDied
from dapo_core.model.inputs import ModelInput
from flows.config import Config
from tasks.processes.supervisor import descendants
from tests.batches import random_batch
from tests.trainings import World, config_of

FAR = 120.0
# for a call on a dead process and for cleanup, far below a collective's timeout of half an hour
QUICK = 60.0
PAUSE = 0.3  # between stopping and killing a process, so that others wait for it
SCORER = "def compute_score(**_):\n    return 1.0\n"
ERRORS = {
    "dapo": DataError("no rows"),
    "shards": CheckpointError(
        "the shards cannot be loaded: rank 0: RuntimeError('Connection closed by peer')"
    ),
    "fail": RuntimeError("Connection closed by peer"),
}
REQUESTS = [
    GroupRequest(number, Prompt(number, ModelInput((5, 6)), "arithmetic", "1"), 1)
    for number in range(6)
]
KILLED = r"died: it was killed, for example by the kernel when memory ran out, or it crashed"


@contextmanager
def killed_within(place: str) -> Iterator[None]:
    """Stop the process at `place`, and kill it during the call inside the block."""
    match = re.match(r"pid (\d+) on ", place)
    assert match is not None
    os.kill(int(match[1]), signal.SIGSTOP)
    killer = threading.Timer(PAUSE, os.kill, (int(match[1]), signal.SIGKILL))
    killer.start()
    started = time.monotonic()
    try:
        yield
    finally:
        assert PAUSE <= time.monotonic() - started < QUICK
        killer.join()


@pytest.fixture
def actors(ray_address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    class Actor:  # local, so its process need not import this module
        def place(self) -> str:
            return f"pid {os.getpid()} on here"

        def call(self, what: str) -> None:
            if what == "hang":
                threading.Event().wait()
            raise ERRORS[what]

    monkeypatch.setattr(dapo_core.cluster.actors, "PING_SECONDS", 0.5)
    with connected_to_ray(config_of(train={"ray_address": ray_address}).train, num_cpus=0):
        actors = [ray.remote(Actor).options(num_cpus=1).remote() for _ in range(3)]
        yield actors
        for actor in actors:
            ray.kill(actor)


def test_a_dead_actor_ends_every_call_and_differs_from_an_error(actors: list[Any]) -> None:
    healthy, hanging, victim = actors
    watched = Actors()
    watched.add("policy rank", actors)
    place = watched.get(victim.place.remote())
    with pytest.raises(RayTaskError, match="Connection closed by peer"):  # no actor died
        watched.get([healthy.call.remote("fail")])
    with pytest.raises(DataError, match=r"^no rows$"):
        watched.get([healthy.call.remote("dapo")])
    with pytest.raises(CheckpointError, match="the shards cannot be loaded"):
        watched.get([healthy.call.remote("shards")])
    hanging_call = hanging.call.remote("hang")
    message = rf"^policy rank 2 of 3 \({place}\) {KILLED}$"
    with killed_within(place), pytest.raises(WorkerDied, match=message):
        watched.get([hanging_call, victim.call.remote("hang")])
    with pytest.raises(WorkerDied, match=message):  # even if the dead actor is not called
        watched.get([hanging_call])
    rollouts = RolloutGroup([healthy], FAR, watched)
    with pytest.raises(WorkerDied, match=message):  # while waiting for groups, which takes minutes
        take_groups(rollouts)
    with pytest.raises(WorkerDied, match=message) as caught:  # after a broken collective
        watched.get([healthy.call.remote("fail")])
    # after a save or load that included the dead actor
    with pytest.raises(WorkerDied, match=message):
        watched.get([healthy.call.remote("shards")])
    assert isinstance(caught.value.__cause__, RayActorError)
    with pytest.raises(DataError, match=r"^no rows$"):
        watched.get([healthy.call.remote("dapo")])


def test_waiting_for_a_hanging_worker_times_out(actors: list[Any]) -> None:
    class Hanging:  # local, so its process need not import this module
        """A rollout worker whose engine never returns from its first step."""

        def submit(self, requests: Any) -> None:
            pass

        def poll(self, max_seconds: float) -> None:
            threading.Event().wait()

        def suspend(self) -> None:
            pass

    worker = ray.remote(Hanging).options(num_cpus=1).remote()
    ray.get(worker.submit.remote([]))  # starting its process takes a while
    group = RolloutGroup([worker], FAR, Actors())
    group.submit(REQUESTS[:1])
    group.max_seconds = 2.0
    assert group.finished() == []  # the poll starts and stays silent for a second
    calls: list[Callable[[], Any]] = [lambda: group.submit(REQUESTS[1:]), group.suspend]
    try:
        for call in calls:
            with pytest.raises(
                RolloutError,
                match=r"did not answer within 2 s: .*raise sampler\.max_seconds_without_kept",
            ):
                call()
    finally:
        ray.kill(worker)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            ActorUnavailableError("RPC error: failed to connect", None),
            "it cannot be reached, so its process or",
        ),
        (
            OutOfMemoryError("2 worker(s) were killed due to the node running low on memory."),
            "Ray killed it because",
        ),
        (
            NodeDiedError("The actor died because its node has died. Node Id: 5e58"),
            "its node is lost",
        ),
        (NodeDiedError("first line\n" + "x" * 500), "x" * 200),  # unknown: the last line, truncated
    ],
)
def test_rays_errors_are_summarized_in_a_phrase(error: RayError, reason: str) -> None:
    assert death_reason(error).startswith(reason)
    assert len(death_reason(error)) <= 200


def take_groups(rollouts: RolloutGroup) -> NoReturn:
    """Wait for groups forever."""
    while True:
        rollouts.finished()


def update(cluster: Cluster, batch: Batch) -> float:
    """Run an optimizer step; returns the gradient norm."""
    old_log_probs, _ = cluster.policy.log_probs(batch)
    return cluster.policy.update(replace(batch, old_log_probs=old_log_probs)).grad_norm


@contextmanager
def cluster_until_death(config: Config, model: Path, victim: str) -> Iterator[Cluster]:
    """Yield a cluster that must end quickly, with all its processes, after `victim` dies."""
    before = set(descendants(os.getpid()))
    died_at: list[float] = []
    with ExitStack() as stack:
        stack.enter_context(
            pytest.raises(WorkerDied, match=rf"^{victim} \(pid \d+ on [\w.:]+\) {KILLED}$")
        )
        cluster = stack.enter_context(start_cluster(config, model))
        stack.callback(lambda: died_at.append(time.monotonic()))
        yield cluster
    assert time.monotonic() - died_at[0] < QUICK
    while left := set(descendants(os.getpid())) - before:
        assert time.monotonic() - died_at[0] < FAR, left
        os.sched_yield()


def test_a_dead_process_is_named_and_training_can_restart(
    ray_address: str, world: World, tmp_path: Path
) -> None:
    (tmp_path / "scorer.py").write_text(SCORER)
    config = config_of(
        train={"ray_address": ray_address},
        rollout={"max_num_seqs": 4},  # one group at a time
        custom_reward={"path": str(tmp_path / "scorer.py")},
    )
    batch = random_batch(num_groups=4, group_size=4)
    with cluster_until_death(config, world.model, "policy rank 1 of 2") as cluster:
        first = update(cluster, batch)
        with killed_within(ray.get(cluster.policy.ranks[1].place.remote())):
            update(cluster, batch)
    with cluster_until_death(config, world.model, "rollout worker 0 of 1") as cluster:
        assert update(cluster, batch) == first  # from the same weights
        cluster.rollouts.submit(REQUESTS)
        groups: list[Any] = []
        while not groups:
            groups += cluster.rollouts.finished()
        assert {rollout.score for group in groups for rollout in group.rollouts} == {1.0}
        assert cluster.rollouts.num_in_flight > 0
        with killed_within(ray.get(cluster.rollouts.workers[0].place.remote())):
            take_groups(cluster.rollouts)
