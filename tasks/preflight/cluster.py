"""The preflight on a Ray cluster: examine all nodes in parallel, and their connections."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_core.cluster.room import ANSWER_SECONDS, Room, ask_cluster
from dapo_core.errors import ConfigError, ModelError, WorkerDied
from dapo_core.machine.device import device_for
from dapo_core.machine.ports import connect
from dapo_core.machine.versions import stack
from dapo_core.memory.devices import Limit
from tasks.config import ChainConfig
from tasks.preflight import nodes as checks
from tasks.preflight.environment import conditions_of
from tasks.preflight.finding import FAIL, OK, WARN, Findings
from tasks.preflight.memory import plan_of
from tasks.preflight.nodes import THIS_MACHINE, Pair

if TYPE_CHECKING:
    from dapo_core.cluster.every_node import Node

CLUSTER_SECONDS = 10.0  # if nothing listens there; Ray itself would retry for minutes
NODE_SECONDS = 60.0  # for a node to start a process and answer
REDUCE_SECONDS = 30.0  # for two processes to connect and add
NUM_CLOCK_READINGS = 3
MAX_CLOCKS = 64  # read at a time


def check_cluster(
    config: ChainConfig, model: Path | None, is_whole: bool, findings: Findings
) -> Limit | None:
    """Check the capacity of the cluster at train.ray_address and, if `is_whole`, each of its nodes.

    Returns the memory of the smallest device found.
    """
    address = str(config.train.ray_address)
    seconds = _answer_seconds(address)
    try:
        if not is_whole:
            check_room(config, ask_cluster(address, seconds), findings)
            return None
        from dapo_core.cluster.connection import connected_to_ray  # loads Ray

        with connected_to_ray(config.train, num_cpus=0, answer_seconds=seconds, is_quiet=True):
            return _NodeChecks(config, model, findings).run()
    except (ConfigError, WorkerDied) as error:
        advice = "start Ray there (docs/operating.md), or unset train.ray_address: a private Ray"
        findings.add("Ray", FAIL, str(error), advice)
        return None


def _answer_seconds(address: str) -> float:
    """Return how long to wait for the cluster: longer if its port answers, as joining is slow."""
    if not address.rpartition(":")[2].isdecimal():  # auto
        return ANSWER_SECONDS
    try:
        connect(address, CLUSTER_SECONDS)
    except OSError:
        return CLUSTER_SECONDS
    return ANSWER_SECONDS


def check_devices_here(config: ChainConfig, model: Path | None, findings: Findings) -> None:
    """Check this machine's devices, their links and versions, and its limits, for a private Ray."""
    from tasks.preflight.node_probe import devices_here, limits, memory, versions_here

    kind, found = config.train.device, devices_here(config.train.device, os.environ)
    here = {"devices": found, "versions": versions_here(kind, os.environ, found), "stack": stack()}
    reports: dict[str, Any] = {THIS_MACHINE: here | {"limits": limits(), "memory": memory()}}
    checks.check_sets(reports, stack(), findings)
    smallest = checks.smallest_device(reports, kind)
    checks.check_devices(reports, _needed_bytes(config, model, smallest), {}, findings)
    checks.check_links(reports, findings)
    checks.check_limits(reports, False, findings)  # without RDMA, which locks memory


def check_room(config: ChainConfig, room: Room, findings: Findings) -> None:
    """Check that the cluster has the devices and CPUs that the training needs."""
    train = config.train
    needed = {device_for(train.device).ray_resource: config.num_devices}
    needed["CPU"] = config.num_cpus
    for name, count in needed.items():
        total, free = room.total.get(name, 0), room.free.get(name, 0)
        found = f"{count} {name} needed; {train.ray_address} has {total:g}, {free:g} of them free"
        if count > total:
            advice = "lower train.num_ranks, rollout.num_workers or their threads, or add nodes"
            findings.add("Ray", FAIL, found, advice)
        elif count > free:
            findings.add("Ray", WARN, found, "the training waits until they are free")
        else:
            findings.add("Ray", OK, found)


def _needed_bytes(config: ChainConfig, model: Path | None, smallest: int | None) -> int | None:
    """Return the memory plan's peak on a device; None if there is no plan."""
    if smallest is None:
        return None
    try:
        plan = plan_of(config, model, limit=Limit("the smallest device", smallest))
    except (ConfigError, ModelError):  # check_memory reports it
        return None
    return min(max(load.peak_bytes for load in plan.loads), smallest)


class _NodeChecks:
    """The checks of all nodes of the cluster that this process has joined."""

    def __init__(self, config: ChainConfig, model: Path | None, findings: Findings) -> None:
        self.config, self.model, self.findings = config, model, findings
        self.device = device_for(config.train.device)
        self.probes: Mapping[Node, Any] = {}

    def run(self) -> Limit | None:
        """Add all findings; returns the memory of the smallest device."""
        from dapo_core.cluster.every_node import actors_on, living_nodes
        from tasks.preflight.node_probe import NodeProbe

        living = living_nodes()
        total, free = Counter[str](), Counter[str]()
        for node in living:
            total.update(node.resources)
            free.update(node.free)
        check_room(self.config, Room(total, free), self.findings)
        resource = self.device.ray_resource
        with_devices = [node for node in living if node.resources.get(resource, 0) > 0]
        with actors_on(with_devices, NodeProbe) as probes:
            self.probes = probes
            reports = self._ask("report", self.device.kind, conditions_of(self.config))
            if not reports:
                return None
            self.probes = {node: probe for node, probe in probes.items() if node in reports}
            names = ", ".join(node.name for node in reports)
            self.findings.add("nodes", OK, f"{len(reports)}: {names}")
            limit = self._compare(reports)
            self._check_clocks()
            self._check_files()
            self._check_connections()
            self._check_all_reduce()
        return limit

    def _ask(
        self,
        method: str,
        *arguments: Any,
        of: Mapping[Node, Sequence[Any]] | None = None,
        more_seconds: float = 0.0,
    ) -> dict[Node, Any]:
        """Call all probes, or those in `of` with own arguments; failures become findings."""
        from dapo_core.cluster.every_node import ask

        of = dict.fromkeys(self.probes, arguments) if of is None else of
        calls = {node: getattr(self.probes[node], method).remote(*of[node]) for node in of}
        answers = ask(calls, NODE_SECONDS + more_seconds)
        for error in answers.failed.values():
            checks.add(self.findings, "answer", FAIL, str(error), ())
        return answers.results

    def _compare(self, given: Mapping[Node, Any]) -> Limit | None:
        """Check the nodes' reports; returns the memory of the smallest device."""
        from dapo_core.cluster.every_node import own_node
        from tasks.preflight.node_probe import versions_here

        kind, findings = self.device.kind, self.findings
        own = own_node()
        own_first = sorted(given, key=lambda node: node.id != own)
        reports = {node.name: given[node] for node in own_first}
        versions = {name: report["versions"] for name, report in reports.items()}
        if own not in {node.id for node in given}:
            versions[THIS_MACHINE] = versions_here("cpu", os.environ, None)
        checks.check_versions(versions, findings)
        checks.check_sets(reports, stack(), findings)
        limit = None
        if kind != "cpu":
            smallest = checks.smallest_device(reports, kind)
            limit = None if smallest is None else Limit("the cluster's smallest device", smallest)
            resource, needed = (
                self.device.ray_resource,
                _needed_bytes(self.config, self.model, smallest),
            )
            promised = {node.name: int(node.resources.get(resource, 0)) for node in given}
            checks.check_devices(reports, needed, promised, findings)
            if smallest is not None and (model := self.config.train.device_model) is not None:
                checks.check_device_model(model, smallest, findings)
            checks.check_links(reports, findings)
        checks.check_limits(reports, kind != "cpu", findings)
        checks.check_disks(reports, findings)
        checks.check_variables(reports, findings)
        return limit

    def _check_clocks(self) -> None:
        with ThreadPoolExecutor(MAX_CLOCKS) as pool:
            read = dict(zip(self.probes, pool.map(self._skew_of, self.probes), strict=True))
        if skews := {node.name: skew for node, skew in read.items() if skew}:
            checks.check_clocks(skews, self.findings)

    def _skew_of(self, node: Node) -> tuple[float, float] | None:
        """Return the seconds that a node's clock is ahead, and half of the shortest round trip.

        None if the node does not answer one of the readings.
        """
        readings = []
        for _ in range(NUM_CLOCK_READINGS):
            began = time.time()
            given = self._ask("now", of={node: ()})
            ended = time.time()
            if node not in given:
                return None
            readings.append((given[node] - (began + ended) / 2, (ended - began) / 2))
        return min(readings, key=lambda reading: reading[1])

    def _check_files(self) -> None:
        """Check that each node sees the same store and the same files that ranks read."""
        from dapo_core.cluster.every_node import own_node
        from dapo_core.cluster.shared_files import OUTPUT, digests, probe_in, shared_paths

        store = Path(self.config.store.path).absolute()
        folder = next(path for path in (store, *store.parents) if path.exists())
        others = [node for node in self.probes if node.id != own_node()]
        is_writable = os.access(folder, os.W_OK | os.X_OK)  # else the disk check says so
        if not others or not is_writable:
            return
        paths = {
            name: path.absolute()
            for name, path in shared_paths(self.config, self.model).items()
            if path.is_file() or (path / "config.json").is_file()
        }
        paths[OUTPUT] = folder
        with probe_in(folder) as probe:
            arguments = (paths, digests(paths), probe)
            seen = self._ask("differences", of=dict.fromkeys(others, arguments))
        checks.check_seen({node.name: found for node, found in seen.items()}, self.findings)

    def _check_connections(self) -> None:
        """Try a TCP connection from each node to each port and address of every other node."""
        from tasks.preflight.node_probe import NodeProbe

        if len(self.probes) < 2:
            return
        listening = self._ask("listen", of={node: (node.address,) for node in self.probes})
        targets = {node: _targets(node, listening) for node in listening}
        arguments = {node: ([each[:3] for each in several],) for node, several in targets.items()}
        failures: dict[Pair, list[str]] = {}
        seconds = NodeProbe.reach_seconds(max(map(len, targets.values()), default=0))
        for node, reasons in self._ask("reach", of=arguments, more_seconds=seconds).items():
            for (address, port, _, name, other), reason in zip(targets[node], reasons, strict=True):
                if reason:
                    text = f"no connection to {address} port {port} ({name}): {reason}"
                    failures.setdefault((node.name, other), []).append(text)
        taken = {
            node.name: [name for name, port in each["ports"].items() if port is None]
            for node, each in listening.items()
        }
        checks.check_connections(taken, failures, sum(map(len, targets.values())), self.findings)

    def _check_all_reduce(self) -> None:
        """Run an all-reduce between neighbours in a ring of nodes, to find a failing pair."""
        results: dict[Pair, str | float] = {}
        for pairs in rounds(list(self.probes)):
            results |= self._reduce(pairs)
        checks.check_all_reduce(results, self.device.backend, self.findings)

    def _reduce(self, pairs: Sequence[tuple[Node, Node]]) -> dict[Pair, str | float]:
        """Return each pair's seconds or its failure ("" if not tried); no node is in two pairs."""
        from dapo_core.cluster.every_node import finish, start_on
        from tasks.preflight.node_probe import all_reduce

        kind, resource = self.device.kind, self.device.ray_resource
        devices = {} if kind == "cpu" else {resource: 1.0}
        is_free = {node: kind == "cpu" or node.free.get(resource, 0) >= 1 for node in self.probes}
        free = [pair for pair in pairs if is_free[pair[0]] and is_free[pair[1]]]
        places = self._ask("rendezvous", of={one: (one.address,) for one, _ in free})
        tasks = {
            node: start_on(node, devices, all_reduce, rank, places[pair[0]], kind, REDUCE_SECONDS)
            for pair in free
            if pair[0] in places
            for rank, node in enumerate(pair)
        }
        answers = finish(tasks, REDUCE_SECONDS * 1.5)
        results: dict[Pair, str | float] = {(one.name, other.name): "" for one, other in pairs}
        for one, other in pairs:
            failed = [str(answers.failed[node]) for node in (one, other) if node in answers.failed]
            if failed:
                results[one.name, other.name] = "; ".join(failed)
            elif one in tasks:
                results[one.name, other.name] = max(answers.results[one], answers.results[other])
        return results


def _targets(node: Node, listening: Mapping[Node, Any]) -> list[tuple[str, int, str, str, str]]:
    """Return address, port, greeting and range of each listening port, and the node's name.

    Each node starts with its successor, so that they do not all connect to one node at once.
    """
    nodes, targets = list(listening), []
    after = nodes.index(node) + 1
    for other in [*nodes[after:], *nodes[: after - 1]]:
        each = listening[other]
        sources: dict[str, list[str]] = {}  # the settings that select an address
        for name, address in each["addresses"].items():
            sources.setdefault(address, []).append(name)
        ports = {name: port for name, port in each["ports"].items() if port is not None}
        for address, names in sources.items():
            for name, port in ports.items():
                label = f"{name}; {', '.join(names)}"
                targets.append((address, port, each["word"], label, other.name))
    return targets


def rounds(nodes: Sequence[Any]) -> list[list[tuple[Any, Any]]]:
    """Split the pairs of neighbours in a ring into rounds in which no node occurs twice."""
    pairs = list(pairwise(nodes))
    found = [pairs[::2], pairs[1::2]]
    if len(nodes) > 2:
        last = (nodes[-1], nodes[0])
        found = [found[0], [*found[1], last]] if len(nodes) % 2 == 0 else [*found, [last]]
    return [one for one in found if one]
