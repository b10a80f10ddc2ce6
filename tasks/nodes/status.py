"""`dapo cluster status` and `down`: what runs on each host of an inventory, and the end of what was started."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.nodes.inventory import Host, Inventory
from tasks.nodes.launch import describe_end, nodes_of, request_of
from tasks.nodes.on_node import END_SECONDS, KILLED_SECONDS
from tasks.nodes.reach import ANSWER_SECONDS, Answer, ask
from tasks.nodes.record import ClusterRecord

logger = logging.getLogger(__name__)

UP, LOST, ENDED, ABSENT, SILENT = "up", "lost", "ended", "not started", "not reached"


@dataclass(frozen=True)
class HostStatus:
    """One host: the state of its Ray with the reason, its place and resources, and since when (epoch seconds)."""

    host: str
    state: str
    reason: str = ""
    interface: str = ""
    address: str = ""
    node_id: str = ""
    devices: float = 0.0
    free: float = 0.0
    started_at: float | None = None


def look_at(inventory: Inventory) -> list[HostStatus]:
    """The state of every host, the head first: its own word, and the head's."""
    hosts = inventory.in_order
    answers = ask(inventory, {host.name: request_of(inventory, host, "status") for host in hosts})
    said = answers[inventory.head_host.name].said
    head = said.get("running") if not said.get("unreachable") else None
    nodes: dict[str, dict[str, Any]] = {}
    if head:
        found, fault = nodes_of(inventory, head["head_address"])
        if fault:
            logger.warning("%s: %s", inventory.head_host.name, fault)
        for node in sorted(found, key=lambda node: bool(node["is_alive"])):
            nodes[node["address"]] = node  # of several at an address the living one
    return [_status(inventory, host, answers[host.name], nodes) for host in hosts]


def _status(
    inventory: Inventory, host: Host, answer: Answer, nodes: Mapping[str, Mapping[str, Any]]
) -> HostStatus:
    if answer.problem:
        return HostStatus(host.name, SILENT, answer.problem)
    record = answer.said["running"] or answer.said.get("ended")
    if record is None:
        return HostStatus(host.name, ABSENT)
    node = nodes.get(record["address"], {})
    status = HostStatus(
        host.name,
        UP,
        "",
        record["interface"],
        record["address"],
        node.get("id", ""),
        node.get("total", {}).get(inventory.resource, 0.0),
        node.get("free", {}).get(inventory.resource, 0.0),
        record["started_at"],
    )
    if answer.said["running"] is None:
        return dataclasses.replace(status, state=ENDED, reason=describe_end(answer), free=0.0)
    reason = str(answer.said["unreachable"])
    if nodes and not node.get("is_alive"):
        reason = reason or ("the head has declared it dead" if node else "the head does not know it")
    return dataclasses.replace(status, state=LOST if reason else UP, reason=reason)


@dataclass(frozen=True)
class Ending:
    """What `down` did: lines to print, and the hosts that it could not end, with the reason."""

    ended: list[str]
    left: dict[str, str]


def take_down(inventory: Inventory, store: Path) -> Ending:
    """End what was started on every host of the inventory and of the record, and nothing else.

    A host that cannot be reached keeps its place in the record: the next call tries it again.
    """
    record = ClusterRecord(store, inventory)
    with record.locked():
        everyone = inventory.model_copy(
            update={
                "hosts": (*inventory.hosts, *record.no_longer_listed(inventory)),
                "head": inventory.head_host.name,
            }
        )
        requests = {host.name: request_of(everyone, host, "stop") for host in everyone.hosts}
        answers = ask(everyone, requests, ANSWER_SECONDS + END_SECONDS + KILLED_SECONDS)
        left = {name: answer.problem for name, answer in answers.items() if answer.problem}
        known = {name: record.hosts.get(name, {}) for name in left}
        hosts = {host.name: host.model_dump(mode="json") for host in everyone.hosts}
        record.write(
            {name: {"host": hosts[name], **values} for name, values in known.items()} if record.hosts else {}
        )
    ended = []
    for name, answer in answers.items():
        if not answer.problem and answer.said["ended"] is not None:
            count = answer.said["num_processes"]
            ended.append(f"{name}: {count} processes" if answer.said["was_alive"] else f"{name}: had ended before")
    return Ending(ended, left)
