"""The layout of `dapo init`: ranks, engines and servers on a machine's devices, by memory plan."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from dapo_core.errors import ConfigError, counted
from dapo_core.machine.device import device_for
from dapo_core.memory.devices import GIB, Limit
from dapo_core.memory.plan import MemoryPlan, plan_memory
from tasks.config import ChainConfig
from tasks.preflight.memory import MOST_PARTS, least_server, powers_of_2

if TYPE_CHECKING:
    from dapo_core.memory.shape import ModelShape

MOST_NODES = 64  # that an error looks for
ENOUGH = 16  # of maximum length; an engine with room for fewer is the last choice
Sections = Mapping[str, Mapping[str, Any]]
ON_HOST = "offload_shards"
# Each saves more device memory than the one before, and costs more time.
SAVINGS: tuple[Mapping[str, bool], ...] = (
    {},
    {"offload_activations": True},
    {ON_HOST: True},
    {ON_HOST: True, "offload_activations": True},
)


class Layout(NamedTuple):
    """A recipe's sections with a layout, their memory plan, and what does not fit."""

    sections: dict[str, Any]
    plan: MemoryPlan
    shortages: list[str]


def fitting_layout(tree: Sections, num_devices: int, shape: ModelShape, limit: Limit) -> Layout:
    """Return the recipe with the preferred one of the layouts that fit this machine.

    Raises ConfigError if none does, with the number of machines that would do.
    """
    tree = _with_server(tree, num_devices, shape, limit)
    found = _best(tree, 1, num_devices, shape, limit)
    nodes = 1
    while nodes < MOST_NODES and _best(tree, nodes, num_devices, shape, limit).shortages:
        nodes *= 2
    if nodes == 1:
        return found
    raise ConfigError(
        f"{shape.num_parameters / 1e9:.1f} billion parameters cannot be trained on "
        f"{_devices(num_devices, limit)}; what comes closest: "
        f"{'; '.join(found.shortages)}. "
        + (
            f"{nodes * num_devices} devices on {nodes} such machines would do: start from a recipe "
            "for a cluster in configs/ (train.ray_address), or take a smaller model"
            if nodes < MOST_NODES
            else f"{nodes} such machines would not do either; take a smaller model"
        )
    )


def _with_server(
    tree: Sections, num_devices: int, shape: ModelShape, limit: Limit
) -> dict[str, Any]:
    """Return the recipe with the smallest server that fits, as often as there are devices."""
    config, size = ChainConfig.model_validate(tree), 1
    if limit.num_bytes is not None:
        fitting = functools.partial(least_server, config, shape, limit.num_bytes)
        found = fitting(num_devices, ENOUGH) or fitting(num_devices)
        if found is None:
            enough = fitting(MOST_PARTS)
            raise ConfigError(
                f"the server of an evaluation takes {2 * shape.num_parameters / GIB:.0f} GiB for "
                f"weights, which {_devices(num_devices, limit)} cannot hold; "
                + (f"{enough} in one machine would do. " if enough else "")
                + "Take a smaller model"
            )
        size = found
    return merged(tree, {"serve": {"tensor_parallel": size, "data_parallel": num_devices // size}})


def _best(tree: Sections, nodes: int, of_node: int, shape: ModelShape, limit: Limit) -> Layout:
    """Return the preferred layout that fits, else the one that comes closest."""
    others = []
    num_responses = tree["train"]["mini_prompts"] * tree["rollout"]["group_size"]
    host_bytes = nodes * (device_for("cpu").memory_bytes() or 0)
    for keys in layouts(nodes * of_node, of_node, shape, tree["train"]["micro_batch_tokens"]):
        train = keys["train"]
        if num_responses % (train["num_ranks"] // train.get("sequence_parallel", 1)):
            continue
        sections = merged(tree, keys)
        plan = plan_memory(ChainConfig.model_validate(sections), shape, limit)
        shortages = plan.shortages
        if plan.host_bytes > host_bytes:
            shortages.append(
                f"host memory would hold {plan.host_bytes / GIB:.0f} GiB, but has "
                f"{host_bytes / GIB:.0f}"
            )
        found = Layout(sections, plan, shortages)
        if not shortages and (plan.engine.num_sequences or ENOUGH) >= ENOUGH:
            return found
        others.append(found)
    return min(others, key=lambda each: (len(each.shortages), _peak(each.plan)))


def _devices(number: int, limit: Limit) -> str:
    size = "unknown size" if limit.num_bytes is None else f"{limit.num_bytes / GIB:.1f} GiB"
    return f"{counted(number, 'device')} of {size}"


def _peak(plan: MemoryPlan) -> int:
    return max(load.peak_bytes for load in plan.loads)


def layouts(
    num_devices: int, of_node: int, shape: ModelShape | None, row_tokens: int
) -> Iterator[Sections]:
    """Yield layouts, the preferred ones first; `row_tokens` are those of two longest sequences.

    Ranks and engines have devices of their own, or all devices and ever larger engines; each with
    rows over ever more ranks, and then again with less on the devices.
    """
    half, most = (powers_of_2(number)[-1] for number in (max(num_devices // 2, 1), num_devices))
    heads, num_experts = (0, 0) if shape is None else (shape.heads, shape.num_experts)
    sizes = [size for size in powers_of_2(of_node) if heads % size == 0]
    engines = [{"num_workers": most // size, "tensor_parallel": size} for size in sizes]
    places = [(most, "colocated", each) for each in engines]
    if num_devices > 1:
        places.insert(0, (half, "separate", {"num_workers": num_devices - half}))
    for saving in SAVINGS:
        for num_ranks, placement, rollout in places:
            train: dict[str, Any] = {"placement": placement, "num_ranks": num_ranks, **saving}
            if num_experts:
                train["expert_parallel"] = math.gcd(min(num_ranks, of_node), num_experts)
            # a copy of what is in host memory already would take as much again
            keys: Sections = {
                "rollout": rollout,
                "checkpoint": {"asynchronous": not train.get(ON_HOST)},
            }
            yield {**keys, "train": train}
            for parts in powers_of_2(min(num_ranks, of_node)):
                if heads % parts == 0:
                    row = {"micro_batch_tokens": -(-row_tokens // (2 * parts))}
                    yield {**keys, "train": {**train, "sequence_parallel": parts, **row}}


def merged(tree: Sections, keys: Sections) -> dict[str, Any]:
    """Return the recipe with more keys."""
    return {name: {**tree.get(name, {}), **keys.get(name, {})} for name in {**tree, **keys}}
