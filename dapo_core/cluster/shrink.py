"""Shrinks a training to the devices left after losing a node (train.on_lost_node: shrink)."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING

from ray.util.placement_group import remove_placement_group

from dapo_core.cluster.every_node import living_nodes
from dapo_core.cluster.placement import Demand, Places, demands, place_roles
from dapo_core.config.loading import changed, resolve
from dapo_core.errors import ConfigError, ModelError
from dapo_core.memory.devices import Limit, find_device
from dapo_core.memory.plan import plan_memory
from dapo_core.memory.shape import shape_of

if TYPE_CHECKING:
    from pathlib import Path

    from ray.util.placement_group import PlacementGroup

    from dapo_core.config.training import TrainingConfig
    from dapo_core.machine.device import Device

logger = logging.getLogger(__name__)

# Ray takes 15 to declare a node dead, and a moment to free its actors' resources
SETTLE_SECONDS = 20.0
POLL_SECONDS = 0.5
MAX_ATTEMPTS = 3


def place_what_is_left(
    config: TrainingConfig, device: Device, groups: list[PlacementGroup], model_path: Path
) -> tuple[TrainingConfig, Places]:
    """Place the roles like `place_roles`, if needed fewer; also returns the configuration.

    Raises ConfigError if no smaller number fits the free devices, their memory and the other keys.
    """
    for _ in range(MAX_ATTEMPTS - 1):
        fit = _shrunk_to_free(config, device, model_path)
        try:
            return fit, place_roles(fit, device, groups, SETTLE_SECONDS)
        except ConfigError as error:  # for example because a dead node still counted as free
            logger.warning("%s", error)
            while groups:
                remove_placement_group(groups.pop())
    fit = _shrunk_to_free(config, device, model_path)
    return fit, place_roles(fit, device, groups)


def _shrunk_to_free(config: TrainingConfig, device: Device, model_path: Path) -> TrainingConfig:
    """Return the configuration if all roles fit within SETTLE_SECONDS, else a smaller one."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while not has_room(free := [node.free for node in living_nodes()], demands(config, device)):
        if time.monotonic() >= deadline:
            return shrunk(config, device, free, model_path)
        time.sleep(POLL_SECONDS)
    return config


def shrunk(
    config: TrainingConfig, device: Device, free: Sequence[Mapping[str, float]], model_path: Path
) -> TrainingConfig:
    """Return the configuration with the most ranks and engines that fit the `free` resources.

    Ranks and engines shrink in proportion. Raises ConfigError if no smaller number fits, passes the
    configuration's validation and fits the memory plan.
    """
    rejection = ""  # reason for rejecting the largest one that fits
    for num_ranks, num_workers in _smaller(config):
        fewer = changed(config, {"train.num_ranks": num_ranks, "rollout.num_workers": num_workers})
        if not has_room(free, demands(fewer, device)):
            continue
        try:
            smaller = resolve(type(config), fewer.model_dump())
            _require_memory(smaller, model_path)
        except ConfigError as error:
            rejection = rejection or str(error)
            continue
        logger.warning(
            "training continues with %d of %d ranks and %d of %d engines "
            "(train.on_lost_node=shrink)",
            num_ranks,
            config.train.num_ranks,
            num_workers,
            config.rollout.num_workers,
        )
        return smaller
    raise ConfigError(
        "train.on_lost_node=shrink finds no smaller train.num_ranks and rollout.num_workers for "
        f"the free resources of the remaining nodes, {[dict(node) for node in free]}: "
        f"{rejection or 'not even one of each fits'}; add nodes and run the same command again, "
        "or change these keys"
    )


def _require_memory(config: TrainingConfig, model_path: Path) -> None:
    """Raise ConfigError if larger shards do not fit train.device_model, by the memory plan."""
    train = config.train
    if train.device_model is None or train.allow_oversubscription:
        return
    try:
        shape = shape_of(json.loads((model_path / "config.json").read_text(encoding="utf-8")))
    except ModelError:  # no plan for this architecture
        return
    limit = Limit(train.device_model, find_device(train.device_model).num_bytes)
    if shortages := plan_memory(config, shape, limit).shortages:
        raise ConfigError(f"with train.num_ranks={train.num_ranks}, {'; '.join(shortages)}")


def has_room(free: Sequence[Mapping[str, float]], demanded: Sequence[Demand]) -> bool:
    """True if the nodes can satisfy all demands, placed like Ray does: emptiest node first."""
    nodes = [dict(node) for node in free]
    for demand in demanded:
        left = demand.count
        size = demand.count if demand.on_one_node else 1
        while left:
            node = max(nodes, key=lambda node: _num_places(node, demand), default={})
            taken = min(left, _num_places(node, demand))
            if taken < size:
                return False
            for name, amount in demand.resources.items():
                node[name] -= taken * amount
            left -= taken
    return True


def _num_places(node: Mapping[str, float], demand: Demand) -> int:
    return int(min(node.get(name, 0) // amount for name, amount in demand.resources.items()))


def _smaller(config: TrainingConfig) -> list[tuple[int, int]]:
    """Return all smaller (ranks, engines), those that keep the largest share of both first."""
    most_ranks, most_workers = config.train.num_ranks, config.rollout.num_workers
    if config.train.is_colocated:  # one rank per engine part
        parts = config.rollout.num_devices // most_workers
        return [(parts * workers, workers) for workers in range(most_workers - 1, 0, -1)]
    *sizes, _ = product(range(1, most_ranks + 1), range(1, most_workers + 1))

    def share(size: tuple[int, int]) -> tuple[float, int, int]:
        return min(size[0] / most_ranks, size[1] / most_workers), *size

    return sorted(sizes, key=share, reverse=True)
