"""Turn the nodes' reports into findings; what is the same on all nodes is one finding."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
_TLS = {"0": "off", "1": "on"}

Report = Mapping[str, Any]
Reports = Mapping[str, Report]  # by node
Fault = tuple[str, str, str]  # row of the table, status, text
Pair = tuple[str, str]  # two nodes; the first one connects to the second


@cache
def _rows() -> dict[str, dict[str, str]]:
    rows: dict[str, dict[str, str]] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return rows


def add(findings: Findings, row: str, status: str, found: str, nodes: Collection[str]) -> None:
    """Append a finding about nodes, with the texts of a table row."""
    texts, where = _rows()[row], ", ".join(nodes)
    finding = Finding(texts["check"], status, found, texts["fix"], where, texts["consequence"])
    findings.append(finding)


def _add_faults(
    findings: Findings, of_nodes: Mapping[str, Iterable[Fault]], are_of_devices: bool = False
) -> bool:
    """Append the nodes' faults, equal ones as one finding; True if there are any.

    Texts about several devices of a node are joined.
    """
    groups: dict[Fault, list[str]] = {}
    for node, found in of_nodes.items():
        texts: dict[tuple[str, str], list[str]] = {}
        for row, status, text in found:
            texts.setdefault((row, status), []).append(text)
        for (row, status), several in texts.items():
            joined = ["; ".join(several[:SHOWN]) + _more(several)]
            for text in joined if are_of_devices else several:
                groups.setdefault((row, status, text), []).append(node)
    for (row, status, text), nodes in groups.items():
        is_all = len(nodes) == len(of_nodes) > 1
        add(findings, row, status, text, [f"all {len(nodes)} nodes"] if is_all else nodes)
    return bool(groups)


def _more(shown: Sequence[Any]) -> str:
    return f"; and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""


def check_versions(versions: Mapping[str, Mapping[str, str]], findings: Findings) -> None:
    """Check that versions are equal on all nodes.

    THIS_MACHINE, if it is not a node, is only compared in TRAINER_VERSIONS.
    """
    is_equal = True
    for name in dict.fromkeys(name for each in versions.values() for name in each):
        groups: dict[str, list[str]] = {}
        for node, each in versions.items():
            if node != THIS_MACHINE or name in TRAINER_VERSIONS:
                groups.setdefault(each.get(name, "none"), []).append(node)
        usual, *others = sorted(groups.items(), key=lambda group: -len(group[1]))
        for value, nodes in others:
            is_equal = False
            found = f"{name} {value}, but {usual[0]} on {', '.join(usual[1])}"
            row = name if name in ("code", "driver") else "version"
            add(findings, row, WARN if name == "driver" else FAIL, found, nodes)
    if is_equal:
        shown = ", ".join(" ".join(each) for each in next(iter(versions.values())).items())
        findings.add("versions", OK, f"equal on {len(versions)} machines: {shown}")


def check_sets(reports: Reports, here: Mapping[str, str], findings: Findings) -> None:
    """Warn of packages, CANN and drivers that form no known set, except the packages of `here`."""

    def of(report: Report) -> Iterator[Fault]:
        packages, toolkit = report["stack"], report["versions"].get("CANN")
        if packages != here and (difference := unknown_set(packages)):
            yield "set", WARN, difference
        name = set_of(packages)
        built_with = sets()[name].cann if name else None
        if built_with and toolkit and built_with.lower() != toolkit.lower():
            text = f"CANN {toolkit}, but the set {name} is built with {built_with}"
            yield "cann", WARN, text
        needed, driver = sets()[name].driver if name else None, report["versions"].get("driver")
        if built_with and needed and driver and _release(driver) < _release(needed):
            yield "old_driver", WARN, f"driver {driver}, but the set {name} needs {needed}"

    _add_faults(findings, {node: of(report) for node, report in reports.items()})


def _release(version: str) -> list[int]:
    """Return year and release of an Ascend driver: 26.0.rc2, HDK 26.0.RC1."""
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def check_devices(
    reports: Reports, needed_bytes: int | None, promised: Mapping[str, int], findings: Findings
) -> None:
    """Check health, processes, free memory and number of devices.

    `promised` is Ray's number of devices by node; `needed_bytes` is the plan's peak on a device.
    """

    def of(node: str) -> Iterator[Fault]:
        seen = reports[node]["devices"]
        for line in seen["unread"]:
            yield "tool", WARN, f"could not be read: {line}"
        count, claimed = len(seen["devices"]), promised.get(node, 0)
        if 0 < count < claimed:
            text = f"Ray was started with {claimed} devices, but {seen['tool']} shows {count}"
            yield "count", FAIL, text
        for device in seen["devices"]:
            yield from _device_faults(device, needed_bytes)

    has_faults = _add_faults(findings, {node: of(node) for node in reports}, are_of_devices=True)
    frees = [
        _free(device) for report in reports.values() for device in report["devices"]["devices"]
    ]
    if frees and not has_faults:
        place = "here" if THIS_MACHINE in reports else f"on {len(reports)} nodes"
        known = [free for free in frees if free is not None]
        room = f", at least {describe_bytes(min(known))} free on each" if known else ""
        findings.add("devices", OK, f"{len(frees)} {place}, healthy, without other processes{room}")


def _device_faults(device: Mapping[str, Any], needed_bytes: int | None) -> Iterator[Fault]:
    label, health, free = device["label"], device["health"], _free(device)
    if health is None:
        yield "tool", WARN, f"{label}: health could not be read"
    elif health != "OK":
        yield "health", WARN if health.startswith("Warning") else FAIL, f"{label}: {health}"
    if free is None:
        yield "tool", WARN, f"{label}: memory could not be read"
    shortage = ""
    if free is not None and needed_bytes is not None and free + TOLERANCE_BYTES < needed_bytes:
        shortage = f"{label}: {describe_bytes(free)} free, {describe_bytes(needed_bytes)} needed"
    others = [process for process in device["processes"] if not process["is_of_ray"]]
    jobs = [process for process in device["processes"] if process["is_of_ray"]]
    if others:
        yield "process", FAIL if shortage else WARN, f"{label}: {_named(others)}"
    if jobs:
        yield "taken", WARN, f"{label}: {_named(jobs)}"
    if shortage and not jobs:
        yield "free", FAIL, shortage


def _free(device: Mapping[str, Any]) -> int | None:
    """Free memory of a device; None if the tool does not report it."""
    if device["total_bytes"] is None or device["used_bytes"] is None:
        return None
    return int(device["total_bytes"] - device["used_bytes"])


def _named(processes: Sequence[Mapping[str, Any]]) -> str:
    """Describe the largest processes."""
    shown, largest = [], sorted(processes, key=lambda process: -(process["num_bytes"] or 0))
    for each in largest[:SHOWN]:
        size, name = each["num_bytes"], each["name"] or "unnamed"
        used = "" if size is None else f" uses {describe_bytes(size)}"
        shown.append(f"process {each['pid']} ({name}){used}")
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
        found = (
            f"train.device_model={name} has {describe_bytes(planned)}, but the smallest device "
            f"found has {describe_bytes(smallest)}"
        )
        add(findings, "model", FAIL if smallest < planned else WARN, found, ())


def check_links(reports: Reports, findings: Findings) -> None:
    """Check the NPUs' network ports: up, healthy, with an address and equal TLS.

    A single node needs none.
    """
    down = FAIL if len(reports) > 1 else WARN

    def of(seen: Mapping[str, Any]) -> Iterator[Fault]:
        if reason := seen.get("links_unread"):
            yield "links_unread", WARN, f"could not be read: {reason}"
        for port in seen.get("links", ()):
            yield from _port_faults(port, down)

    seen = {node: report["devices"] for node, report in reports.items()}
    has_faults = _add_faults(findings, {node: of(each) for node, each in seen.items()}, True)
    ports = [(node, port) for node, each in seen.items() for port in each.get("links", ())]
    switches: dict[str, list[str]] = {}
    for node, port in ports:
        if port["tls"] is not None:
            switches.setdefault(port["tls"], []).append(f"{node} {port['label']}")
    if len(switches) > 1:
        usual, other = sorted(switches, key=lambda value: -len(switches[value]))
        named = ", ".join(switches[other][:SHOWN]) + _more(switches[other])
        text = f"TLS is {_TLS[other]}, but {_TLS[usual]} on {len(switches[usual])} other ports"
        add(findings, "tls", FAIL, text, (named,))
    elif ports and not has_faults:
        tls = _TLS.get(next(iter(switches), ""), "unknown")
        findings.add("links", OK, f"{len(ports)} ports up, TLS {tls} on all")


def _port_faults(port: Mapping[str, str | None], down: str) -> Iterator[Fault]:
    label = port["label"]
    if port["link"] is None:
        yield "links_unread", WARN, f"{label}: link could not be read"
    elif port["link"] != "UP":
        yield "link", down, f"{label}: link {port['link']}"
    if port["health"] not in (None, "Success"):
        yield "net_health", WARN, f"{label}: net_health {port['health']}"
    if port["address"] is None and port["link"] is not None:
        yield "port_address", WARN, f"{label}: no address"


def check_clocks(skews: Mapping[str, tuple[float, float]], findings: Findings) -> None:
    """Check the clocks, given the seconds that each node is ahead and the error of that number."""

    def of(skew: float, error: float) -> Iterator[Fault]:
        if abs(skew) - error > MAX_SKEW_SECONDS:
            side = "ahead of" if skew > 0 else "behind"
            yield "clock", WARN, f"{abs(skew):.0f} s {side} this machine"

    if not _add_faults(findings, {node: of(*reading) for node, reading in skews.items()}):
        largest = max(abs(skew) + error for skew, error in skews.values())
        findings.add("clock", OK, f"equal within {largest:.1f} s")


def check_limits(reports: Reports, is_accelerated: bool, findings: Findings) -> None:
    """Check the limits of processes, shared memory and unused huge pages."""

    def of(report: Report) -> Iterator[Fault]:
        files, locked = report["limits"]["open files"], report["limits"]["locked memory"]
        sizes = report["memory"]
        if files is not None and files < MIN_OPEN_FILES:
            yield "open_files", WARN, f"ulimit -n is {files}; {MIN_OPEN_FILES} is recommended"
        if is_accelerated and locked is not None and locked < MIN_LOCKED_BYTES:
            yield "locked_memory", WARN, f"ulimit -l is {locked / 1024:.0f} KiB"
        if sizes["shared"] < MIN_SHARED_BYTES:
            yield "shared_memory", WARN, f"/dev/shm has {describe_bytes(sizes['shared'])}"
        if (unused := sizes["unused_huge_pages"]) > MAX_UNUSED_SHARE * sizes["total"]:
            text = f"{describe_bytes(unused)} are reserved for unused huge pages"
            yield "huge_pages", WARN, text

    if not _add_faults(findings, {node: of(report) for node, report in reports.items()}):
        findings.add("limits", OK, "open files, locked memory, /dev/shm and huge pages")


def check_disks(reports: Reports, findings: Findings) -> None:
    """Check the free space for temporary files and for Ray's objects and logs on each node."""

    def of(report: Report) -> Iterator[Fault]:
        for path, sizes in report["disk"].items():
            free, full = sizes["free"], 1 - sizes["free"] / max(sizes["total"], 1)
            if free < MIN_FREE_BYTES or full > MAX_FULL_SHARE:
                text = f"{path} has {describe_bytes(free)} free and is {full:.0%} full"
                yield "full", FAIL if free < MIN_FREE_BYTES else WARN, text

    if not _add_faults(findings, {node: of(report) for node, report in reports.items()}):
        least = min(size["free"] for report in reports.values() for size in report["disk"].values())
        found = f"at least {describe_bytes(least)} free for temporary files and Ray"
        findings.add("node disk", OK, found)


def check_variables(reports: Reports, findings: Findings) -> None:
    """Check each node's environment for obsolete or harmful variables."""

    def of(report: Report) -> Iterator[Fault]:
        for name, status, fault in faults(Variable(**row) for row in report["environment"]):
            yield "variable", status, f"{name}: {fault}"

    _add_faults(findings, {node: of(report) for node, report in reports.items()})


def check_seen(differences: Mapping[str, Sequence[str]], findings: Findings) -> None:
    """Check that each node sees the same store, model and scorer as this machine."""
    found = {
        node: [("files", FAIL, f"does not see {', '.join(each)}")] if each else []
        for node, each in differences.items()
    }
    if not _add_faults(findings, found) and differences:
        same = f"store and model are the same on {len(differences) + 1} machines"
        findings.add("files", OK, same)


def check_connections(
    taken: Mapping[str, Sequence[str]],
    failures: Mapping[Pair, Sequence[str]],
    num_tried: int,
    findings: Findings,
) -> None:
    """Report port ranges without a free port, by node, and failed connections, by pair of nodes."""
    full = {
        node: [("range", WARN, f"no port of {name} is free") for name in names]
        for node, names in taken.items()
    }
    _add_faults(findings, full)
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
        slowest = f"{1000 * max(times):.0f} ms at most"
        found = f"over {backend} between {len(times)} pair(s) of nodes, {slowest}"
        findings.add("all-reduce", OK, found)
