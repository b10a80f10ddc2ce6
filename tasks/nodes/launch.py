"""`dapo cluster up`: inspect every host, start Ray where it is missing, await that all join."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
    """A running cluster: head address, token's path on each node, all hosts, those just started."""

    address: str
    token_path: str
    hosts: Mapping[str, Mapping[str, Any]]
    started: Sequence[str]


def bring_up(inventory: Inventory, store: Path, source: str) -> Cluster:
    """Start Ray on every host that is not running it, and wait until all have joined.

    Raises ClusterError with a reason per host: before anything is started if a host cannot be
    reached or does not match the others, afterwards if a host has not joined within start_seconds.
    """
    record = ClusterRecord(store, inventory)
    with record.locked():
        if removed := [host.name for host in record.no_longer_listed(inventory)]:
            raise ClusterError(
                f"{', '.join(removed)} was started but is no longer in {source}: run `dapo cluster "
                f"down {source}` first, which also stops it, or put it back"
            )
        answers = _inspect(inventory)
        interfaces = {name: answer.reply["interface"] for name, answer in answers.items()}
        address = _join(interfaces[inventory.head_host.name]["address"], inventory.port)
        hosts: dict[str, dict[str, Any]] = {
            host.name: {"host": host.model_dump(mode="json")} for host in inventory.hosts
        }
        # before the start, so that `down` always finds them
        record.write(hosts, source=source, address=address)
        started, token_path, problems = _start(inventory, answers, address)
        nodes = _await_nodes(inventory, address, interfaces, problems)
        for name, interface in interfaces.items():
            hosts[name] |= {**interface, "node_id": nodes.get(name, {}).get("id")}
        record.write(hosts)
    if problems:
        count = len(inventory.hosts)
        raise ClusterError(
            f"{count - len(problems)} of {count} hosts have joined {address}; missing:\n"
            f"{_listed(problems)}\nrun `dapo cluster up` again to start the missing ones, or `dapo "
            "cluster down` to stop the others"
        )
    return Cluster(address, token_path, hosts, started)


def requests_of(
    inventory: Inventory, verb: str, hosts: Iterable[Host], **more: Any
) -> dict[str, dict[str, Any]]:
    """Return a request for each host, by name, with `more` in each."""
    shared = {"verb": verb, "cluster": cluster_key(inventory), **more}
    return {
        host.name: {**shared, "host": host.name, "is_head": host is inventory.head_host}
        for host in hosts
    }


def _inspect(inventory: Inventory) -> dict[str, Answer]:
    """Inspect every host before a start; raises ClusterError with all reasons against it."""
    head, *others = inventory.in_order
    answers = _look(inventory, [head], [host.reached_at for host in (head, *others)])
    interface = answers[head.name].reply.get("interface")
    answers |= _look(inventory, others, [interface["address"] if interface else head.reached_at])
    problems = {name: answer.problem for name, answer in answers.items() if answer.problem}
    problems |= _mismatches(inventory, answers)
    if interface and not problems:
        addresses = {host.name: answers[host.name].reply["interface"]["address"] for host in others}
        request = {
            "verb": "routes",
            "address": interface["address"],
            "interface": interface["name"],
            "addresses": addresses,
        }
        routes = ask(inventory, {head.name: request})[head.name]
        problems |= routes.reply["faults"] if not routes.problem else {head.name: routes.problem}
        for name, warning in routes.reply.get("warnings", {}).items():
            logger.warning("%s: %s", name, warning)
    if problems:
        count = f"{len(problems)} of {len(answers)} hosts"
        raise ClusterError(f"nothing was started; {count}:\n{_listed(problems)}")
    _warn(answers)
    return answers


def _look(inventory: Inventory, hosts: Iterable[Host], targets: Sequence[str]) -> dict[str, Answer]:
    shared = {"targets": targets, "port": inventory.port, "device": inventory.device}
    requests = requests_of(inventory, "look", hosts, **shared)
    for host in inventory.hosts:
        if host.name in requests:
            requests[host.name] |= {"own": host.reached_at, "interface": host.interface}
    return ask(inventory, requests, must_be_equal=True)


def _mismatches(inventory: Inventory, answers: Mapping[str, Answer]) -> dict[str, str]:
    """Return why hosts that answered do not fit, in versions, address, running Ray or devices."""
    reached = {name: answer for name, answer in answers.items() if not answer.problem}
    counts = Counter(answer.reply["interface"]["address"] for answer in reached.values())
    wanted = answers[inventory.head_host.name].versions
    problems: dict[str, str] = {}
    for host in inventory.hosts:
        if (answer := reached.get(host.name)) is None:
            continue
        address, num_devices = answer.reply["interface"]["address"], answer.reply.get("num_devices")
        differences = [
            f"{name} {answer.versions[name]} differs from the head's {wanted[name]}"
            for name in ("python", "ray")
            if wanted and answer.versions[name] != wanted[name]
        ]
        if differences:
            problems[host.name] = f"{', '.join(differences)}: Ray needs equal versions"
        elif counts[address] > 1:
            problems[host.name] = (
                f"its address {address} is also another host's: set address or interface of both"
            )
        elif (record := answer.reply["running"]) and record["address"] != address:
            problems[host.name] = (
                f"Ray is running at {record['address']} on {record['interface']}, but the "
                f"inventory now leads to {address}; `dapo cluster down` stops it"
            )
        elif num_devices is not None and num_devices < (listed := inventory.devices_of(host)):
            problems[host.name] = (
                f"it has {num_devices} {inventory.device} devices, the inventory lists {listed}: "
                "set its devices"
            )
    return problems


def _warn(answers: Mapping[str, Answer]) -> None:
    sizes = {name: answer.reply["interface"]["mtu"] for name, answer in answers.items()}
    if len(set(sizes.values())) > 1:
        shown = ", ".join(f"{name} {size}" for name, size in sizes.items())
        logger.warning("the interfaces have different MTUs, large packets may be lost: %s", shown)
    text = "%s: another Ray is running there and may use the same devices: %s"
    for name, answer in answers.items():
        for other in answer.reply["others"]:
            logger.warning(text, name, other)


def _start(
    inventory: Inventory, answers: Mapping[str, Answer], address: str
) -> tuple[list[str], str, dict[str, str]]:
    """Start Ray on the head, then on the others, unless it is running.

    Returns the hosts that were started, the token's path, and the problem of each host that failed.
    """
    head, *others = inventory.in_order
    running = {name for name, answer in answers.items() if answer.reply["running"]}
    if head.name not in running and running:
        logger.info("the head has ended: restarting %s, which lost it", ", ".join(sorted(running)))
        lost = [host for host in others if host.name in running]
        stopped = ask(inventory, requests_of(inventory, "stop", lost))
        if stuck := {name: answer.problem for name, answer in stopped.items() if answer.problem}:
            raise ClusterError(f"nothing was started:\n{_listed(stuck)}")
        running = set()
    problems: dict[str, str] = {}
    shared, token_path = {"head_address": address, "token": secrets.token_hex(32)}, ""
    for group in ([head], others):
        requests = requests_of(inventory, "start", group, **shared)
        for host in group:
            interface = answers[host.name].reply["interface"]
            requests[host.name] |= _start_settings(inventory, host, interface, address)
        if new := [name for name in requests if name not in running]:
            logger.info("starting Ray on %s", ", ".join(new))
        replies = ask(inventory, requests, inventory.start_seconds + 2 * ANSWER_SECONDS)
        for name, answer in replies.items():
            if answer.problem:
                log = (f"  | {line}" for line in answer.reply.get("log", ()))
                problems[name] = "\n".join([answer.problem, *log])
        if group == [head]:
            if problems:
                raise ClusterError(f"Ray's head did not start:\n{_listed(problems)}")
            reply = replies[head.name].reply
            shared["token"], token_path = reply["token"], reply["token_path"]
    started = [name for name in answers if name not in running and name not in problems]
    return started, token_path, problems


def _start_settings(
    inventory: Inventory, host: Host, interface: Mapping[str, Any], head_address: str
) -> dict[str, Any]:
    named = INTERFACE_VARIABLES[inventory.device]
    variables = {name: form.format(interface["name"]) for name, form in named.items()}
    if host is inventory.head_host:
        dashboard = str(inventory.dashboard).lower()
        role = ["--head", f"--port={inventory.port}", f"--include-dashboard={dashboard}"]
    else:
        role = [f"--address={head_address}"]
    train = {"device": inventory.device, "ray_address": "auto"}
    address, count = interface["address"], inventory.devices_of(host)
    devices = {"CPU": f"--num-cpus={count}", "GPU": f"--num-gpus={count}"}.get(
        inventory.resource, f"--resources={json.dumps({inventory.resource: count})}"
    )
    cpus = [f"--num-cpus={inventory.num_cpus}"] if inventory.num_cpus else []
    return {
        "address": address,
        "interface": interface["name"],
        "start_seconds": inventory.start_seconds,
        "options": [*role, f"--node-ip-address={address}", devices, *cpus],
        # without these, vLLM and HCCL pick an address themselves, maybe one outside the cluster
        "environment": {
            **wanted_alike(TrainingConfig.model_validate({"train": train})),
            **variables,
            "VLLM_HOST_IP": address,
            **inventory.environment_of(host),
        },
    }


def _await_nodes(
    inventory: Inventory,
    address: str,
    interfaces: Mapping[str, Mapping[str, Any]],
    problems: dict[str, str],
) -> dict[str, dict[str, Any]]:
    """Wait until all hosts without problems have joined; returns their Ray nodes, adds problems."""
    deadline = time.monotonic() + inventory.start_seconds
    while True:
        nodes, fault = nodes_of(inventory, address, max(deadline - time.monotonic(), POLL_SECONDS))
        living = {node["address"]: node for node in nodes if node["is_alive"]}
        joined, missing = {}, {}
        for host in (host for host in inventory.hosts if host.name not in problems):
            own, wanted = interfaces[host.name]["address"], inventory.devices_of(host)
            if (node := living.get(own)) is None:
                late = f"it has not joined as {own} within {inventory.start_seconds} s"
                missing[host.name] = fault or late
            elif (count := node["total"].get(inventory.resource, 0)) != wanted:
                missing[host.name] = (
                    f"it joined with {count:g} {inventory.resource} instead of {wanted}: another "
                    "inventory started it; `dapo cluster down` stops it"
                )
            else:
                joined[host.name] = node
        if not missing or time.monotonic() >= deadline:
            break
        time.sleep(POLL_SECONDS)
    late_hosts = [host for host in inventory.hosts if host.name in missing]
    for name, answer in ask(inventory, requests_of(inventory, "status", late_hosts)).items():
        problems[name] = "; ".join(filter(None, (missing[name], describe_end(answer))))
    return joined


def nodes_of(
    inventory: Inventory, address: str, seconds: float = ANSWER_SECONDS
) -> tuple[list[dict[str, Any]], str]:
    """Return the nodes that the head knows, and why it did not answer ("" if it did)."""
    head, more = inventory.head_host, {"head_address": address, "seconds": seconds}
    requests = requests_of(inventory, "nodes", [head], **more)
    answer = ask(inventory, requests, seconds + ANSWER_SECONDS)[head.name]
    return answer.reply.get("nodes", []), answer.problem


def describe_end(answer: Answer) -> str:
    """Explain why a host's Ray is not in the cluster, as far as the host itself knows."""
    if answer.problem:
        return answer.problem
    if ended := answer.reply.get("ended"):
        lines = "".join(f"\n  | {line}" for line in ended["log"])
        return f"Ray has ended; the last lines of its log on {ended['hostname']}:{lines}"
    return str(answer.reply.get("unreachable", ""))


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _listed(problems: Mapping[str, str]) -> str:
    return "\n".join(f"  {name}: {problem}" for name, problem in problems.items())
