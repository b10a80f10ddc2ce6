"""Starts Ray, and the policy ranks and rollout workers as Ray actors."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group

from dapo_core.cluster.actors import Actors
from dapo_core.cluster.connection import connected_to_ray
from dapo_core.cluster.interface import Cluster
from dapo_core.cluster.placement import LOST_NODE_SECONDS, PLACEMENT_SECONDS, Places, place_roles
from dapo_core.cluster.policy_group import PolicyGroup
from dapo_core.cluster.roles import EngineRank, PolicyRank, RolloutRank
from dapo_core.cluster.rollout_group import RolloutGroup
from dapo_core.cluster.shared_files import require_shared
from dapo_core.cluster.shrink import place_what_is_left
from dapo_core.engines.base import EnginePart
from dapo_core.errors import counted
from dapo_core.machine.device import Device, device_for
from dapo_core.machine.versions import require_versions
from dapo_core.memory.holdings import OF_RANKS
from dapo_core.model.pretrained import load_model_config
from dapo_core.weights.transfer import WeightTransfer
from heartbeat import heartbeat

if TYPE_CHECKING:
    from dapo_core.config.training import TrainingConfig

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0


@contextmanager
def start_cluster(
    config: TrainingConfig,
    model_path: str | Path,
    output_dir: Path | None = None,
    is_restart: bool = False,
) -> Iterator[Cluster]:
    """Start policy ranks and rollout workers with the model loaded; all of them end on exit.

    Starts a private Ray on this machine unless train.ray_address names a running cluster, whose
    nodes must see the model and `output_dir`. A restart after a dead process follows
    train.on_lost_node. Raises ConfigError if the cluster lacks devices, and WorkerDied if a process
    dies during startup; this process can then start another cluster.
    """
    started = time.monotonic()
    require_versions()
    device = device_for(config.train.device)
    if config.train.ray_address is None:  # all devices are on this machine
        device.require()
    groups: list[PlacementGroup] = []
    ranks: list[Any] = []
    engines: list[list[Any]] = []  # parts of each engine; the first is the rollout worker
    with connected_to_ray(config.train, config.num_cpus) as folder:
        logger.info("Ray is up after %.0f s", time.monotonic() - started)
        try:
            config, places = _place(config, device, groups, Path(model_path), is_restart)
            if output_dir is not None:
                require_shared(places.nodes, config, Path(model_path), output_dir)
            ranks += [place.start(PolicyRank) for place in places.ranks]
            for first, *others in places.engines:
                engines.append([first.start(RolloutRank)])
                engines[-1] += [place.start(EngineRank) for place in others]
            actors = _watched(ranks, engines)
            with heartbeat(lambda: "loading the model into policy ranks and rollout workers"):
                policy = _load(ranks, engines, actors, str(model_path), config, folder)
            weights = WeightTransfer(ranks, engines, actors.get)
            address = partial(_meeting_point, folder, ranks[0], actors)
            weights.connect(_reads_memory(places, device), address, device.has_own_memory)
            workers = [parts[0] for parts in engines]
            counts = counted(len(ranks), "policy rank"), counted(len(workers), "rollout worker")
            logger.info("%s and %s ready after %.0f s", *counts, time.monotonic() - started)
            rollouts = RolloutGroup(workers, config.sampler.max_seconds_without_kept, actors)
            yield Cluster(policy, rollouts, weights, config)
        finally:
            _end(ranks, engines, groups if config.train.ray_address else [])


def _place(
    config: TrainingConfig,
    device: Device,
    groups: list[PlacementGroup],
    model_path: Path,
    is_restart: bool,
) -> tuple[TrainingConfig, Places]:
    """Place the roles; also returns the configuration, which a restart may have shrunk."""
    train = config.train
    if is_restart and train.ray_address is not None and train.on_lost_node == "shrink":
        return place_what_is_left(config, device, groups, model_path)
    seconds = LOST_NODE_SECONDS if is_restart else PLACEMENT_SECONDS
    return config, place_roles(config, device, groups, seconds)


def _load(
    ranks: Sequence[Any],
    engines: Sequence[list[Any]],
    actors: Actors,
    model_path: str,
    config: TrainingConfig,
    folder: Path | None,
) -> PolicyGroup:
    """Load the model into all ranks and engines."""
    address = _meeting_point(folder, ranks[0], actors)
    starting = [
        rank.start.remote(number, len(ranks), address, model_path, config)
        for number, rank in enumerate(ranks)
    ]
    model_config = load_model_config(model_path, config.model.trust_remote_code)
    policy = PolicyGroup(ranks, config, actors, model_config.get_text_config().hidden_size)
    if config.train.is_colocated:  # engines measure their devices' free memory
        actors.get(starting)
    if config.train.takes_turns:
        policy.offload(OF_RANKS)
    for parts in engines:
        first = parts[-config.rollout.tensor_parallel]  # vLLM's rank 0: see rank_of_part
        place = _meeting_point(folder, first, actors) if len(parts) > 1 else ""
        starting += _start_parts(parts, place, model_path, config)
    actors.get(starting)
    actors.get([parts[0].unlink_shared_memory.remote() for parts in engines if len(parts) > 1])
    return policy


def _start_parts(
    parts: Sequence[Any], place: str, model_path: str, config: TrainingConfig
) -> list[Any]:
    """Load an engine whose parts rendezvous at `place`; returns the calls' references."""
    first, *others = parts
    seed = secrets.randbits(31)
    starting = [
        part.start.remote(model_path, config, EnginePart(number, place, seed))
        for number, part in enumerate(others, 1)
    ]
    return [first.start.remote(model_path, config, EnginePart(0, place, seed), others), *starting]


def _reads_memory(places: Places, device: Device) -> list[bool]:
    """Return for each engine part whether it shares rank 0's node (on CPUs) or device."""
    home = places.ranks[0]
    parts = [place for parts in places.engines for place in parts]
    if not device.has_own_memory:
        return [place.node == home.node for place in parts]
    return [(place.group, place.bundle) == (home.group, home.bundle) for place in parts]


def _watched(ranks: Sequence[Any], engines: Sequence[list[Any]]) -> Actors:
    actors = Actors()
    actors.add("policy rank", ranks)
    actors.add("rollout worker", [parts[0] for parts in engines])
    actors.add("engine part", [part for parts in engines for part in parts[1:]])
    return actors


def _end(
    ranks: Sequence[Any], engines: Sequence[list[Any]], groups: Sequence[PlacementGroup]
) -> None:
    """End all processes, even hanging ones, and remove the placement groups of a shared cluster."""
    for rank in ranks:  # first, since a worker may wait for weights that a rank will never send
        ray.kill(rank)
    closing = [parts[0].close.remote() for parts in engines]
    if closing:  # a worker that hangs is killed below, and its scoring processes end with it
        ray.wait(closing, num_returns=len(closing), timeout=CLOSE_SECONDS)
    for part in (part for parts in engines for part in parts):
        ray.kill(part)
    for group in groups:
        remove_placement_group(group)


def _meeting_point(folder: Path | None, actor: Any, actors: Actors) -> str:
    """Return a rendezvous address: in the private folder without a port, or on the actor's node."""
    if folder is None:
        return str(actors.get(actor.rendezvous.remote()))
    return f"file://{folder}/{secrets.token_hex(8)}"  # the last component names shared memory
