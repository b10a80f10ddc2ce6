"""`dapo cluster up`: looks at every host, starts Ray where it is missing, and waits until all have joined."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo_core.config.training import TrainingConfig
from tasks.nodes.inventory import Host, Inventory
from tasks.nodes.reach import ANSWER_SECONDS, Answer, ClusterError, ask
from tasks.nodes.record import ClusterRecord, cluster_key
from tasks.preflight.environment import wanted_alike
from tasks.preflight.interfaces import INTERFACE_VARIABLES

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Cluster:
    """A cluster that is up: the head's address, the file with its token on each node, its hosts by name."""

    address: str
    token_path: str
    hosts: Mapping[str, Mapping[str, Any]]
    started: Sequence[str]


def bring_up(inventory: Inventory, store: Path, source: str) -> Cluster:
    """The cluster with every host of the inventory in it; what runs already is left as it is.

    Raises ClusterError with the reason of each host: before anything is started where one cannot be reached or
    does not fit the others, and afterwards where one has not joined within start_seconds.
    """
    record = ClusterRecord(store, inventory)
    with record.locked():
        if gone := [host.name for host in record.no_longer_listed(inventory)]:
            raise ClusterError(
                f"{', '.join(gone)} was started and is no longer in {source}: type `dapo cluster down {source}` "
                "first, which still ends it, or put it back"
            )
        found = _look(inventory)
        address = _join(found[inventory.head_host.name].said["interface"]["address"], inventory.port)
        known: dict[str, dict[str, Any]] = {
            host.name: {"host": host.model_dump(mode="json")} for host in inventory.hosts
        }
        record.write(known, source=source, address=address)  # before a start: `down` looks there in any case
        started, token_path, problems = _start(inventory, found, address)
        nodes = _wait(inventory, address, found, problems)
        for name, answer in found.items():
            known[name] |= {**answer.said["interface"], "node_id": nodes.get(name, {}).get("id")}
        record.write(known)
    if problems:
        missing = _listed(problems)
        count = len(inventory.hosts)
        raise ClusterError(
            f"{count - len(problems)} of {count} hosts have joined {address}; missing:\n{missing}\n"
            "`dapo cluster up` again starts what is missing, `dapo cluster down` ends the rest"
        )
    return Cluster(address, token_path, known, started)


def _look(inventory: Inventory) -> dict[str, Answer]:
    """What every host says before a start; raises ClusterError with all reasons why it cannot work."""
    head = inventory.head_host
    rest = [host for host in inventory.hosts if host is not head]
    own = [head.reached_at, *(host.reached_at for host in rest)]
    found = ask(inventory, {head.name: _look_request(inventory, head, own)}, must_be_equal=True)
    seen = found[head.name].said.get("interface")
    targets = [seen["address"] if seen else head.reached_at]
    found |= ask(
        inventory, {host.name: _look_request(inventory, host, targets) for host in rest}, must_be_equal=True
    )
    problems = {name: answer.problem for name, answer in found.items() if answer.problem}
    fitting = {name: answer for name, answer in found.items() if name not in problems}
    problems |= _misfits(inventory, fitting, found[head.name])
    if seen and not problems:
        addresses = {host.name: found[host.name].said["interface"]["address"] for host in rest}
        request = {"verb": "routes", "address": seen["address"], "interface": seen["name"], "addresses": addresses}
        back = ask(inventory, {head.name: request})[head.name]
        problems |= back.said["faults"] if not back.problem else {head.name: back.problem}
        for name, warning in back.said.get("warnings", {}).items():
            logger.warning("%s: %s", name, warning)
    if problems:
        raise ClusterError(f"nothing was started; {len(problems)} of {len(found)} hosts:\n{_listed(problems)}")
    _warn(found)
    return found


def _look_request(inventory: Inventory, host: Host, targets: Sequence[str]) -> dict[str, Any]:
    return {
        **request_of(inventory, host, "look"),
        "targets": targets,
        "own": host.reached_at,
        "interface": host.interface,
        "port": inventory.port,
        "device": inventory.device,
    }


def request_of(inventory: Inventory, host: Host, verb: str) -> dict[str, Any]:
    """What every request to a host says."""
    is_head = host is inventory.head_host
    return {"verb": verb, "cluster": cluster_key(inventory), "host": host.name, "is_head": is_head}


def _misfits(inventory: Inventory, found: Mapping[str, Answer], head: Answer) -> dict[str, str]:
    """Hosts that differ from the head in versions, have fewer devices than listed, or share an address."""
    problems: dict[str, str] = {}
    counts = Counter(answer.said["interface"]["address"] for answer in found.values())
    for host in inventory.hosts:
        if (answer := found.get(host.name)) is None:
            continue
        address, devices = answer.said["interface"]["address"], answer.said.get("num_devices")
        differs = [
            f"{name} {answer.versions[name]}, the head {head.versions[name]}"
            for name in ("python", "ray")
            if head.versions and answer.versions[name] != head.versions[name]
        ]
        if differs:
            problems[host.name] = f"it has {' and '.join(differs)}: Ray joins equal versions only"
        elif counts[address] > 1:
            problems[host.name] = (
                f"it has the address {address}, as another host: set address or interface of both"
            )
        elif (runs := answer.said["running"]) and runs["address"] != address:
            problems[host.name] = (
                f"its Ray runs at {runs['address']} on {runs['interface']}, the inventory now leads to {address}; "
                "`dapo cluster down` ends it"
            )
        elif devices is not None and devices < inventory.devices_of(host):
            problems[host.name] = (
                f"it has {devices} of {inventory.devices_of(host)} devices ({inventory.device}): set its devices"
            )
    return problems


def _warn(found: Mapping[str, Answer]) -> None:
    sizes = {name: answer.said["interface"]["mtu"] for name, answer in found.items()}
    if len(set(sizes.values())) > 1:
        shown = ", ".join(f"{name} {size}" for name, size in sizes.items())
        logger.warning("the interfaces have different MTUs, large packets may be lost: %s", shown)
    for name, answer in found.items():
        for other in answer.said["others"]:
            logger.warning("%s: another Ray runs there and may use the same devices: %s", name, other)


def _start(
    inventory: Inventory, found: Mapping[str, Answer], address: str
) -> tuple[list[str], str, dict[str, str]]:
    """Start Ray on the head, then on all others, unless it runs: whom, the token's file, who failed and why."""
    head = inventory.head_host
    runs = {name for name, answer in found.items() if answer.said["running"]}
    request = {
        "head_address": address,
        "token": secrets.token_hex(32),
    }
    if head.name not in runs and runs:
        logger.info("the head has ended: %s, which lost it, is started again", ", ".join(sorted(runs)))
        orphans = [host for host in inventory.hosts if host.name in runs]
        stopped = ask(inventory, {host.name: request_of(inventory, host, "stop") for host in orphans})
        if stuck := {name: answer.problem for name, answer in stopped.items() if answer.problem}:
            raise ClusterError(f"nothing was started:\n{_listed(stuck)}")
        runs = set()
    problems: dict[str, str] = {}
    token_path = ""
    seconds = inventory.start_seconds + 2 * ANSWER_SECONDS
    for group in ([head], [host for host in inventory.hosts if host is not head]):
        requests = {
            host.name: _start_request(inventory, host, found[host.name].said["interface"], request)
            for host in group
        }
        if new := [name for name in requests if name not in runs]:
            logger.info("starting Ray on %s", ", ".join(new))
        answers = ask(inventory, requests, seconds)
        for name, answer in answers.items():
            if answer.problem:
                problems[name] = "\n".join(
                    [answer.problem, *(f"  | {line}" for line in answer.said.get("log", ()))]
                )
        if group == [head]:
            if problems:
                raise ClusterError(f"Ray's head did not start:\n{_listed(problems)}")
            request["token"], token_path = answers[head.name].said["token"], answers[head.name].said["token_path"]
    return [name for name in found if name not in runs and name not in problems], token_path, problems


def _start_request(
    inventory: Inventory, host: Host, interface: Mapping[str, Any], shared: Mapping[str, Any]
) -> dict[str, Any]:
    variables = {
        name: form.format(interface["name"]) for name, form in INTERFACE_VARIABLES[inventory.device].items()
    }
    is_head = host is inventory.head_host
    where = ["--head", f"--port={inventory.port}"] if is_head else [f"--address={shared['head_address']}"]
    if is_head:
        where += [f"--include-dashboard={str(inventory.dashboard).lower()}"]
    return {
        **request_of(inventory, host, "start"),
        **shared,
        "address": interface["address"],
        "interface": interface["name"],
        "start_seconds": inventory.start_seconds,
        "options": [*where, f"--node-ip-address={interface['address']}", *ray_options(inventory, host)],
        # vLLM and HCCL otherwise look for this node's address themselves, some by a way out of the cluster
        "environment": {
            **_wanted(inventory.device),
            **variables,
            "VLLM_HOST_IP": interface["address"],
            **inventory.environment_of(host),
        },
    }


def _wanted(device: str) -> dict[str, str]:
    """Variables that trainings on such devices want on every node alike."""
    config = TrainingConfig.model_validate({"train": {"device": device, "ray_address": "auto"}})
    return wanted_alike(config)


def ray_options(inventory: Inventory, host: Host) -> list[str]:
    """Options of `ray start` for a host's devices and processors."""
    count = inventory.devices_of(host)
    options = {"CPU": [f"--num-cpus={count}"], "GPU": [f"--num-gpus={count}"]}.get(
        inventory.resource, [f"--resources={json.dumps({inventory.resource: count})}"]
    )
    return [*options, *([f"--num-cpus={inventory.num_cpus}"] if inventory.num_cpus else [])]


def _wait(
    inventory: Inventory, address: str, found: Mapping[str, Answer], problems: dict[str, str]
) -> dict[str, dict[str, Any]]:
    """The nodes that have joined, by host, once all have; adds to `problems` why others have not."""
    deadline = time.monotonic() + inventory.start_seconds
    while True:
        nodes, fault = nodes_of(inventory, address, max(deadline - time.monotonic(), POLL_SECONDS))
        joined, missing = {}, {}
        for host in inventory.hosts:
            if host.name in problems:
                continue
            own = found[host.name].said["interface"]["address"]
            node = next((each for each in nodes if each["is_alive"] and each["address"] == own), None)
            if node is None:
                missing[host.name] = fault or f"it has not joined as {own} within {inventory.start_seconds} s"
            elif (count := node["total"].get(inventory.resource, 0)) != inventory.devices_of(host):
                missing[host.name] = (
                    f"it joined with {count:g} of {inventory.devices_of(host)} {inventory.resource}, as it was "
                    "started with another inventory; `dapo cluster down` ends it"
                )
            else:
                joined[host.name] = node
        if not missing or time.monotonic() >= deadline:
            break
        time.sleep(POLL_SECONDS)
    if missing:
        asked = [host for host in inventory.hosts if host.name in missing]
        for name, answer in ask(
            inventory, {host.name: request_of(inventory, host, "status") for host in asked}
        ).items():
            problems[name] = "; ".join(filter(None, (missing[name], describe_end(answer))))
    return joined


def nodes_of(
    inventory: Inventory, address: str, seconds: float = ANSWER_SECONDS
) -> tuple[list[dict[str, Any]], str]:
    """Ray's nodes as its head has them, and why it says nothing."""
    head = inventory.head_host
    request = {**request_of(inventory, head, "nodes"), "head_address": address, "seconds": seconds}
    answer = ask(inventory, {head.name: request}, seconds + ANSWER_SECONDS)[head.name]
    return answer.said.get("nodes", []), answer.problem


def describe_end(answer: Answer) -> str:
    """Why a host's Ray is not in the cluster, as far as the host itself can tell."""
    if answer.problem:
        return answer.problem
    if ended := answer.said.get("ended"):
        lines = "".join(f"\n  | {line}" for line in ended["log"])
        return f"its Ray has ended; the end of its log on {ended['hostname']}:{lines}"
    return str(answer.said.get("unreachable", ""))


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _listed(problems: Mapping[str, str]) -> str:
    return "\n".join(f"  {name}: {problem}" for name, problem in problems.items())
