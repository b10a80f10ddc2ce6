"""Places the roles of a training on the nodes of a Ray cluster: ranks node by node, an engine stage on one."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dapo_core.cluster.room import WORD_SECONDS
from dapo_core.errors import ConfigError

if TYPE_CHECKING:
    from dapo_core.config.training import TrainingConfig
    from dapo_core.device import Device

logger = logging.getLogger(__name__)

PLACEMENT_SECONDS = 300.0
LOST_NODE_SECONDS = 3600.0  # for a restart with train.on_lost_node=wait


@dataclass(frozen=True)
class Demand:
    """Places that are reserved at once, each with the same resources by Ray's names."""

    count: int
    resources: dict[str, float]
    on_one_node: bool = False

    def __str__(self) -> str:
        return f"{self.count} workers of {self.resources}{' on one node' if self.on_one_node else ''}"


@dataclass(frozen=True)
class Place:
    """CPUs and, unless the device is a CPU, a device of one node: a bundle of a placement group, or half."""

    group: PlacementGroup
    bundle: int
    node: str  # Ray's ID of the node
    resources: dict[str, float]

    def start(self, actor_class: type) -> Any:
        """Start an actor of the class here, with all that the place has; returns its handle."""
        own = dict(self.resources)
        options: dict[str, Any] = {"num_cpus": own.pop("CPU"), "num_gpus": own.pop("GPU", None), "resources": own}
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.bundle)
        return ray.remote(actor_class).options(**options, scheduling_strategy=strategy).remote()


@dataclass(frozen=True)
class Places:
    """Where each role of a training runs."""

    ranks: list[Place]
    engines: list[list[Place]]  # the parts of each, of which the first is the rollout worker's

    @property
    def nodes(self) -> list[str]:
        """Ray's IDs of the nodes that have a role, each once."""
        return list(dict.fromkeys(place.node for places in (self.ranks, *self.engines) for place in places))


def demands(config: TrainingConfig, device: Device) -> list[Demand]:
    """What the training reserves, in this order: the ranks, then all pipeline stages of engines.

    Each stage is on one node, its devices together; the stages of an engine may be on several nodes. Colocated,
    ranks have the places of engines.
    """
    own: dict[str, float] = {device.ray_resource: 1} if device.has_own_memory else {}
    train, rollout = config.train, config.rollout
    threads = rollout.threads_per_worker
    of_part = {"CPU": max(threads, train.threads_per_rank) if train.is_colocated else threads} | own
    num_stages = rollout.num_workers * rollout.pipeline_parallel
    if rollout.tensor_parallel == 1:
        engines = [Demand(num_stages, of_part)]
    else:
        engines = [Demand(rollout.tensor_parallel, of_part, on_one_node=True)] * num_stages
    if train.is_colocated:
        return engines
    return [Demand(train.num_ranks, {"CPU": train.threads_per_rank} | own), *engines]


def place_roles(
    config: TrainingConfig, device: Device, groups: list[PlacementGroup], max_seconds: float = PLACEMENT_SECONDS
) -> Places:
    """Reserve a place for each rank and each part of an engine, in placement groups appended to `groups`.

    Ranks fill node by node, so that neighbours in number are on one node where it has room. Colocated, rank i and
    part i of the engines share a place. Raises ConfigError if Ray has no room within `max_seconds`.
    """
    reserved = [reserve(demand, groups, max_seconds) for demand in demands(config, device)]
    ranks = [] if config.train.is_colocated else reserved.pop(0)
    stages = [[place] for place in reserved[0]] if config.rollout.tensor_parallel == 1 else reserved
    size = config.rollout.pipeline_parallel
    engines = [list(chain(*stages[first : first + size])) for first in range(0, len(stages), size)]
    if config.train.is_colocated:
        nodes = list(dict.fromkeys(parts[0].node for parts in engines))
        engines.sort(key=lambda parts: nodes.index(parts[0].node))
        engines = [[half(place) for place in parts] for parts in engines]
        ranks = [place for parts in engines for place in parts]
    return Places(ranks, engines)


def half(place: Place) -> Place:
    """Half of the place's resources, for each of two processes that share them."""
    return replace(place, resources={name: count / 2 for name, count in place.resources.items()})


def reserve(demand: Demand, groups: list[PlacementGroup], max_seconds: float = PLACEMENT_SECONDS) -> list[Place]:
    """The places, sorted by node, in a new placement group that is appended to `groups`."""
    strategy = "STRICT_PACK" if demand.on_one_node else "PACK"
    group = placement_group([demand.resources] * demand.count, strategy=strategy)
    groups.append(group)
    _wait_for_room(group, str(demand), max_seconds)
    nodes = placement_group_table(group)["bundles_to_node_id"]
    order = list(dict.fromkeys(nodes[number] for number in range(demand.count)))
    places = [Place(group, number, nodes[number], demand.resources) for number in range(demand.count)]
    return sorted(places, key=lambda place: order.index(place.node))


def _wait_for_room(group: PlacementGroup, wanted: str, max_seconds: float) -> None:
    """Return once the group has its place; a signal ends the wait, and the log says every 10 s what for.

    Raises ConfigError after `max_seconds`.
    """
    began = next_word = time.monotonic()
    while not group.wait(1):
        seconds = time.monotonic() - began
        if seconds < max_seconds and time.monotonic() < next_word + WORD_SECONDS:
            continue
        next_word = time.monotonic()
        room = f"it has {ray.cluster_resources()}, of which {ray.available_resources()} are free"
        if seconds >= max_seconds:
            raise ConfigError(
                f"Ray has no room for {wanted} within {max_seconds:.0f} s; {room}: lower train.num_ranks, "
                "rollout.num_workers or the threads, or add nodes"
            )
        logger.info("waiting since %.0f s for room in Ray for %s: %s", seconds, wanted, room)
