"""Places the roles of a training on the nodes of a Ray cluster: ranks node by node, an engine on one node."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

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


@dataclass(frozen=True)
class Place:
    """CPUs and, unless the device is a CPU, a device of one node: a bundle of a placement group."""

    group: PlacementGroup
    bundle: int
    node: str  # Ray's ID of the node
    resources: dict[str, float]  # by Ray's names

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


def place_roles(config: TrainingConfig, device: Device, groups: list[PlacementGroup]) -> Places:
    """Reserve a place for each rank and each part of an engine, in placement groups appended to `groups`.

    Ranks fill node by node, so that neighbours in number are on one node where it has room; the parts of an engine
    are on one node. Raises ConfigError if Ray has no room within PLACEMENT_SECONDS.
    """
    train, rollout = config.train, config.rollout
    ranks = reserve(train.num_ranks, train.threads_per_rank, device, groups)
    if rollout.tensor_parallel == 1:
        workers = reserve(rollout.num_workers, rollout.threads_per_worker, device, groups)
        return Places(ranks, [[worker] for worker in workers])
    engines = [
        reserve(rollout.tensor_parallel, rollout.threads_per_worker, device, groups, "STRICT_PACK")
        for _ in range(rollout.num_workers)
    ]
    return Places(ranks, engines)


def reserve(
    count: int,
    threads: int,
    device: Device,
    groups: list[PlacementGroup],
    strategy: Literal["PACK", "STRICT_PACK"] = "PACK",
) -> list[Place]:
    """`count` places with a device and `threads` CPUs each, sorted by node; STRICT_PACK: on one node."""
    bundle: dict[str, float] = {"CPU": threads}
    if device.kind != "cpu":
        bundle[device.ray_resource] = 1
    group = placement_group([bundle] * count, strategy=strategy)
    groups.append(group)
    _wait_for_room(group, f"{count} workers of {bundle}{' on one node' if strategy == 'STRICT_PACK' else ''}")
    nodes = placement_group_table(group)["bundles_to_node_id"]
    order = list(dict.fromkeys(nodes[number] for number in range(count)))
    places = [Place(group, number, nodes[number], bundle) for number in range(count)]
    return sorted(places, key=lambda place: order.index(place.node))


def _wait_for_room(group: PlacementGroup, wanted: str) -> None:
    """Return once the group has its place; a signal ends the wait, and the log says every 10 s what for.

    Raises ConfigError after PLACEMENT_SECONDS.
    """
    began = next_word = time.monotonic()
    while not group.wait(1):
        seconds = time.monotonic() - began
        if seconds < PLACEMENT_SECONDS and time.monotonic() < next_word + WORD_SECONDS:
            continue
        next_word = time.monotonic()
        room = f"it has {ray.cluster_resources()}, of which {ray.available_resources()} are free"
        if seconds >= PLACEMENT_SECONDS:
            raise ConfigError(
                f"Ray has no room for {wanted} within {PLACEMENT_SECONDS:.0f} s; {room}: lower train.num_ranks, "
                "rollout.num_workers or the threads, or add nodes"
            )
        logger.info("waiting since %.0f s for room in Ray for %s: %s", seconds, wanted, room)
