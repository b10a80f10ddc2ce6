"""A private Ray is unreachable for other machines, other users and processes without its token."""

import http.client
import ipaddress
import json
import os
import socket
import stat
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from dapo_core.cluster.connection import AUTH_MODE, AUTH_TOKEN, connected_to_ray, private_token
from dapo_core.config.train import TrainConfig
from tasks.processes.supervisor import descendants

# Joins the cluster and prints a task's result or the error.
STRANGER = """
import sys
import ray
from dapo_core.cluster.connection import connected_to_ray
from dapo_core.config.train import TrainConfig

try:
    with connected_to_ray(TrainConfig(ray_address=sys.argv[1]), num_cpus=0):
        print("RESULT", ray.get(ray.remote(num_cpus=0)(lambda: 6 * 7).remote()))
except Exception as error:
    print("RESULT", type(error).__name__, error)
"""


def _start(code: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Start a process with only these Ray variables, in which Ray does not replace 127.0.0.1."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    own |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_NUM_REDIS_GET_RETRIES": "2"}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=own | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _result(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=300)
    return output


@pytest.fixture(scope="module")
def others() -> set[int]:
    """Child processes before the private Ray starts, such as other tests' shared Ray."""
    return set(descendants(os.getpid()))


@pytest.fixture(scope="module")
def folder(others: set[int]) -> Iterator[Path]:
    """A private Ray's folder."""
    before = dict(os.environ)
    with connected_to_ray(TrainConfig(), num_cpus=2) as folder:
        assert folder is not None
        yield folder
    assert not folder.exists()
    assert {name: os.environ.get(name) for name in (AUTH_MODE, AUTH_TOKEN)} == {
        name: before.get(name) for name in (AUTH_MODE, AUTH_TOKEN)
    }


def _listeners(others: set[int]) -> list[Any]:
    """Return the addresses that this process and its descendants listen at, without `others`."""
    below_others = {pid for other in others for pid in descendants(other)}
    return [
        socket.laddr
        for pid in {os.getpid(), *descendants(os.getpid())} - others - below_others
        for socket in psutil.Process(pid).net_connections("tcp")
        if socket.status == psutil.CONN_LISTEN
    ]


def test_it_listens_on_loopback_only(folder: Path, others: set[int]) -> None:
    addresses = {ipaddress.ip_address(listener.ip) for listener in _listeners(others)}
    assert addresses
    assert all(
        (getattr(address, "ipv4_mapped", None) or address).is_loopback for address in addresses
    )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: finds the address that others see
        network_address = probe.getsockname()[0]
    port = int(ray.get_runtime_context().gcs_address.rpartition(":")[2])
    for host, is_open in (
        ("127.0.0.1", True),
        (network_address, network_address.startswith("127.")),
    ):
        with socket.socket() as client:
            assert (client.connect_ex((host, port)) == 0) == is_open


def test_other_processes_need_the_token(folder: Path, others: set[int]) -> None:
    address = ray.get_runtime_context().gcs_address
    without, wrong, right = (
        _start(STRANGER, address, **environment)
        for environment in (
            {},
            {AUTH_MODE: "token", AUTH_TOKEN: "0" * 64},
            {AUTH_MODE: "token", AUTH_TOKEN: private_token()},
        )
    )
    for process in (without, wrong):
        output = _result(process)
        assert "RESULT ConfigError" in output, output
        assert "refuses this process" in output
    output = _result(right)
    assert "RESULT 42" in output, output
    (node,) = ray.nodes()
    for listener in _listeners(others):
        request = urllib.request.Request(
            f"http://127.0.0.1:{listener.port}/api/job_agent/jobs/",
            data=json.dumps({"entrypoint": f"touch {folder}/stolen"}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with pytest.raises((OSError, http.client.HTTPException)):  # 401, or not HTTP at all
            urllib.request.urlopen(request, timeout=5)
    assert node["Alive"]
    assert not (folder / "stolen").exists()


def test_its_folder_is_private_and_the_token_is_not_leaked(folder: Path) -> None:
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    token = private_token().encode()
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if token in path.read_bytes()]
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(os.getpid())]
    assert lines
    assert not [line for line in lines if token in line]
    own = Path.home() / ".ray" / "auth_token"  # this user may have another cluster
    assert not own.exists() or token not in own.read_bytes()
