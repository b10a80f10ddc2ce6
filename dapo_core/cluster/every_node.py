"""Functions and actors on each node of a cluster: who answers in time, and why the others do not."""

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

ANSWER_SECONDS = 120.0  # in which a node starts a process and answers
_NO_IMPORT = re.compile(r"^(?:ModuleNotFoundError|ImportError|AttributeError): .*$", re.MULTILINE)


@dataclass(frozen=True)
class Node:
    """A living node of the cluster that this process has joined."""

    id: str  # Ray's
    name: str  # host and address, as messages name it
    address: str
    resources: Mapping[str, float] = field(compare=False)
    free: Mapping[str, float] = field(compare=False)


@dataclass(frozen=True)
class Answers:
    """What nodes returned, and why others did not."""

    given: dict[Node, Any]
    failed: dict[Node, DapoError]

    def require(self) -> dict[Node, Any]:
        """What all nodes returned. Raises ConfigError or WorkerDied, which name those that did not."""
        if self.failed:
            errors = list(self.failed.values())
            kind = WorkerDied if any(isinstance(error, WorkerDied) for error in errors) else ConfigError
            raise kind("; ".join(map(str, errors))) from errors[0]
        return self.given


def living_nodes() -> list[Node]:
    """The nodes that are alive, by name; nodes of one host and address also have Ray's ID."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    free = available_resources_per_node()
    names = [f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})" for node in alive]
    several = {name for name, count in Counter(names).items() if count > 1}
    found = [
        Node(
            node["NodeID"],
            f"{name[:-1]}, node {node['NodeID'][:6]})" if name in several else name,
            node["NodeManagerAddress"],
            node["Resources"],
            free.get(node["NodeID"], {}),
        )
        for node, name in zip(alive, names, strict=True)
    ]
    return sorted(found, key=lambda node: node.name)


def own_node() -> str:
    """Ray's ID of the node that this process is on."""
    return str(ray.get_runtime_context().get_node_id())


def start_on(node: Node, devices: Mapping[str, float], function: Callable[..., Any], *arguments: Any) -> Any:
    """Start a task on the node that needs no free CPU, with `devices` by Ray's names; returns its reference."""
    own = dict(devices)
    options = {"num_cpus": 0, "num_gpus": own.pop("GPU", None), "resources": own, "max_retries": 0}
    place = NodeAffinitySchedulingStrategy(node.id, soft=False)
    return ray.remote(function).options(**options, scheduling_strategy=place).remote(*arguments)


@contextmanager
def actors_on(nodes: Sequence[Node], kind: type) -> Iterator[dict[Node, Any]]:
    """An actor of the class on each node, as handles; all of them end on exit."""
    handles: dict[Node, Any] = {
        node: ray.remote(kind)
        .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False))
        .remote()
        for node in nodes
    }
    try:
        yield handles
    finally:
        for handle in handles.values():
            ray.kill(handle)


def finish(tasks: Mapping[Node, Any], max_seconds: float = ANSWER_SECONDS) -> Answers:
    """As `ask`, of tasks: those that are late are ended."""
    answers = ask(tasks, max_seconds)
    for node in answers.failed:
        ray.cancel(tasks[node], force=True)
    return answers


def ask(calls: Mapping[Node, Any], max_seconds: float = ANSWER_SECONDS) -> Answers:
    """The result of a call on each node, and of those without one the reason, such as that the time is over."""
    ended = time.monotonic() + max_seconds
    given: dict[Node, Any] = {}
    failed: dict[Node, DapoError] = {}
    for node, call in calls.items():
        try:
            given[node] = ray.get(call, timeout=max(ended - time.monotonic(), 0.0))
        except GetTimeoutError:
            failed[node] = WorkerDied(f"node {node.name} did not answer within {max_seconds:.0f} s")
        except RayError as error:
            failed[node] = _reason(node, error)
    return Answers(given, failed)


def _reason(node: Node, error: RayError) -> DapoError:
    text = str(error.cause if isinstance(error, RayTaskError) else error).strip()
    if isinstance(error, RayTaskError | RayActorError) and (missing := _NO_IMPORT.search(str(error))):
        reason = missing[0].split(": ", 1)[1]
        return ConfigError(f"node {node.name} cannot run this project: {reason}; install the same version there")
    if isinstance(error, RayTaskError):
        return ConfigError(
            f"node {node.name} cannot answer: {text.splitlines()[0] if text else 'without a reason'}"
        )
    return WorkerDied(f"node {node.name} is lost: {text.splitlines()[0] if text else type(error).__name__}")
