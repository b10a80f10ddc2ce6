"""Runs functions and actors on every node of a cluster, and reports nodes that do not answer."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dapo_core.errors import ConfigError, DapoError, WorkerDied

ANSWER_SECONDS = 120.0  # for a node to start a process and answer
_NO_IMPORT = re.compile(r"^(?:ModuleNotFoundError|ImportError|AttributeError): .*$", re.MULTILINE)


@dataclass(frozen=True)
class Node:
    """A live node of the cluster that this process has joined."""

    id: str  # Ray's node ID
    name: str  # host and address, for messages
    address: str
    resources: Mapping[str, float] = field(compare=False)
    free: Mapping[str, float] = field(compare=False)


@dataclass(frozen=True)
class Answers:
    """Results by node, and errors of the nodes without one."""

    results: dict[Node, Any]
    failed: dict[Node, DapoError]

    def require(self) -> dict[Node, Any]:
        """Return the results of all nodes; raises ConfigError or WorkerDied."""
        errors = list(self.failed.values())
        if errors:
            is_dead = any(isinstance(error, WorkerDied) for error in errors)
            raise (WorkerDied if is_dead else ConfigError)("; ".join(map(str, errors))) from errors[
                0
            ]
        return self.results


def living_nodes() -> list[Node]:
    """Return the live nodes by name; nodes with equal host and address also show Ray's ID."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    free = available_resources_per_node()  # private: publicly, Ray only tells the sum
    names = [f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})" for node in alive]
    duplicates = {name for name, count in Counter(names).items() if count > 1}
    nodes = [
        Node(
            node["NodeID"],
            f"{name[:-1]}, node {node['NodeID'][:6]})" if name in duplicates else name,
            node["NodeManagerAddress"],
            node["Resources"],
            free.get(node["NodeID"], {}),
        )
        for node, name in zip(alive, names, strict=True)
    ]
    return sorted(nodes, key=lambda node: node.name)


def own_node() -> str:
    """Return Ray's ID of this process's node."""
    return str(ray.get_runtime_context().get_node_id())


def start_on(
    node: Node, devices: Mapping[str, float], function: Callable[..., Any], *arguments: Any
) -> Any:
    """Start a task on the node, without a CPU but with `devices`; returns its reference."""
    resources = dict(devices)
    task = ray.remote(function).options(
        num_cpus=0,
        num_gpus=resources.pop("GPU", None),
        resources=resources,
        max_retries=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
    )
    return task.remote(*arguments)


@contextmanager
def actors_on(nodes: Sequence[Node], kind: type) -> Iterator[dict[Node, Any]]:
    """Yield handles of an actor of the class on each node; all actors end on exit."""
    handles: dict[Node, Any] = {}
    for node in nodes:
        place = NodeAffinitySchedulingStrategy(node.id, soft=False)
        handles[node] = ray.remote(kind).options(num_cpus=0, scheduling_strategy=place).remote()
    try:
        yield handles
    finally:
        for handle in handles.values():
            ray.kill(handle)


def finish(tasks: Mapping[Node, Any], max_seconds: float = ANSWER_SECONDS) -> Answers:
    """Like `ask`, and cancel the tasks that failed or timed out."""
    answers = ask(tasks, max_seconds)
    for node in answers.failed:
        ray.cancel(tasks[node], force=True)
    return answers


def ask(calls: Mapping[Node, Any], max_seconds: float = ANSWER_SECONDS) -> Answers:
    """Wait for a call on each node; returns results, and errors of failed or late nodes."""
    deadline = time.monotonic() + max_seconds
    results: dict[Node, Any] = {}
    failed: dict[Node, DapoError] = {}
    for node, call in calls.items():
        try:
            results[node] = ray.get(call, timeout=max(deadline - time.monotonic(), 0.0))
        except GetTimeoutError:
            failed[node] = WorkerDied(f"node {node.name} did not answer within {max_seconds:.0f} s")
        except RayError as error:
            failed[node] = _node_error(node, error)
    return Answers(results, failed)


def _node_error(node: Node, error: RayError) -> DapoError:
    missing = _NO_IMPORT.search(str(error))
    if isinstance(error, RayTaskError | RayActorError) and missing:
        reason = missing[0].split(": ", 1)[1]
        return ConfigError(
            f"node {node.name} cannot run this project: {reason}; install the same version there"
        )
    cause = error.cause if isinstance(error, RayTaskError) else error
    reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
    if isinstance(error, RayTaskError):
        return ConfigError(f"node {node.name} failed: {reason}")
    return WorkerDied(f"node {node.name} is lost: {reason}")
