"""Places ranks and engines on the nodes of a Ray cluster, each pipeline stage on one node."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dapo_core.cluster.room import LOG_SECONDS
from dapo_core.errors import ConfigError

if TYPE_CHECKING:
    from dapo_core.config.training import TrainingConfig
    from dapo_core.machine.device import Device

logger = logging.getLogger(__name__)

PLACEMENT_SECONDS = 300.0
LOST_NODE_SECONDS = 3600.0  # after a restart with train.on_lost_node=wait


@dataclass(frozen=True)
class Demand:
    """Places reserved together, each with the same Ray resources."""

    count: int
    resources: dict[str, float]
    on_one_node: bool = False

    def __str__(self) -> str:
        where = " on one node" if self.on_one_node else ""
        return f"{self.count} workers of {self.resources}{where}"


@dataclass(frozen=True)
class Place:
    """CPUs and any accelerator on one node: a bundle of a placement group, or half of one."""

    group: PlacementGroup
    bundle: int
    node: str  # Ray's node ID
    resources: dict[str, float]

    def start(self, actor_class: type) -> Any:
        """Start an actor of the class with all of the place's resources; returns its handle."""
        others = dict(self.resources)
        actor: Any = ray.remote(actor_class).options(
            num_cpus=others.pop("CPU"),
            num_gpus=others.pop("GPU", None),
            resources=others,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self.group, self.bundle),
        )
        return actor.remote()


@dataclass(frozen=True)
class Places:
    """Where each role of a training runs."""

    ranks: list[Place]
    engines: list[list[Place]]  # parts of each engine; the first is the rollout worker

    @property
    def nodes(self) -> list[str]:
        """Ray's IDs of all nodes in use, without duplicates."""
        places = chain(self.ranks, *self.engines)
        return list(dict.fromkeys(place.node for place in places))


def demands(config: TrainingConfig, device: Device) -> list[Demand]:
    """Return what the training reserves, in this order: ranks, then pipeline stages of engines.

    A stage's devices are on one node; the stages of an engine may be on several. If colocated,
    ranks use the places of engines.
    """
    accelerator: dict[str, float] = {device.ray_resource: 1} if device.has_own_memory else {}
    train, rollout = config.train, config.rollout
    threads = config.threads_per_worker
    if train.is_colocated:
        threads = max(threads, config.threads_per_rank)
    part = {"CPU": threads} | accelerator
    num_stages = rollout.num_workers * rollout.pipeline_parallel
    if rollout.tensor_parallel == 1:
        engines = [Demand(num_stages, part)]
    else:
        engines = [Demand(rollout.tensor_parallel, part, on_one_node=True)] * num_stages
    if train.is_colocated:
        return engines
    return [Demand(train.num_ranks, {"CPU": config.threads_per_rank} | accelerator), *engines]


def place_roles(
    config: TrainingConfig,
    device: Device,
    groups: list[PlacementGroup],
    max_seconds: float = PLACEMENT_SECONDS,
) -> Places:
    """Reserve a place for each rank and engine part, in placement groups appended to `groups`.

    Ranks and stages of engines fill node by node, so consecutive ones share a node if it has room.
    If colocated, rank i and engine part i share a place. Raises ConfigError if the resources do
    not become free within `max_seconds`.
    """
    reserved: list[list[Place]] = []
    for demand in demands(config, device):
        near = reserved[-1][-1].node if reserved else None
        reserved.append(reserve(demand, groups, max_seconds, near))
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
    """Return half of the place's resources, for each of two processes that share it."""
    return replace(place, resources={name: count / 2 for name, count in place.resources.items()})


def reserve(
    demand: Demand,
    groups: list[PlacementGroup],
    max_seconds: float = PLACEMENT_SECONDS,
    near: str | None = None,
) -> list[Place]:
    """Reserve places in a new placement group, added to `groups`; returns them by node.

    Places on one node are on the node `near` if it has room.
    """
    bundles = [demand.resources] * demand.count
    if demand.on_one_node:  # Ray has no public way to pack several groups
        group = placement_group(bundles, strategy="STRICT_PACK", _soft_target_node_id=near)
    else:
        group = placement_group(bundles, strategy="PACK")
    groups.append(group)
    _wait_until_placed(group, demand, max_seconds)
    nodes = placement_group_table(group)["bundles_to_node_id"]
    order = list(dict.fromkeys(nodes[number] for number in range(demand.count)))
    numbers = sorted(range(demand.count), key=lambda number: order.index(nodes[number]))
    return [Place(group, number, nodes[number], demand.resources) for number in numbers]


def _wait_until_placed(group: PlacementGroup, demand: Demand, max_seconds: float) -> None:
    """Return once the group is placed, logging every LOG_SECONDS; signals interrupt the wait.

    Raises ConfigError after `max_seconds`.
    """
    started = last_log = time.monotonic()
    while not group.wait(1):
        seconds = time.monotonic() - started
        if seconds < max_seconds and time.monotonic() < last_log + LOG_SECONDS:
            continue
        last_log = time.monotonic()
        resources = f"total {ray.cluster_resources()}, free {ray.available_resources()}"
        if seconds >= max_seconds:
            raise ConfigError(
                f"Ray has no free resources for {demand} after {max_seconds:.0f} s ({resources}): "
                "lower train.num_ranks, rollout.num_workers or the threads, or add nodes"
            )
        logger.info(
            "waiting for Ray resources for %s (%.0f s so far): %s", demand, seconds, resources
        )
