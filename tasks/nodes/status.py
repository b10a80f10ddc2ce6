"""`dapo cluster status` and `down`: the state of Ray on each host, and stopping it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.nodes.inventory import Host, Inventory
from tasks.nodes.launch import describe_end, nodes_of, requests_of
from tasks.nodes.on_node import END_SECONDS, KILLED_SECONDS
from tasks.nodes.reach import ANSWER_SECONDS, Answer, ask
from tasks.nodes.record import ClusterRecord

logger = logging.getLogger(__name__)

UP, LOST, ENDED, ABSENT, SILENT = "up", "lost", "ended", "not started", "not reached"


@dataclass(frozen=True)
class HostStatus:
    """A host's Ray: state and why, interface, node and devices; `started_at` since the epoch."""

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
    """Return the state of every host, the head first, as the host and the head report it."""
    hosts = inventory.in_order
    answers = ask(inventory, requests_of(inventory, "status", hosts))
    reply = answers[inventory.head_host.name].reply
    head = reply.get("running") if not reply.get("unreachable") else None
    nodes: dict[str, dict[str, Any]] = {}
    if head:
        found, fault = nodes_of(inventory, head["head_address"])
        if fault:
            logger.warning("%s: %s", inventory.head_host.name, fault)
        for node in sorted(found, key=lambda node: bool(node["is_alive"])):
            nodes[node["address"]] = node  # living nodes replace dead ones at the same address
    return [_status(inventory, host, answers[host.name], nodes) for host in hosts]


def _status(
    inventory: Inventory, host: Host, answer: Answer, nodes: Mapping[str, Mapping[str, Any]]
) -> HostStatus:
    if answer.problem:
        return HostStatus(host.name, SILENT, answer.problem)
    record = answer.reply["running"] or answer.reply.get("ended")
    if record is None:
        return HostStatus(host.name, ABSENT)
    node = nodes.get(record["address"], {})
    free = node.get("free", {}).get(inventory.resource, 0.0)
    if answer.reply["running"] is None:
        state, reason, free = ENDED, describe_end(answer), 0.0
    else:
        reason = str(answer.reply["unreachable"])
        if nodes and not node.get("is_alive") and not reason:
            reason = "the head has declared it dead" if node else "the head does not know it"
        state = LOST if reason else UP
    return HostStatus(
        host.name,
        state,
        reason,
        record["interface"],
        record["address"],
        node.get("id", ""),
        node.get("total", {}).get(inventory.resource, 0.0),
        free,
        record["started_at"],
    )


@dataclass(frozen=True)
class Ending:
    """The result of `down`: lines to print, and why hosts could not be stopped."""

    ended: list[str]
    left: dict[str, str]


def take_down(inventory: Inventory, store: Path) -> Ending:
    """Stop what was started on every host of the inventory and of the record, and nothing else.

    A host that cannot be reached stays in the record, so that the next call tries it again.
    """
    record = ClusterRecord(store, inventory)
    with record.locked():
        hosts = (*inventory.hosts, *record.no_longer_listed(inventory))
        everyone = inventory.model_copy(update={"hosts": hosts, "head": inventory.head_host.name})
        requests = requests_of(everyone, "stop", hosts)
        answers = ask(everyone, requests, ANSWER_SECONDS + END_SECONDS + KILLED_SECONDS)
        left = {name: answer.problem for name, answer in answers.items() if answer.problem}
        if record.hosts:
            remaining = {
                host.name: {"host": host.model_dump(mode="json"), **record.hosts.get(host.name, {})}
                for host in hosts
                if host.name in left
            }
            record.write(remaining)
    ended = []
    for name, answer in answers.items():
        if not answer.problem and answer.reply["ended"] is not None:
            count = f"{answer.reply['num_processes']} processes"
            ended.append(f"{name}: {count if answer.reply['was_alive'] else 'had ended before'}")
    return Ending(ended, left)
