"""Findings about nodes, from reports as nodes give them: what is equal is one line, what differs names who."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from dapo_core.cluster.every_node import Node
from dapo_core.memory.devices import GIB, Limit, usable_bytes
from dapo_core.ports import meeting_point
from dapo_core.versions import sets
from flows.config import load_config
from tasks.preflight import node_probe, nodes
from tasks.preflight.cluster import _Look, check_devices_here, rounds
from tasks.preflight.finding import FAIL, OK, WARN, Finding, Findings, describe
from tasks.preflight.memory import check_memory
from tasks.preflight.nodes import Pair
from tests.trainings import config_of

A, B, C = "n0 (10.0.0.1)", "n1 (10.0.0.2)", "n2 (10.0.0.3)"
VERSIONS = {"Python": "3.11.9", "code": "0c7241f00000", "torch": "2.10.0", "CANN": "9.1.0", "driver": "25.5.0"}


def device(number: int = 0, **changes: Any) -> dict[str, Any]:
    """An idle die of an Atlas A3."""
    idle = {"label": f"NPU {number}", "number": str(number), "model": "Ascend910", "health": "OK", "uuid": ""}
    return idle | {"used_bytes": 3 * GIB, "total_bytes": 64 * GIB, "processes": []} | changes


def process(num_bytes: int | None, is_of_ray: bool = False, pid: int = 7) -> dict[str, Any]:
    return {"pid": pid, "name": "python", "num_bytes": num_bytes, "is_of_ray": is_of_ray}


def port(number: int = 0, **changes: str | None) -> dict[str, str | None]:
    up = {"label": f"NPU {number}", "link": "UP", "health": "Success", "tls": "0", "address": "29.1.112.213"}
    return up | changes


def report(*devices: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """What a healthy node with two dies says."""
    found = {
        "tool": "npu-smi",
        "driver": "25.5.0",
        "devices": list(devices or (device(0), device(1))),
        "unread": [],
    }
    links = {"links": [port(0), port(1)], "links_unread": ""}
    return {
        "devices": found | links | changes.pop("found", {}),
        "limits": {"open files": 65536, "locked memory": None} | changes.pop("limits", {}),
        "memory": {"total": 1024 * GIB, "shared": 64 * GIB, "unused_huge_pages": 0} | changes.pop("memory", {}),
        "disk": {"/tmp": {"total": 100 * GIB, "free": changes.pop("free", 50 * GIB)}},
        "environment": changes.pop("environment", []),
    }


def devices_of(reports: Mapping[str, Any], needed: int | None = 50 * GIB, **promised: int) -> Findings:
    findings = Findings()
    nodes.check_devices(reports, needed, {A: promised.get("a", 2)}, findings)
    return findings


def only(findings: Findings) -> Finding:
    [finding] = findings
    return finding


def test_equal_versions_are_one_line_and_the_one_that_differs_is_named() -> None:
    findings = Findings()
    nodes.check_versions({A: VERSIONS, B: VERSIONS}, findings)
    found = only(findings)
    assert (found.status, found.where) == (OK, "")
    assert found.found == (
        "equal on 2 machines: Python 3.11.9, code 0c7241f00000, torch 2.10.0, CANN 9.1.0, driver 25.5.0"
    )
    findings = Findings()
    other = {**VERSIONS, "torch": "2.9.0", "driver": "24.1.0", "code": "dirty", "ray": "2.60.0"}
    nodes.check_versions({A: VERSIONS, B: VERSIONS, C: other}, findings)
    said = {finding.found: (finding.status, finding.where) for finding in findings}
    assert said == {
        f"code dirty, and 0c7241f00000 on {A}, {B}": (FAIL, C),
        f"torch 2.9.0, and 2.10.0 on {A}, {B}": (FAIL, C),
        f"driver 24.1.0, and 25.5.0 on {A}, {B}": (WARN, C),
        f"ray 2.60.0, and none on {A}, {B}": (FAIL, C),
    }
    findings = Findings()
    nodes.check_versions({A: VERSIONS, B: VERSIONS, nodes.THIS_MACHINE: {"Python": "3.11.9"}}, findings)
    assert [(each.found, each.where) for each in findings] == [
        (f"code none, and 0c7241f00000 on {A}, {B}", nodes.THIS_MACHINE)
    ]


def test_versions_are_mended_by_a_file_of_requirements() -> None:
    findings = Findings()
    nodes.check_versions({A: VERSIONS, B: {**VERSIONS, "torch": "2.9.0"}}, findings)
    assert all("requirements/" in finding.advice for finding in findings if "torch" in finding.found)


def test_packages_of_no_known_set_and_another_cann_are_said() -> None:
    known = dict(sets()["npu-newest"].packages)
    here = {"torch": "2.13.0"}

    def found(packages: dict[str, str], toolkit: str) -> list[tuple[str, str]]:
        findings = Findings()
        node = {"stack": packages, "versions": {"CANN": toolkit}}
        nodes.check_sets({A: node, B: {**node, "versions": {"CANN": "9.1.0"}}}, here, findings)
        return [(each.where, each.found) for each in findings]

    assert found(known, "9.1.0") == []
    assert found(here, "8.5.1") == []  # what is said of this machine
    assert found(known, "8.5.1") == [(A, "CANN 8.5.1, and the set npu-newest is made with 9.1.0")]
    [(where, text)] = found({**known, "vllm": "0.22.0"}, "9.1.0")
    assert where == "all 2 nodes"
    assert text.endswith("npu-newest: vllm 0.22.0 in place of 0.23.0")


def test_healthy_devices_are_one_line_with_what_is_free() -> None:
    found = only(devices_of({A: report(), B: report()}))
    assert (found.status, found.found) == (
        OK, "4 on 2 nodes, healthy, without other processes, at least 61.0 GiB free on each",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "status", "said"),
    [
        (device(health="Alarm"), FAIL, "NPU 0: Alarm"),
        (device(health="Warning"), WARN, "NPU 0: Warning"),
        (device(health=None), WARN, "NPU 0: its health could not be read"),
        (device(total_bytes=None), WARN, "NPU 0: its memory could not be read"),
        (device(processes=[process(GIB)]), WARN, "NPU 0: process 7 (python) holds 1.0 GiB"),
        (device(processes=[process(None)]), WARN, "NPU 0: process 7 (python)"),
        (device(used_bytes=20 * GIB, processes=[process(17 * GIB, is_of_ray=True)]), WARN, "holds 17.0 GiB"),
        (device(used_bytes=20 * GIB), FAIL, "NPU 0: 44.0 GiB are free, and 50.0 GiB are needed"),
    ],
)
def test_a_device_that_a_rank_cannot_have_is_named_with_its_node(
    changed: dict[str, Any], status: str, said: str
) -> None:
    found = only(devices_of({A: report(changed, device(1)), B: report()}))
    assert (found.status, found.where) == (status, A)
    assert said in found.found
    assert found.why
    assert found.advice
    assert describe([found])[0].startswith(f"{found.check}: {A}: {found.found}; {found.why}; ")


def test_a_process_that_takes_the_needed_memory_ends_the_run_and_the_largest_are_shown() -> None:
    several = [process(number * GIB, pid=number) for number in range(1, 7)]
    process_found, memory = devices_of({A: report(device(used_bytes=24 * GIB, processes=several), device(1))})
    assert (process_found.status, memory.status) == (FAIL, FAIL)
    assert process_found.found.startswith("NPU 0: process 6 (python) holds 6.0 GiB, process 5 ")
    assert process_found.found.endswith("; and 2 more")
    sick = report(*(device(number, health="Alarm") for number in range(6)))
    found = only(devices_of({A: sick}))
    assert found.found == "NPU 0: Alarm; NPU 1: Alarm; NPU 2: Alarm; NPU 3: Alarm; and 2 more"


def test_tools_that_say_nothing_and_devices_that_ray_invents_are_named() -> None:
    silent = report(found={"devices": [], "unread": ["npu-smi is not installed here"]})
    found = only(devices_of({A: silent}))
    assert (found.status, found.found) == (WARN, "could not be read: npu-smi is not installed here")
    found = only(devices_of({A: report(), B: report()}, a=16))
    assert (found.status, found.found) == (FAIL, "Ray has 16 devices there, and npu-smi shows 2")


def test_the_plan_is_made_for_the_smallest_device() -> None:
    reports = {A: report(), B: report(device(total_bytes=32 * GIB))}
    assert nodes.smallest_device(reports, "npu") == usable_bytes("npu", 32 * GIB)
    assert nodes.smallest_device({A: report(device(total_bytes=None))}, "npu") is None
    findings = Findings()
    nodes.check_device_model("Atlas 800T A3", usable_bytes("npu", 64 * GIB), findings)
    assert findings == []
    nodes.check_device_model("Atlas 800T A3", usable_bytes("npu", 32 * GIB), findings)
    assert only(findings).found == "train.device_model=Atlas 800T A3 has 61.3 GiB, and a device there 29.0 GiB"


@pytest.mark.slow
def test_the_memory_plan_is_made_for_the_devices_that_are_there() -> None:
    path = "configs/dapo_qwen3_32b_math.yaml"
    small = Limit("the cluster's smallest device", 12 * GIB)

    def planned(*overrides: str) -> Finding:
        findings = Findings()
        check_memory(load_config(Path(path), overrides), None, findings, small)
        return only(findings)

    found = planned("train.device_model=null")
    assert found.status == FAIL
    assert "but has 12.0" in found.found
    assert planned().status == OK  # as the recipe names its device


def links_of(*ports: list[dict[str, str | None]]) -> Findings:
    findings = Findings()
    reports = {name: report(found={"links": each}) for name, each in zip((A, B, C), ports, strict=False)}
    nodes.check_links(reports, findings)
    return findings


def test_ports_that_are_up_are_one_line() -> None:
    assert only(links_of([port(0), port(1)], [port(0)])).found == "3 ports up, TLS off on all"


@pytest.mark.parametrize(
    ("changed", "status", "said"),
    [
        (port(link="DOWN"), FAIL, "NPU 0: link DOWN"),
        (port(link=None), WARN, "NPU 0: its link could not be read"),
        (port(health="Fault"), WARN, "NPU 0: net_health Fault"),
        (port(address=None), WARN, "NPU 0: no address"),
        (port(tls="1"), FAIL, "TLS is on there, and off on 2 other ports"),
    ],
)
def test_a_port_that_hccl_cannot_use_is_named(changed: dict[str, str | None], status: str, said: str) -> None:
    found = only(links_of([port(0), port(1)], [changed]))
    assert (found.status, found.found) == (status, said)
    assert found.where.startswith(B)


def test_a_single_node_does_without_its_ports_and_a_missing_tool_is_said() -> None:
    assert only(links_of([port(link="DOWN")])).status == WARN
    findings = Findings()
    missing = {"links": [], "links_unread": "hccn_tool is not installed here"}
    nodes.check_links({A: report(found=missing), B: report(found=missing)}, findings)
    assert only(findings).where == "all 2 nodes"


def test_a_clock_that_is_wrong_is_named_and_a_slow_answer_is_not() -> None:
    findings = Findings()
    nodes.check_clocks({A: (-90.2, 0.01), B: (3.0, 2.5)}, findings)
    assert (only(findings).where, only(findings).found) == (A, "90 s behind this machine")
    findings = Findings()
    nodes.check_clocks({A: (0.01, 0.002), B: (-0.2, 0.01)}, findings)
    assert only(findings).found == "equal within 0.2 s"


class _Nodes(_Look):
    """Two nodes whose clocks are read by a function."""

    def __init__(self, read: Callable[[], float]) -> None:
        super().__init__(config_of(), None, Findings())
        self.probes = {Node(name, name, "", {}, {}): None for name in (A, B)}
        self.read = read

    def _ask(self, method: str, *arguments: Any, **options: Any) -> dict[Node, Any]:
        return {node: self.read() for node in options["of"]}


def test_the_clocks_of_nodes_are_read_side_by_side() -> None:
    both_are_asked = threading.Barrier(2, timeout=60)
    nodes = _Nodes(lambda: time.time() + 90.0 + 0.0 * both_are_asked.wait())
    nodes._check_clocks()
    assert only(nodes.findings).found == "90 s ahead of this machine"


def test_of_a_few_readings_of_a_clock_the_shortest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that took 6 s, 0.2 s and 4 s, of a clock that is 3 s ahead: only the second shows it."""
    own = iter((0.0, 6.0, 10.0, 10.2, 20.0, 24.0))
    monkeypatch.setattr("tasks.preflight.cluster.time", SimpleNamespace(time=lambda: next(own)))
    theirs = iter((3.0, 13.1, 27.0))
    nodes = _Nodes(lambda: next(theirs))
    assert nodes._skew_of(next(iter(nodes.probes))) == pytest.approx((3.0, 0.1))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"limits": {"open files": 1024}}, "ulimit -n is 1024, and 32768 are advised"),
        ({"limits": {"locked memory": 65536}}, "ulimit -l is 64 KiB"),
        ({"memory": {"shared": 64 * 1024**2}}, "/dev/shm has 64.0 MiB"),
        ({"memory": {"unused_huge_pages": 512 * GIB}}, "512.0 GiB are in huge pages that nothing uses"),
    ],
)
def test_limits_that_trainings_meet_are_named(changes: dict[str, Any], said: str) -> None:
    findings = Findings()
    nodes.check_limits({A: report(), B: report(**changes)}, True, findings)
    assert (only(findings).status, only(findings).where, only(findings).found) == (WARN, B, said)
    findings = Findings()
    nodes.check_limits({A: report(**changes), B: report(**changes)}, True, findings)
    assert only(findings).where == "all 2 nodes"


@pytest.mark.parametrize(("free", "status"), [(50 * GIB, OK), (4 * GIB, WARN), (GIB // 2, FAIL)])
def test_a_disk_on_which_ray_stops_is_named(free: int, status: str) -> None:
    findings = Findings()
    nodes.check_disks({A: report(), B: report(free=free)}, findings)
    assert only(findings).status == status


def test_variables_of_one_node_are_said_with_it() -> None:
    row = {"name": "GLOO_SOCKET_IFNAME", "value": "eth7", "effect": "", "advice": "no interface eth7"}
    variables = [{**row, "state": "caution"}, {**row, "name": "OMP_NUM_THREADS", "state": "set"}]
    findings = Findings()
    nodes.check_variables({A: report(), B: report(environment=variables)}, findings)
    found = only(findings)
    assert (found.where, found.found) == (B, "GLOO_SOCKET_IFNAME=eth7: no interface eth7")


def test_files_connections_and_reductions_name_nodes_and_pairs() -> None:
    findings = Findings()
    nodes.check_seen({B: ["model folder /models/q (different content)"], C: []}, findings)
    nodes.check_reached(
        {A: ["HCCL_HOST_SOCKET_PORT_RANGE=60000-60050"], B: []}, {Pair(A, B): ["blocked"]}, 2, findings
    )
    nodes.check_reduced({Pair(A, B): "timed out", Pair(B, C): 0.002, Pair(C, A): ""}, "hccl", findings)
    said = [(finding.check, finding.status, finding.where, finding.found) for finding in findings]
    assert said == [
        ("files", FAIL, B, "does not see model folder /models/q (different content)"),
        ("network", WARN, A, "no port of HCCL_HOST_SOCKET_PORT_RANGE=60000-60050 is free"),
        ("network", FAIL, f"from {A} to {B}", "blocked"),
        ("all-reduce", FAIL, f"between {A} and {B}", "no all-reduce over hccl: timed out"),
        ("all-reduce", WARN, f"between {C} and {A}", "not tried"),
    ]
    findings = Findings()
    nodes.check_reduced({Pair(A, B): 0.002, Pair(B, C): 0.003}, "gloo", findings)
    assert only(findings).found == "over gloo between 2 pair(s) of nodes, 3 ms at most"


@pytest.mark.parametrize("number", range(1, 9))
def test_neighbours_meet_in_rounds_in_which_no_node_is_twice(number: int) -> None:
    found = rounds(range(number))
    for one in found:
        members = [node for pair in one for node in pair]
        assert len(set(members)) == len(members)
    pairs = [frozenset(pair) for one in found for pair in one]
    ring = {frozenset((node, (node + 1) % number)) for node in range(number)} if number > 1 else set()
    assert (set(pairs), len(pairs)) == (ring, len(ring))


def test_each_row_of_the_table_says_what_comes_of_it_and_what_mends_it() -> None:
    rows = yaml.safe_load(nodes.TABLE.read_text())
    used = set(
        re.findall(r'(?:\(|, )"(\w+)", (?:FAIL|WARN|status|down)', nodes.TABLE.with_suffix(".py").read_text())
    )
    used |= {"version", "code", "driver", "answer", "model", "full", "health", "process", "free"}
    assert rows.keys() == used
    for row in rows.values():
        assert row.keys() == {"check", "why", "mend"}
        assert row["mend"]


def test_devices_of_this_machine_are_looked_at_without_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = report(device(health="Alarm"), device(1))["devices"]
    monkeypatch.setattr("tasks.preflight.node_probe.devices_here", lambda kind, environment: seen)
    findings = Findings()
    check_devices_here(config_of(train={"device": "npu"}), None, findings)
    assert [(each.status, each.where, each.found) for each in findings if each.check == "devices"] == [
        (FAIL, "this machine", "NPU 0: Alarm")
    ]


def test_meeting_points_of_both_families() -> None:
    assert re.fullmatch(r"tcp://\[::1\]:\d+", meeting_point("::1"))
    assert re.fullmatch(r"tcp://127\.0\.0\.1:\d+", meeting_point("127.0.0.1"))


def test_a_target_that_is_silent_once_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([TimeoutError(), ""])

    def once(host: str, port: int, word: str) -> str:
        answer = next(answers)
        if isinstance(answer, TimeoutError):
            raise answer
        return answer

    monkeypatch.setattr(node_probe, "_reach_once", once)
    assert node_probe.NodeProbe().reach([("10.0.0.1", 1, "word")]) == [""]
