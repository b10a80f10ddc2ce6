"""Turn the nodes' reports into findings; what is the same on all nodes is one finding."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from dapo_core.machine.versions import set_of, sets, unknown_set
from dapo_core.memory.devices import GIB, describe_bytes, find_device, usable_bytes
from tasks.preflight.environment import MIN_OPEN_FILES, Variable, faults
from tasks.preflight.finding import FAIL, OK, WARN, Finding, Findings

TABLE = Path(__file__).parent / "nodes.yaml"
THIS_MACHINE = "this machine"  # the machine that runs the chain, if it is not a node of the cluster
TRAINER_VERSIONS = ("Python", "code", "transformers", "ray")  # needed without devices, too
MAX_SKEW_SECONDS = 2.0
MIN_LOCKED_BYTES = 16 * GIB
MIN_SHARED_BYTES = 1 * GIB
MAX_UNUSED_SHARE = 0.1  # of memory, in huge pages
MIN_FREE_BYTES, MAX_FULL_SHARE = 1 * GIB, 0.95
TOLERANCE_BYTES = 1 * GIB  # between the vendors' counts of memory and torch's
SHOWN = 4  # processes of a device, devices of a node

Reports = Mapping[str, Mapping[str, Any]]  # by node
Pair = tuple[str, str]  # two nodes; the first one connects to the second


@cache
def _rows() -> dict[str, dict[str, str]]:
    rows: dict[str, dict[str, str]] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return rows


def add(findings: Findings, row: str, status: str, found: str, nodes: Collection[str]) -> None:
    """Append a finding about nodes, with the texts of a table row."""
    texts = _rows()[row]
    findings.append(
        Finding(texts["check"], status, found, texts["fix"], ", ".join(nodes), texts["consequence"])
    )


def joined(found: Iterable[tuple[str, str, str, str]]) -> list[tuple[str, str, str, str]]:
    """Join the texts about several devices of a node; items are row, status, text and node."""
    texts: dict[tuple[str, str, str], list[str]] = {}
    for row, status, text, node in found:
        texts.setdefault((row, status, node), []).append(text)
    return [
        (row, status, "; ".join(each[:SHOWN]) + _more(each), node)
        for (row, status, node), each in texts.items()
    ]


def _more(shown: Sequence[Any]) -> str:
    return f"; and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""


def add_grouped(
    findings: Findings, found: Iterable[tuple[str, str, str, str]], num_nodes: int
) -> None:
    """Append findings given as row, status, text and node; nodes with the same text share one
    finding.
    """
    groups: dict[tuple[str, str, str], list[str]] = {}
    for row, status, text, node in found:
        groups.setdefault((row, status, text), []).append(node)
    for (row, status, text), nodes in groups.items():
        is_all = len(nodes) == num_nodes > 1
        add(findings, row, status, text, [f"all {num_nodes} nodes"] if is_all else nodes)


def check_versions(versions: Mapping[str, Mapping[str, str]], findings: Findings) -> None:
    """Check that versions are equal on all nodes.

    THIS_MACHINE, if it is not a node, is only compared in TRAINER_VERSIONS.
    """
    names = list(dict.fromkeys(name for each in versions.values() for name in each))
    is_equal = True
    for name in names:
        groups: dict[str, list[str]] = {}
        for node, each in versions.items():
            if node != THIS_MACHINE or name in TRAINER_VERSIONS:
                groups.setdefault(each.get(name, "none"), []).append(node)
        if len(groups) > 1:
            is_equal = False
            usual, *others = sorted(groups.items(), key=lambda group: -len(group[1]))
            for value, nodes in others:
                found = f"{name} {value}, but {usual[0]} on {', '.join(usual[1])}"
                row = name if name in ("code", "driver") else "version"
                add(findings, row, WARN if name == "driver" else FAIL, found, nodes)
    if is_equal:
        shown = ", ".join(
            f"{name} {value}" for name, value in next(iter(versions.values())).items()
        )
        findings.add("versions", OK, f"equal on {len(versions)} machines: {shown}")


def check_sets(reports: Reports, here: Mapping[str, str], findings: Findings) -> None:
    """Warn of packages and CANN versions that form no known set, unless the packages are those
    `here`.
    """
    found = []
    for node, report in reports.items():
        packages, toolkit = report["stack"], report["versions"].get("CANN")
        if packages != here and (difference := unknown_set(packages)):
            found.append(("set", WARN, difference, node))
        name = set_of(packages)
        made_with = sets()[name].cann if name else None
        if made_with and toolkit and made_with.lower() != toolkit.lower():
            found.append(
                (
                    "cann",
                    WARN,
                    f"CANN {toolkit}, but the set {name} is built with {made_with}",
                    node,
                )
            )
    add_grouped(findings, found, len(reports))


def check_devices(
    reports: Reports,
    needed_bytes: int | None,
    promised: Mapping[str, int],
    findings: Findings,
) -> None:
    """Check health, processes, free memory and number of devices.

    `promised` is Ray's number of devices by node; `needed_bytes` is the memory plan's peak on a
    device.
    """
    before = len(findings)
    found: list[tuple[str, str, str, str]] = []
    frees: list[int | None] = []
    for node, report in reports.items():
        seen = report["devices"]
        devices = seen["devices"]
        frees += map(_free, devices)
        found += [("tool", WARN, f"could not be read: {line}", node) for line in seen["unread"]]
        if devices and promised.get(node, 0) > len(devices):
            text = (
                f"Ray was started with {promised[node]} devices, but {seen['tool']} shows "
                f"{len(devices)}"
            )
            found.append(("count", FAIL, text, node))
        for device in devices:
            found += [(*fault, node) for fault in _device_faults(device, needed_bytes)]
    add_grouped(findings, joined(found), len(reports))
    if frees and len(findings) == before:
        place = "here" if THIS_MACHINE in reports else f"on {len(reports)} nodes"
        known = [free for free in frees if free is not None]
        room = f", at least {describe_bytes(min(known))} free on each" if known else ""
        findings.add("devices", OK, f"{len(frees)} {place}, healthy, without other processes{room}")


def _device_faults(
    device: Mapping[str, Any], needed_bytes: int | None
) -> list[tuple[str, str, str]]:
    """Return the faults of a device, as row, status and text."""
    label, health, free = device["label"], device["health"], _free(device)
    found = []
    if health is None:
        found.append(("tool", WARN, f"{label}: health could not be read"))
    elif health != "OK":
        found.append(
            ("health", WARN if health.startswith("Warning") else FAIL, f"{label}: {health}")
        )
    if free is None:
        found.append(("tool", WARN, f"{label}: memory could not be read"))
    shortage = ""
    if free is not None and needed_bytes is not None and free + TOLERANCE_BYTES < needed_bytes:
        shortage = f"{label}: {describe_bytes(free)} free, {describe_bytes(needed_bytes)} needed"
    others = [process for process in device["processes"] if not process["is_of_ray"]]
    jobs = [process for process in device["processes"] if process["is_of_ray"]]
    if others:
        found.append(("process", FAIL if shortage else WARN, f"{label}: {_named(others)}"))
    if jobs:
        found.append(("taken", WARN, f"{label}: {_named(jobs)}"))
    if shortage and not jobs:
        found.append(("free", FAIL, shortage))
    return found


def _free(device: Mapping[str, Any]) -> int | None:
    """Free memory of a device; None if the tool does not report it."""
    if device["total_bytes"] is None or device["used_bytes"] is None:
        return None
    return int(device["total_bytes"] - device["used_bytes"])


def _named(processes: Sequence[Mapping[str, Any]]) -> str:
    """Describe the largest processes."""
    largest = sorted(processes, key=lambda process: -(process["num_bytes"] or 0))
    shown = [
        f"process {each['pid']} ({each['name'] or 'unnamed'})"
        + ("" if each["num_bytes"] is None else f" uses {describe_bytes(each['num_bytes'])}")
        for each in largest[:SHOWN]
    ]
    return ", ".join(shown) + _more(largest)


def smallest_device(reports: Reports, kind: str) -> int | None:
    """Return the bytes that torch can use on the smallest device; None if no tool reports them."""
    totals = [
        device["total_bytes"]
        for report in reports.values()
        for device in report["devices"]["devices"]
        if device["total_bytes"] is not None
    ]
    return usable_bytes(kind, min(totals)) if totals else None


def check_device_model(name: str, smallest: int, findings: Findings) -> None:
    """Compare the device that the memory plan assumes with the smallest one found."""
    planned = find_device(name).num_bytes
    if abs(planned - smallest) > TOLERANCE_BYTES:
        sizes = (
            f"{describe_bytes(planned)}, but the smallest device found has "
            f"{describe_bytes(smallest)}"
        )
        add(
            findings,
            "model",
            FAIL if smallest < planned else WARN,
            f"train.device_model={name} has {sizes}",
            (),
        )


def check_links(reports: Reports, findings: Findings) -> None:
    """Check the network ports of NPUs: up, healthy, with an address and equal TLS. A single node
    needs none.
    """
    before, found = len(findings), []
    switches: dict[str, list[str]] = {}
    num_ports, down = 0, FAIL if len(reports) > 1 else WARN
    for node, report in reports.items():
        seen = report["devices"]
        if reason := seen.get("links_unread"):
            found.append(("links_unread", WARN, f"could not be read: {reason}", node))
        for port in seen.get("links", ()):
            num_ports += 1
            found += [(*fault, node) for fault in _port_faults(port, down)]
            if port["tls"] is not None:
                switches.setdefault(port["tls"], []).append(f"{node} {port['label']}")
    add_grouped(findings, joined(found), len(reports))
    if len(switches) > 1:
        usual, other = sorted(switches, key=lambda value: -len(switches[value]))
        named = ", ".join(switches[other][:SHOWN]) + _more(switches[other])
        text = f"TLS is {_TLS[other]}, but {_TLS[usual]} on {len(switches[usual])} other ports"
        add(findings, "tls", FAIL, text, (named,))
    if num_ports and len(findings) == before:
        findings.add(
            "links",
            OK,
            f"{num_ports} ports up, TLS {_TLS.get(next(iter(switches), ''), 'unknown')} on all",
        )


_TLS = {"0": "off", "1": "on"}


def _port_faults(port: Mapping[str, str | None], down: str) -> list[tuple[str, str, str]]:
    label, found = port["label"], []
    if port["link"] is None:
        found.append(("links_unread", WARN, f"{label}: link could not be read"))
    elif port["link"] != "UP":
        found.append(("link", down, f"{label}: link {port['link']}"))
    if port["health"] not in (None, "Success"):
        found.append(("net_health", WARN, f"{label}: net_health {port['health']}"))
    if port["address"] is None and port["link"] is not None:
        found.append(("port_address", WARN, f"{label}: no address"))
    return found


def check_clocks(skews: Mapping[str, tuple[float, float]], findings: Findings) -> None:
    """Check the clocks: seconds that each node is ahead of this machine, and the error of that
    number.
    """
    found = [
        (
            "clock",
            WARN,
            f"{abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} this machine",
            node,
        )
        for node, (skew, error) in skews.items()
        if abs(skew) - error > MAX_SKEW_SECONDS
    ]
    add_grouped(findings, found, len(skews))
    if not found:
        findings.add(
            "clock",
            OK,
            f"equal within {max(abs(skew) + error for skew, error in skews.values()):.1f} s",
        )


def check_limits(reports: Reports, is_accelerated: bool, findings: Findings) -> None:
    """Check the limits of processes, shared memory and unused huge pages."""
    found = []
    for node, report in reports.items():
        files, locked = report["limits"]["open files"], report["limits"]["locked memory"]
        sizes = report["memory"]
        if files is not None and files < MIN_OPEN_FILES:
            found.append(
                ("open_files", WARN, f"ulimit -n is {files}; {MIN_OPEN_FILES} is recommended", node)
            )
        if is_accelerated and locked is not None and locked < MIN_LOCKED_BYTES:
            found.append(("locked_memory", WARN, f"ulimit -l is {locked / 1024:.0f} KiB", node))
        if sizes["shared"] < MIN_SHARED_BYTES:
            found.append(
                ("shared_memory", WARN, f"/dev/shm has {describe_bytes(sizes['shared'])}", node)
            )
        if sizes["unused_huge_pages"] > MAX_UNUSED_SHARE * sizes["total"]:
            text = (
                f"{describe_bytes(sizes['unused_huge_pages'])} are reserved for unused huge pages"
            )
            found.append(("huge_pages", WARN, text, node))
    add_grouped(findings, found, len(reports))
    if not found:
        findings.add("limits", OK, "open files, locked memory, /dev/shm and huge pages")


def check_disks(reports: Reports, findings: Findings) -> None:
    """Check the free space for temporary files and for Ray's objects and logs on each node."""
    found = []
    for node, report in reports.items():
        for path, sizes in report["disk"].items():
            free, full = sizes["free"], 1 - sizes["free"] / max(sizes["total"], 1)
            if free < MIN_FREE_BYTES or full > MAX_FULL_SHARE:
                text = f"{path} has {describe_bytes(free)} free and is {full:.0%} full"
                found.append(("full", FAIL if free < MIN_FREE_BYTES else WARN, text, node))
    add_grouped(findings, found, len(reports))
    if not found:
        least = min(
            sizes["free"] for report in reports.values() for sizes in report["disk"].values()
        )
        findings.add(
            "node disk", OK, f"at least {describe_bytes(least)} free for temporary files and Ray"
        )


def check_variables(reports: Reports, findings: Findings) -> None:
    """Check each node's environment for obsolete or harmful variables."""
    add_grouped(
        findings,
        (
            ("variable", status, f"{name}: {fault}", node)
            for node, report in reports.items()
            for name, status, fault in faults(Variable(**row) for row in report["environment"])
        ),
        len(reports),
    )


def check_seen(differences: Mapping[str, Sequence[str]], findings: Findings) -> None:
    """Check that each node sees the same store, model and scorer as this machine."""
    found = [
        ("files", FAIL, f"does not see {', '.join(each)}", node)
        for node, each in differences.items()
        if each
    ]
    add_grouped(findings, found, len(differences))
    if differences and not found:
        findings.add(
            "files", OK, f"store and model are the same on {len(differences) + 1} machines"
        )


def check_connections(
    taken: Mapping[str, Sequence[str]],
    failures: Mapping[Pair, Sequence[str]],
    num_tried: int,
    findings: Findings,
) -> None:
    """Report port ranges without a free port, by node, and failed connections, by pair of nodes."""
    add_grouped(
        findings,
        (
            ("range", WARN, f"no port of {name} is free", node)
            for node, names in taken.items()
            for name in names
        ),
        len(taken),
    )
    for (one, other), reasons in failures.items():
        add(findings, "connection", FAIL, "; ".join(reasons), (f"from {one} to {other}",))
    if num_tried and not failures:
        findings.add("network", OK, f"{num_tried} TCP connections, from each node to each other")


def check_all_reduce(results: Mapping[Pair, str | float], backend: str, findings: Findings) -> None:
    """Check each pair's all-reduce: its seconds or its failure, "" if the devices were taken."""
    for (one, other), result in results.items():
        where = (f"between {one} and {other}",)
        if result == "":
            add(findings, "reduce_busy", WARN, "not tried", where)
        elif isinstance(result, str):
            add(findings, "reduce", FAIL, f"all-reduce over {backend} failed: {result}", where)
    times = [result for result in results.values() if isinstance(result, float)]
    if times and len(times) == len(results):
        slowest = (
            f", {1000 * max(times):.0f} ms at most"
            if len(times) > 1
            else f", {1000 * times[0]:.0f} ms"
        )
        findings.add(
            "all-reduce", OK, f"over {backend} between {len(times)} pair(s) of nodes{slowest}"
        )
