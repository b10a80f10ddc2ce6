"""`dapo doctor env`: what environment variables do to a recipe."""

from __future__ import annotations

import json
import re
import socket
import struct
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml
from typer.testing import CliRunner

from flows.cli import app
from tasks.preflight.environment import STATUSES, TABLE, Variable, check_environment, exports, lint
from tasks.preflight.finding import FAIL, Findings
from tests.trainings import config_of

RECIPE = "configs/dapo_qwen3_32b_math.yaml"  # NPUs of four nodes, colocated
Address = namedtuple("Address", "family address")


def _npu(ray_address: str | None = None, **changes: Any) -> Any:
    return config_of(train={"device": "npu", "ray_address": ray_address, **changes.pop("train", {})}, **changes)


def _found(name: str, environment: dict[str, str], config: Any) -> Variable:
    [variable] = [each for each in lint(environment, config) if each.name == name]
    return variable


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with a wire, a decoy of containers, a link-local address, and a wire that is down."""
    addresses = {
        "lo": "127.0.0.1", "docker0": "172.17.0.1", "usb0": "169.254.3.4",
        "enp1s0": "10.0.0.5", "enp2s0": "10.1.0.5",
    }  # fmt: skip
    monkeypatch.setattr(
        psutil,
        "net_if_addrs",
        lambda: {name: [Address(socket.AF_INET, address)] for name, address in addresses.items()},
    )
    monkeypatch.setattr(
        psutil, "net_if_stats", lambda: {name: SimpleNamespace(isup=name != "enp2s0") for name in addresses}
    )


@pytest.mark.parametrize(
    ("name", "value", "state", "said"),
    [
        ("HCCL_SOCKET_IFNAME", "SOCKET IFNAME FOR CURRENT NODE", "placeholder", "put the real value there"),
        ("GLOO_SOCKET_IFNAME", "Your SOCKET IFNAME", "placeholder", "put the real value there"),
        ("HCCL_IF_IP", "<IP>", "placeholder", "put the real value there"),
        ("HCCL_IF_IP", "YOUR_IP", "placeholder", "put the real value there"),
        ("HCCL_CONNECT_TIMEOUT", "5400", "set", ""),
        ("HCCL_CONNECT_TIMEOUT", "5400s", "conflict", "120 to 7200"),
        ("HCCL_CONNECT_TIMEOUT", "5", "conflict", "120 to 7200"),
        ("HCCL_HOST_SOCKET_PORT_RANGE", "60000-60050", "set", ""),
        ("HCCL_HOST_SOCKET_PORT_RANGE", "", "conflict", "ports such as 60000-60050"),
        ("GLOO_SOCKET_IFNAME", "eth7", "conflict", "no interface eth7; it has docker0, enp1s0"),
        ("GLOO_SOCKET_IFNAME", "enp2s0", "conflict", "enp2s0 is down"),
        ("HCCL_SOCKET_IFNAME", "=enp1s0", "set", ""),
        ("HCCL_SOCKET_IFNAME", "enp", "set", ""),
        ("VLLM_USE_V1", "1", "dead", "does not read it from 0.17 on"),
        ("USE_OPTIMIZED_MODEL", "0", "dead", "vllm-ascend is not installed here"),
        ("VLLM_ASCEND_ENABLE_NZ", "1", "conflict", "NZ layout"),
        ("VLLM_ASCEND_ENABLE_NZ", "0", "set", ""),
        ("TASK_QUEUE_ENABLE", "2", "caution", "enforce_eager"),
        ("ASCEND_LAUNCH_BLOCKING", "1", "conflict", "graphs cannot be captured"),
        ("ASCEND_RT_VISIBLE_DEVICES", "1,0", "conflict", "ascending"),
        ("LD_PRELOAD", "/nowhere/libjemalloc.so.2", "caution", "does not exist"),
        ("LD_PRELOAD", "libjemalloc.so.2", "set", ""),
        ("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True", "set", ""),
    ],
)
@pytest.mark.usefixtures("interfaces")
def test_a_value_is_named_with_what_it_does_here(name: str, value: str, state: str, said: str) -> None:
    found = _found(name, {name: value}, _npu())
    assert (found.state, found.value) == (state, value)
    assert said in found.advice
    assert found.effect


def test_what_is_in_the_way_depends_on_the_recipe() -> None:
    shared = _npu(train={"placement": "colocated", "num_ranks": 1}, rollout={"num_workers": 1})
    expandable = {"PYTORCH_NPU_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}
    assert _found("PYTORCH_NPU_ALLOC_CONF", expandable, shared).state == "conflict"
    assert _found("HCCL_NPU_SOCKET_PORT_RANGE", {}, shared).state == "ours"
    eager = _npu(rollout={"engine": "vllm", "engine_args": {"enforce_eager": True}})
    assert _found("TASK_QUEUE_ENABLE", {"TASK_QUEUE_ENABLE": "2"}, eager).state == "set"
    assert _found("ASCEND_LAUNCH_BLOCKING", {"ASCEND_LAUNCH_BLOCKING": "1"}, eager).state == "set"
    assert {each.name for each in lint({}, config_of())} == {"ulimit -n"}  # one CPU, nothing else


@pytest.mark.usefixtures("interfaces")
def test_exports_name_this_nodes_interface_and_never_a_placeholder(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = exports(lint({}, _npu(ray_address="auto")))
    assert {"export HCCL_SOCKET_IFNAME=enp1s0", "export HCCL_CONNECT_TIMEOUT=5400"} <= set(lines)
    monkeypatch.setattr(
        psutil, "net_if_stats", lambda: {name: SimpleNamespace(isup=True) for name in ("lo", "enp1s0", "enp2s0")}
    )
    lines = exports(lint({}, _npu(ray_address="auto")))
    assert "# HCCL_SOCKET_IFNAME: each node has its own; here enp1s0, enp2s0" in lines


def test_a_library_of_another_machine_is_named(tmp_path: Path) -> None:
    library = tmp_path / "libjemalloc.so.2"
    library.write_bytes(b"\x7fELF\x02\x01" + bytes(12) + struct.pack("<H", 8))  # MIPS
    found = _found("LD_PRELOAD", {"LD_PRELOAD": f"{library}:"}, config_of())
    assert found.state == "caution"
    assert f"{library} is for another machine" in found.advice
    library.write_text("not a library")
    assert "is no library" in _found("LD_PRELOAD", {"LD_PRELOAD": str(library)}, config_of()).advice


def test_the_preflight_refuses_what_is_in_the_way_and_goes_on_with_the_rest() -> None:
    findings = Findings()
    check_environment({"GLOO_SOCKET_IFNAME": "YOUR IFNAME", "VLLM_USE_V1": "1"}, config_of(), findings)
    assert [finding.found.split(":")[0] for finding in findings.failed] == ["GLOO_SOCKET_IFNAME=YOUR IFNAME"]
    assert [finding.found.split("=")[0] for finding in findings if finding.status != FAIL] == ["VLLM_USE_V1"]


def test_rows_are_complete_and_conditions_known() -> None:
    rows = yaml.safe_load(TABLE.read_text())
    conditions = {"shared", "graphs", "nodes", "deterministic"}
    fields = {"name", "devices", "effect", "want", "when", "ours", "dead", "not", "is"}
    for row in rows:
        assert row["effect"].endswith(".")
        assert row.keys() <= fields, row
        assert set(row.get("when", ())) <= conditions
        for against in row.get("not", ()):
            re.compile(against["value"])
            assert set(against.get("when", ())) <= conditions
    assert len({row["name"] for row in rows}) == len(rows)


def test_the_command_prints_a_table_lines_for_a_shell_or_json() -> None:
    clean = {"VLLM_ASCEND_ENABLE_NZ": None, "GLOO_SOCKET_IFNAME": None, "LD_PRELOAD": None}
    runner = CliRunner(env=clean)
    table = runner.invoke(app, ["doctor", "env", RECIPE])
    assert table.exit_code == 0, table.output
    assert "Environment variables of a training on npu" in table.output
    lines = runner.invoke(app, ["doctor", "env", RECIPE, "--export"]).output.splitlines()
    assert all(line.startswith(("export ", "# ")) for line in lines)
    said = runner.invoke(app, ["doctor", "env", RECIPE, "--json"], env={"VLLM_ASCEND_ENABLE_NZ": "1"})
    assert said.exit_code == 1
    assert {row["name"]: row["status"] for row in json.loads(said.output)}["VLLM_ASCEND_ENABLE_NZ"] == "fail"
    assert runner.invoke(app, ["doctor", "--export"]).exit_code == 2
    assert runner.invoke(app, ["doctor", "env", RECIPE, RECIPE]).exit_code == 2
    assert set(STATUSES.values()) == {"ok", "warn", "fail"}
