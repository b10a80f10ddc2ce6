"""Findings about nodes: what is equal is one finding, differences name the node."""

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from dapo_core.cluster.every_node import Node
from dapo_core.machine.versions import sets
from dapo_core.memory.devices import GIB, Limit, usable_bytes
from flows.config import load_config
from tasks.preflight import node_probe, nodes
from tasks.preflight.cluster import _NodeChecks, check_devices_here, rounds
from tasks.preflight.finding import FAIL, OK, WARN, Finding, Findings, describe
from tasks.preflight.memory import check_memory
from tests.trainings import config_of

A, B, C = "n0 (10.0.0.1)", "n1 (10.0.0.2)", "n2 (10.0.0.3)"
VERSIONS = {"Python": "3.11.9", "code": "0c724", "torch": "2.10.0", "driver": "25.5.0"}


def device(number: int = 0, **changes: Any) -> dict[str, Any]:
    """An idle die of an Atlas A3."""
    idle = {"label": f"NPU {number}", "number": str(number), "health": "OK", "processes": []}
    return idle | {"used_bytes": 3 * GIB, "total_bytes": 64 * GIB} | changes


def process(num_bytes: int | None, is_of_ray: bool = False, pid: int = 7) -> dict[str, Any]:
    return {"pid": pid, "name": "python", "num_bytes": num_bytes, "is_of_ray": is_of_ray}


def port(number: int = 0, **changes: str | None) -> dict[str, str | None]:
    up = {"link": "UP", "health": "Success", "tls": "0", "address": "29.1.112.213"}
    return {"label": f"NPU {number}", **up, **changes}


def report(*devices: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The report of a healthy node with two dies."""
    several = list(devices or (device(0), device(1)))
    found = {"tool": "npu-smi", "driver": "25.5.0", "devices": several, "unread": []}
    links = {"links": [port(0), port(1)], "links_unread": ""}
    limits = {"open files": 65536, "locked memory": None}
    memory = {"total": 1024 * GIB, "shared": 64 * GIB, "unused_huge_pages": 0}
    return {
        "devices": found | links | changes.get("found", {}),
        "limits": limits | changes.get("limits", {}),
        "memory": memory | changes.get("memory", {}),
        "disk": {"/tmp": {"total": 100 * GIB, "free": changes.get("free", 50 * GIB)}},
        "environment": changes.get("environment", []),
    }


def of(check: Callable[..., None], *arguments: Any) -> Findings:
    """The findings of one check."""
    check(*arguments, findings := Findings())
    return findings


def only(findings: Findings) -> Finding:
    [finding] = findings
    return finding


def devices_of(reports: Mapping[str, Any], promised: int = 2) -> Findings:
    return of(nodes.check_devices, reports, 50 * GIB, {A: promised})


def test_equal_versions_are_one_finding_and_a_node_that_differs_is_named() -> None:
    found = only(of(nodes.check_versions, {A: VERSIONS, B: VERSIONS}))
    assert (found.status, found.where) == (OK, "")
    assert found.found.startswith("equal on 2 machines: Python 3.11.9, code 0c724, torch 2.10.0")
    other = {**VERSIONS, "torch": "2.9.0", "driver": "24.1.0", "code": "dirty", "ray": "2.60.0"}
    findings = of(nodes.check_versions, {A: VERSIONS, B: VERSIONS, C: other})
    assert {finding.found: (finding.status, finding.where) for finding in findings} == {
        f"code dirty, but 0c724 on {A}, {B}": (FAIL, C),
        f"torch 2.9.0, but 2.10.0 on {A}, {B}": (FAIL, C),
        f"driver 24.1.0, but 25.5.0 on {A}, {B}": (WARN, C),
        f"ray 2.60.0, but none on {A}, {B}": (FAIL, C),
    }
    trainer = {A: VERSIONS, B: VERSIONS, nodes.THIS_MACHINE: {"Python": "3.11.9"}}
    here = only(of(nodes.check_versions, trainer))
    assert (here.where, here.found) == (nodes.THIS_MACHINE, f"code none, but 0c724 on {A}, {B}")


def test_packages_of_no_known_set_and_another_cann_are_reported() -> None:
    known = dict(sets()["npu-newest"].packages)
    here = {"torch": "2.13.0"}

    def found(
        packages: dict[str, str], toolkit: str, driver: str = "26.0.rc1"
    ) -> list[tuple[str, str]]:
        node = {"stack": packages, "versions": {"CANN": toolkit, "driver": driver}}
        findings = of(nodes.check_sets, {A: node, B: {**node, "versions": {"CANN": "9.1.0"}}}, here)
        return [(each.where, each.found) for each in findings]

    assert found(known, "9.1.0") == []
    assert found(here, "8.5.1") == []  # already reported for this machine
    assert found(known, "8.5.1") == [(A, "CANN 8.5.1, but the set npu-newest is built with 9.1.0")]
    text = "driver 25.2.0, but the set npu-newest needs HDK 26.0.RC1"
    assert found(known, "9.1.0", "25.2.0") == [(A, text)]
    [(where, text)] = found({**known, "vllm": "0.22.0"}, "9.1.0")
    assert where == "all 2 nodes"
    assert text.endswith("npu-newest: vllm 0.22.0 in place of 0.23.0")


def test_healthy_devices_and_ports_are_one_finding() -> None:
    found = only(devices_of({A: report(), B: report()}))
    assert found.status == OK
    assert "4 on 2 nodes, healthy" in found.found
    assert "at least 61.0 GiB free on each" in found.found
    assert only(links_of([port(0), port(1)], [port(0)])).found == "3 ports up, TLS off on all"


@pytest.mark.parametrize(
    ("changed", "status", "said"),
    [
        (device(health="Alarm"), FAIL, "NPU 0: Alarm"),
        (device(health="Warning"), WARN, "NPU 0: Warning"),
        (device(health=None), WARN, "NPU 0: health could not be read"),
        (device(total_bytes=None), WARN, "NPU 0: memory could not be read"),
        (device(processes=[process(GIB)]), WARN, "NPU 0: process 7 (python) uses 1.0 GiB"),
        (device(processes=[process(None)]), WARN, "NPU 0: process 7 (python)"),
        (device(used_bytes=20 * GIB, processes=[process(GIB, True)]), WARN, "uses 1.0 GiB"),
        (device(used_bytes=20 * GIB), FAIL, "NPU 0: 44.0 GiB free, 50.0 GiB needed"),
    ],
)
def test_a_device_that_a_rank_cannot_use_is_named_with_its_node(
    changed: dict[str, Any], status: str, said: str
) -> None:
    found = only(devices_of({A: report(changed, device(1)), B: report()}))
    assert (found.status, found.where) == (status, A)
    assert said in found.found
    assert found.why
    assert found.advice
    assert describe([found])[0].startswith(f"{found.check}: {A}: {found.found}; {found.why}; ")


def test_a_process_that_holds_needed_memory_ends_the_run_and_the_largest_are_shown() -> None:
    several = [process(number * GIB, pid=number) for number in range(1, 7)]
    held = device(used_bytes=24 * GIB, processes=several)
    users, memory = devices_of({A: report(held, device(1))})
    assert (users.status, memory.status) == (FAIL, FAIL)
    assert users.found.startswith("NPU 0: process 6 (python) uses 6.0 GiB, process 5 ")
    assert users.found.endswith("; and 2 more")
    sick = report(*(device(number, health="Alarm") for number in range(6)))
    found = only(devices_of({A: sick}))
    assert found.found == "NPU 0: Alarm; NPU 1: Alarm; NPU 2: Alarm; NPU 3: Alarm; and 2 more"


def test_a_missing_tool_and_devices_that_ray_only_claims_are_reported() -> None:
    silent = report(found={"devices": [], "unread": ["npu-smi is not installed here"]})
    found = only(devices_of({A: silent}))
    assert (found.status, found.found) == (WARN, "could not be read: npu-smi is not installed here")
    found = only(devices_of({A: report(), B: report()}, promised=16))
    assert found.status == FAIL
    assert found.found == "Ray was started with 16 devices, but npu-smi shows 2"


def test_the_plan_is_made_for_the_smallest_device() -> None:
    reports = {A: report(), B: report(device(total_bytes=32 * GIB))}
    assert nodes.smallest_device(reports, "npu") == usable_bytes("npu", 32 * GIB)
    assert nodes.smallest_device({A: report(device(total_bytes=None))}, "npu") is None
    assert of(nodes.check_device_model, "Atlas 800T A3", usable_bytes("npu", 64 * GIB)) == []
    found = only(of(nodes.check_device_model, "Atlas 800T A3", usable_bytes("npu", 32 * GIB)))
    assert "has 61.3 GiB, but the smallest device found has 29.0 GiB" in found.found


@pytest.mark.slow
def test_the_memory_plan_is_made_for_the_devices_found() -> None:
    path = "configs/dapo_qwen3_32b_math.yaml"
    small = Limit("the cluster's smallest device", 12 * GIB)

    def planned(*overrides: str) -> Finding:
        check_memory(load_config(Path(path), overrides), None, findings := Findings(), small)
        return findings[-1]

    found = planned("train.device_model=null")
    assert found.status == FAIL
    assert "but has 12.0" in found.found
    assert planned().status == OK  # as the recipe names its device


def test_a_server_that_cannot_hold_the_model_is_refused_with_the_key_that_splits_it() -> None:
    def checked(*overrides: str) -> Finding:
        config = load_config(Path("configs/dapo_qwen3_32b_math.yaml"), overrides)
        check_memory(config, None, findings := Findings())
        return findings[0]

    found = checked("serve.tensor_parallel=1")  # 65.5 GB in bfloat16
    assert found.status == FAIL
    assert "serve.tensor_parallel=1 puts 61.0 GiB of weights on a device" in found.found
    assert "set serve.tensor_parallel=2" in found.advice
    assert (
        checked("serve.tensor_parallel=1", "serve.extra_args=[--quantization=fp8]").status == WARN
    )
    assert "train.device_model" in checked("train.device_model=null").advice  # not known here


def links_of(*ports: list[dict[str, str | None]]) -> Findings:
    pairs = zip((A, B, C), ports, strict=False)
    return of(nodes.check_links, {name: report(found={"links": each}) for name, each in pairs})


@pytest.mark.parametrize(
    ("changed", "status", "said"),
    [
        (port(link="DOWN"), FAIL, "NPU 0: link DOWN"),
        (port(link=None), WARN, "NPU 0: link could not be read"),
        (port(health="Fault"), WARN, "NPU 0: net_health Fault"),
        (port(address=None), WARN, "NPU 0: no address"),
        (port(tls="1"), FAIL, "TLS is on, but off on 2 other ports"),
    ],
)
def test_a_port_that_hccl_cannot_use_is_named(
    changed: dict[str, str | None], status: str, said: str
) -> None:
    found = only(links_of([port(0), port(1)], [changed]))
    assert (found.status, found.found) == (status, said)
    assert found.where.startswith(B)


def test_a_single_node_needs_no_ports_and_a_missing_tool_is_reported() -> None:
    assert only(links_of([port(link="DOWN")])).status == WARN
    missing = report(found={"links": [], "links_unread": "hccn_tool is not installed here"})
    assert only(of(nodes.check_links, {A: missing, B: missing})).where == "all 2 nodes"


def test_a_wrong_clock_is_named_but_not_a_slow_answer() -> None:
    wrong = only(of(nodes.check_clocks, {A: (-90.2, 0.01), B: (3.0, 2.5)}))
    assert (wrong.where, wrong.found) == (A, "90 s behind this machine")
    equal = only(of(nodes.check_clocks, {A: (0.01, 0.002), B: (-0.2, 0.01)}))
    assert equal.found == "equal within 0.2 s"


class _Nodes(_NodeChecks):
    """Two nodes whose clocks are read by a function."""

    def __init__(self, read: Callable[[], float]) -> None:
        super().__init__(config_of(), None, Findings())
        self.probes = {Node(name, name, "", {}, {}): None for name in (A, B)}
        self.read = read

    def _ask(self, method: str, *arguments: Any, **options: Any) -> dict[Node, Any]:
        return {node: self.read() for node in options["of"]}


def test_the_clocks_of_all_nodes_are_read_in_parallel() -> None:
    both_asked = threading.Barrier(2, timeout=60)
    nodes = _Nodes(lambda: time.time() + 90.0 + 0.0 * both_asked.wait())
    nodes._check_clocks()
    assert only(nodes.findings).found == "90 s ahead of this machine"


def test_the_shortest_reading_of_a_clock_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers took 6 s, 0.2 s and 4 s; the clock is 3 s ahead, which only the second shows."""
    own = iter((0.0, 6.0, 10.0, 10.2, 20.0, 24.0))
    monkeypatch.setattr("tasks.preflight.cluster.time", SimpleNamespace(time=lambda: next(own)))
    theirs = iter((3.0, 13.1, 27.0))
    nodes = _Nodes(lambda: next(theirs))
    assert nodes._skew_of(next(iter(nodes.probes))) == pytest.approx((3.0, 0.1))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"limits": {"open files": 1024}}, "ulimit -n is 1024; 32768 is recommended"),
        ({"limits": {"locked memory": 65536}}, "ulimit -l is 64 KiB"),
        ({"memory": {"shared": 64 * 1024**2}}, "/dev/shm has 64.0 MiB"),
        ({"memory": {"unused_huge_pages": 512 * GIB}}, "512.0 GiB are reserved for unused"),
    ],
)
def test_a_low_limit_is_named_with_its_nodes(changes: dict[str, Any], said: str) -> None:
    found = only(of(nodes.check_limits, {A: report(), B: report(**changes)}, True))
    assert (found.status, found.where) == (WARN, B)
    assert said in found.found
    both = {A: report(**changes), B: report(**changes)}
    assert only(of(nodes.check_limits, both, True)).where == "all 2 nodes"


@pytest.mark.parametrize(("free", "status"), [(50 * GIB, OK), (4 * GIB, WARN), (GIB // 2, FAIL)])
def test_a_full_disk_is_found(free: int, status: str) -> None:
    assert only(of(nodes.check_disks, {A: report(), B: report(free=free)})).status == status


def test_a_harmful_variable_is_reported_with_its_node() -> None:
    row = {"name": "GLOO_SOCKET_IFNAME", "value": "eth7", "effect": "", "advice": "no such one"}
    variables = [{**row, "state": "caution"}, {**row, "name": "OMP_NUM_THREADS", "state": "set"}]
    found = only(of(nodes.check_variables, {A: report(), B: report(environment=variables)}))
    assert (found.where, found.found) == (B, "GLOO_SOCKET_IFNAME=eth7: no such one")


def test_files_connections_and_all_reduces_name_nodes_and_pairs() -> None:
    taken = {A: ["HCCL_HOST_SOCKET_PORT_RANGE=60000-60050"], B: []}
    findings = [
        *of(nodes.check_seen, {B: ["model folder /models/q (different content)"], C: []}),
        *of(nodes.check_connections, taken, {(A, B): ["blocked"]}, 2),
        *of(nodes.check_all_reduce, {(A, B): "timed out", (B, C): 0.002, (C, A): ""}, "hccl"),
    ]
    assert [(each.check, each.status, each.where, each.found) for each in findings] == [
        ("files", FAIL, B, "does not see model folder /models/q (different content)"),
        ("network", WARN, A, "no port of HCCL_HOST_SOCKET_PORT_RANGE=60000-60050 is free"),
        ("network", FAIL, f"from {A} to {B}", "blocked"),
        ("all-reduce", FAIL, f"between {A} and {B}", "all-reduce over hccl failed: timed out"),
        ("all-reduce", WARN, f"between {C} and {A}", "not tried"),
    ]
    found = only(of(nodes.check_all_reduce, {(A, B): 0.002, (B, C): 0.003}, "gloo"))
    assert found.found == "over gloo between 2 pair(s) of nodes, 3 ms at most"


@pytest.mark.parametrize("number", range(1, 9))
def test_no_node_is_in_two_pairs_of_a_round(number: int) -> None:
    found = rounds(range(number))
    for one in found:
        members = [node for pair in one for node in pair]
        assert len(set(members)) == len(members)
    pairs = [frozenset(pair) for one in found for pair in one]
    ring = {frozenset((node, (node + 1) % number)) for node in range(number) if number > 1}
    assert (set(pairs), len(pairs)) == (ring, len(ring))


def test_each_row_of_the_table_has_a_consequence_and_a_fix() -> None:
    sources = "".join(path.read_text() for path in nodes.TABLE.parent.glob("*.py"))
    for name, row in yaml.safe_load(nodes.TABLE.read_text()).items():
        assert f'"{name}"' in sources
        assert row.keys() == {"check", "consequence", "fix"}
        assert row["fix"]


def test_devices_of_this_machine_are_checked_without_a_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = report(device(health="Alarm"), device(1))["devices"]
    monkeypatch.setattr("tasks.preflight.node_probe.devices_here", lambda kind, environment: seen)
    little = {"total": 1 << 40, "shared": 64 << 20, "unused_huge_pages": 0}  # as docker run does
    monkeypatch.setattr("tasks.preflight.node_probe.memory", lambda: little)
    findings = of(check_devices_here, config_of(train={"device": "npu"}), None)
    found = [(each.status, each.where, each.found) for each in findings]
    assert (FAIL, "this machine", "NPU 0: Alarm") in found
    assert (WARN, "this machine", "/dev/shm has 64.0 MiB") in found


def test_a_connection_is_retried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([TimeoutError(), ""])

    def once(host: str, port: int, greeting: str) -> str:
        answer = next(answers)
        if isinstance(answer, TimeoutError):
            raise answer
        return answer

    monkeypatch.setattr(node_probe, "_reach_once", once)
    assert node_probe.NodeProbe().reach([("10.0.0.1", 1, "greeting")]) == [""]
