"""`dapo doctor env`: the state of each environment variable for a recipe."""

import json
import os
import re
import resource
import socket
import struct
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml
from typer.testing import CliRunner

from dapo_core.machine.device import device_for
from flows.cli import app
from tasks.artifacts.stage_key import PROJECT_ROOT
from tasks.nodes.on_node import DEVICE_FILES
from tasks.preflight.environment import (
    STATUSES,
    TABLE,
    Variable,
    check_environment,
    described,
    exports,
    faults,
    lint,
    recorded,
)
from tasks.preflight.finding import Findings
from tests.trainings import config_of

RECIPE = "configs/dapo_qwen3_32b_math.yaml"  # NPUs on four nodes, colocated
OF_VENDORS = """
    HCCL_ALGO HCCL_BLOCKING_WAIT HCCL_CONCURRENT_ENABLE HCCL_DEBUG_CONFIG HCCL_DESYNC_DEBUG
    HCCL_DFS_CONFIG HCCL_DIAGNOSE_ENABLE HCCL_ENTRY_LOG_ENABLE HCCL_EVENT_TIMEOUT
    HCCL_IF_BASE_PORT HCCL_INTER_HCCS_DISABLE HCCL_INTRA_PCIE_ENABLE HCCL_INTRA_ROCE_ENABLE
    HCCL_LOGIC_SUPERPOD_ID HCCL_OP_RETRY_ENABLE HCCL_OP_RETRY_PARAMS
    HCCL_RDMA_QPS_PER_CONNECTION HCCL_RDMA_RETRY_CNT HCCL_RDMA_SL HCCL_RDMA_TC HCCL_RDMA_TIMEOUT
    HCCL_SOCKET_FAMILY HCCL_SO_PATH HCCL_WHITELIST_DISABLE HCCL_WHITELIST_FILE ASCEND_AICPU_PATH
    ASCEND_CACHE_PATH ASCEND_DEVICE_ID ASCEND_GLOBAL_LOG_LEVEL ASCEND_HOME_PATH ASCEND_OPP_PATH
    ASCEND_PROCESS_LOG_PATH ASCEND_SLOG_PRINT_TO_STDOUT ASCEND_TOOLKIT_HOME
    ASCEND_VISIBLE_DEVICES ASCEND_WORK_PATH PYTORCH_NPU_ALLOC_CONF
    VLLM_ASCEND_ENABLE_BATCH_MEMCPY VLLM_ASCEND_ENABLE_CONTEXT_PARALLEL
    VLLM_ASCEND_ENABLE_FLASHCOMM1 VLLM_ASCEND_ENABLE_MLAPO VLLM_ASCEND_ENABLE_MLP_OPTIMIZE
    VLLM_ASCEND_SFA_SORT_TOPK NCCL_ALGO NCCL_BUFFSIZE NCCL_DEBUG NCCL_IB_HCA NCCL_P2P_DISABLE
    NCCL_SOCKET_FAMILY NCCL_SOCKET_NTHREADS GLOO_DEVICE_TRANSPORT
"""
Address = namedtuple("Address", "family address")
CLEAN = {"VLLM_ASCEND_ENABLE_NZ": None, "GLOO_SOCKET_IFNAME": None, "LD_PRELOAD": None}


def _npu(ray_address: str | None = None, **changes: Any) -> Any:
    return config_of(
        train={"device": "npu", "ray_address": ray_address, **changes.pop("train", {})}, **changes
    )


def _found(name: str, environment: dict[str, str], config: Any) -> Variable:
    [variable] = [each for each in lint(environment, config) if each.name == name]
    return variable


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with interfaces that are up, down, a docker bridge's and link-local."""
    addresses = {"lo": "127.0.0.1", "docker0": "172.17.0.1", "usb0": "169.254.3.4"}
    addresses |= {"enp1s0": "10.0.0.5", "enp2s0": "10.1.0.5"}
    held = {name: [Address(socket.AF_INET, address)] for name, address in addresses.items()}
    stats = {name: SimpleNamespace(isup=name != "enp2s0") for name in addresses}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: held)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)


@pytest.mark.parametrize(
    ("name", "value", "state", "said"),
    [
        ("HCCL_SOCKET_IFNAME", "SOCKET IFNAME FOR CURRENT NODE", "placeholder", "the real value"),
        ("HCCL_IF_IP", "YOUR_IP", "placeholder", "set the real value"),
        ("HCCL_IF_IP", "10.0.0.5", "set", ""),
        ("HCCL_IF_IP", "10.0.0.6", "conflict", "no interface of this machine has this address"),
        ("HCCL_SOCKET_IFNAME", "=enp", "conflict", "no interface enp;"),
        ("HCCL_CONNECT_TIMEOUT", "5400", "set", ""),
        ("HCCL_CONNECT_TIMEOUT", "7200", "set", ""),
        ("HCCL_CONNECT_TIMEOUT", "7201", "conflict", "120 to 7200"),
        ("HCCL_CONNECT_TIMEOUT", "5400s", "conflict", "120 to 7200"),
        ("HCCL_CONNECT_TIMEOUT", "5", "conflict", "120 to 7200"),
        ("HCCL_HOST_SOCKET_PORT_RANGE", "60000-60050", "set", ""),
        ("HCCL_HOST_SOCKET_PORT_RANGE", "", "conflict", "ports such as 60000-60050"),
        ("GLOO_SOCKET_IFNAME", "eth7", "conflict", "no interface eth7; it has docker0, enp1s0"),
        ("GLOO_SOCKET_IFNAME", "enp2s0", "conflict", "enp2s0 is down"),
        ("HCCL_SOCKET_IFNAME", "=enp1s0", "set", ""),
        ("HCCL_SOCKET_IFNAME", "enp", "set", ""),
        ("VLLM_USE_V1", "1", "dead", "ignores it since 0.17"),
        ("USE_OPTIMIZED_MODEL", "0", "dead", "vllm-ascend is not installed here"),
        ("VLLM_ASCEND_ENABLE_NZ", "1", "conflict", "NZ layout"),
        ("VLLM_ASCEND_ENABLE_NZ", "0", "set", ""),
        ("TASK_QUEUE_ENABLE", "2", "caution", "enforce_eager"),
        ("ASCEND_LAUNCH_BLOCKING", "1", "conflict", "graphs cannot be captured"),
        ("ASCEND_RT_VISIBLE_DEVICES", "1,0", "conflict", "ascending"),
        ("RANK_TABLE_FILE", "/user/hccl.json", "conflict", "from the same table"),
        ("RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES", "1", "conflict", "on device 0"),
        ("LD_PRELOAD", "/nowhere/libjemalloc.so.2", "caution", "does not exist"),
        ("LD_PRELOAD", "libjemalloc.so.2", "set", ""),
        ("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True", "set", ""),
    ],
)
@pytest.mark.usefixtures("interfaces")
def test_each_value_has_its_state_and_advice(name: str, value: str, state: str, said: str) -> None:
    found = _found(name, {name: value}, _npu())
    assert (found.state, found.value) == (state, value)
    assert said in found.advice
    assert found.effect


@pytest.mark.parametrize("name", ["LCCL_DETERMINISTIC", "ATB_MATMUL_SHUFFLE_K_ENABLE"])
def test_what_cann_s_set_env_sets_is_reported_for_a_deterministic_run(name: str) -> None:
    set_env = {"LCCL_DETERMINISTIC": "0", "ATB_MATMUL_SHUFFLE_K_ENABLE": "1"}
    assert _found(name, set_env, _npu(run={"deterministic": False})).state == "set"
    found = _found(name, set_env, _npu(run={"deterministic": True}))
    assert found.state == "caution"
    assert "after CANN's set_env.sh" in found.advice


def test_harmful_values_depend_on_the_recipe() -> None:
    shared = _npu(train={"placement": "colocated", "num_ranks": 1}, rollout={"num_workers": 1})
    expandable = {"PYTORCH_NPU_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}
    assert _found("PYTORCH_NPU_ALLOC_CONF", expandable, shared).state == "conflict"
    assert _found("HCCL_NPU_SOCKET_PORT_RANGE", {}, shared).state == "ours"
    eager = _npu(rollout={"engine": "vllm", "engine_args": {"enforce_eager": True}})
    assert _found("TASK_QUEUE_ENABLE", {"TASK_QUEUE_ENABLE": "2"}, eager).state == "set"
    assert _found("ASCEND_LAUNCH_BLOCKING", {"ASCEND_LAUNCH_BLOCKING": "1"}, eager).state == "set"
    assert {each.name for each in lint({}, config_of())} == {"ulimit -n"}  # one CPU, nothing else


@pytest.mark.parametrize(
    ("limit", "state"), [(1024, "low"), (65536, "set"), (resource.RLIM_INFINITY, "set")]
)
def test_a_low_limit_of_open_files_is_shown(
    limit: int, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    found = _found("ulimit -n", {}, config_of())
    assert found.state == state
    assert found.value == ("unlimited" if limit == resource.RLIM_INFINITY else str(limit))
    assert exports([found]) == (["# ulimit -n: ulimit -n 32768"] if state == "low" else [])
    assert list(faults([found])) == []


@pytest.mark.usefixtures("interfaces")
@pytest.mark.parametrize(
    ("name", "value"), [("HCCL_IF_IP", "10.0.0.6"), ("HCCL_SOCKET_IFNAME", "=eth7")]
)
def test_a_wrong_address_is_an_error_on_a_node_and_a_warning_elsewhere(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert _found(name, {name: value}, _npu(ray_address="auto")).state == "caution"
    runner = CliRunner(env={**CLEAN, name: value})
    assert runner.invoke(app, ["doctor", "env", RECIPE]).exit_code == 0
    (tmp_path / "davinci0").touch()
    monkeypatch.setitem(DEVICE_FILES, "npu", str(tmp_path / "davinci[0-9]*"))
    said = runner.invoke(app, ["doctor", "env", RECIPE, "--json"])
    assert said.exit_code == 1
    assert [row["name"] for row in json.loads(said.output) if row["state"] == "conflict"] == [name]


@pytest.mark.usefixtures("interfaces")
def test_exports_name_this_node_s_interface_and_never_a_placeholder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = exports(lint({}, _npu(ray_address="auto")))
    # HCCL takes =NAME for all of a name
    assert {"export HCCL_SOCKET_IFNAME='='enp1s0", "export GLOO_SOCKET_IFNAME=enp1s0"} <= set(lines)
    are_up = {name: SimpleNamespace(isup=True) for name in ("lo", "enp1s0", "enp2s0")}
    monkeypatch.setattr(psutil, "net_if_stats", lambda: are_up)
    lines = exports(lint({}, _npu(ray_address="auto")))
    assert "# HCCL_SOCKET_IFNAME: differs on each node; this machine has enp1s0, enp2s0" in lines
    held = {"enp1s0": "fe80::5%enp1s0", "enp2s0": "2001:db8::5"}  # without IPv4
    found = {name: [Address(socket.AF_INET6, address)] for name, address in held.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    assert "export GLOO_SOCKET_IFNAME=enp2s0" in exports(lint({}, _npu(ray_address="auto")))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("HCCL_CONECT_TIMEOUT", "HCCL_CONNECT_TIMEOUT"),
        ("HCCL_IFIP", "HCCL_IF_IP"),
        ("VLLM_ASCEND_ENABEL_NZ", "VLLM_ASCEND_ENABLE_NZ"),
        ("GLOO_SOCKET_IFNAM", "GLOO_SOCKET_IFNAME"),
    ],
)
def test_a_misspelt_variable_names_the_right_one(name: str, meant: str) -> None:
    found = _found(name, {name: "1"}, _npu())
    assert (found.state, found.value, found.advice) == ("misspelt", "1", f"did you mean {meant}?")
    findings = Findings()
    check_environment({name: "1"}, _npu(), findings)
    assert [(one.status, one.found) for one in findings] == [
        ("warn", f"{name}=1: did you mean {meant}?")
    ]


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
def test_the_vendors_other_variables_are_not_called_misspelt(device: str) -> None:
    """Variables of CANN, torch_npu, vllm-ascend, NCCL and gloo."""
    variables = lint(dict.fromkeys(OF_VENDORS.split(), "1"), config_of(train={"device": device}))
    assert [each.name for each in variables if each.state == "misspelt"] == []


def test_a_library_for_another_architecture_is_reported(tmp_path: Path) -> None:
    library = tmp_path / "libjemalloc.so.2"
    library.write_bytes(b"\x7fELF\x02\x01" + bytes(12) + struct.pack("<H", 8))  # MIPS
    found = _found("LD_PRELOAD", {"LD_PRELOAD": f"{library}:"}, config_of())
    assert found.state == "caution"
    assert f"{library} is for another architecture" in found.advice
    library.write_text("not a library")
    found = _found("LD_PRELOAD", {"LD_PRELOAD": str(library)}, config_of())
    assert "is not a library" in found.advice


def test_rows_of_the_table_are_complete_and_their_conditions_known() -> None:
    rows = yaml.safe_load(TABLE.read_text())
    conditions = {"shared", "graphs", "nodes", "deterministic"}
    fields = {"name", "devices", "effect", "value", "when"}
    fields |= {"chain_value", "ignored_since", "conflicts", "must_be"}
    for row in rows:
        assert row["effect"].endswith(".")
        assert row.keys() <= fields, row
        assert set(row.get("when", ())) <= conditions
        for against in row.get("conflicts", ()):
            re.compile(against["value"])
            assert set(against.get("when", ())) <= conditions
    assert len({row["name"] for row in rows}) == len(rows)


def test_a_run_records_what_is_set_and_what_the_chain_sets() -> None:
    ours = device_for("npu").variables(is_shared=True)
    config = _npu(train={"placement": "colocated", "num_ranks": 1})
    rows = recorded({"HCCL_CONNECT_TIMEOUT": "600", "OTHER": "1"}, config)
    by_chain = {row["name"]: row["value"] for row in rows if row["set_by"] == "the chain"}
    assert by_chain == ours == dict.fromkeys(ours, "auto") | {"VLLM_ASCEND_ENABLE_NZ": "0"}
    assert "HCCL_CONNECT_TIMEOUT=600 (this environment)" in described(rows)
    assert "OTHER" not in described(rows)


def test_the_command_prints_a_table_shell_lines_or_json() -> None:
    runner = CliRunner(env=CLEAN)
    table = runner.invoke(app, ["doctor", "env", RECIPE])
    assert table.exit_code == 0, table.output
    assert "Environment variables that affect training on npu" in table.output
    lines = runner.invoke(app, ["doctor", "env", RECIPE, "--export"]).output.splitlines()
    assert all(line.startswith(("export ", "# ")) for line in lines)
    harmful = {"VLLM_ASCEND_ENABLE_NZ": "1"}
    said = runner.invoke(app, ["doctor", "env", RECIPE, "--json"], env=harmful)
    assert said.exit_code == 1
    failed = [row["name"] for row in json.loads(said.output) if row["status"] == "fail"]
    assert failed == ["VLLM_ASCEND_ENABLE_NZ"]
    assert runner.invoke(app, ["doctor", "--export"]).exit_code == 2
    assert runner.invoke(app, ["doctor", "env", RECIPE, RECIPE]).exit_code == 2
    assert set(STATUSES.values()) == {"ok", "warn", "fail"}


@pytest.mark.slow
def test_exported_lines_work_in_bash_and_cause_no_finding() -> None:
    """As a user does: run it, eval the lines in the same shell, run it again."""
    look = f"{sys.executable} -m flows.cli doctor env {RECIPE} --set run.deterministic=true"
    script = f"""{look} --json; printf '\\n---\\n'; eval "$({look} --export)"; {look} --json"""
    strange = {"RAY_DEDUP_LOGS": """it's "0"; $(exit 3)""", "HCCL_CONECT_TIMEOUT": "a 'b' $c"}
    environment = {name: os.environ[name] for name in ("PATH", "HOME")} | strange
    place = {"env": environment, "cwd": PROJECT_ROOT}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, **place)
    parts = [json.loads(part) for part in done.stdout.split("---")]
    before, after = ({row["name"]: row for row in rows} for rows in parts)
    assert done.stderr == ""
    for name in ("TASK_QUEUE_ENABLE", "HCCL_DETERMINISTIC"):
        assert before[name]["state"] == "missing"
    for name, row in after.items():
        was = before[name]
        if was["state"] == "missing" and was["value"]:
            assert row == was | {"state": "set", "status": "ok", "advice": ""}
        else:
            assert row == was


def test_an_interface_with_an_odd_name_is_quoted() -> None:
    odd = Variable("GLOO_SOCKET_IFNAME", "missing", 'it\'s $(exit 3) "a"', "")
    [line] = exports([odd])
    script = f'{line}\nprintf %s "$GLOO_SOCKET_IFNAME"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.stdout == odd.value


def test_a_torchvision_without_its_compiled_operators_is_imported_beside_a_cpu_torch(
    tmp_path: Path,
) -> None:
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "_C.so").write_bytes(b"needs CUDA")
    (package / "__init__.py").write_text("import torch; print(torch.ops.torchvision.nms)")
    code = (
        "import importlib.util, sys; from dapo_core.machine import torchvision_ops as ops;"
        "ops.install(); ops.install(); found = importlib.util.find_spec('torchvision');"
        "print('torch' in sys.modules); import torchvision; print(found.origin)"
    )
    paths = f"{tmp_path}:{PROJECT_ROOT}"
    environment = os.environ | {"PYTHONPATH": paths}
    output = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)

    origin = package / "__init__.py"
    assert output.splitlines() == ["False", "torchvision.nms", str(origin)]
