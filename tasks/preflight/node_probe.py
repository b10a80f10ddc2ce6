"""Collect a node's state for the preflight, on the node, as plain data for nodes.py to judge."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import secrets
import shutil
import socket
import socketserver
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from dapo_core.machine.ports import meeting_point
from dapo_core.machine.versions import installed, stack
from tasks.artifacts.stage_key import code_digest
from tasks.preflight.environment import NODE, chosen_addresses, lint_under
from tasks.preflight.vendor_tools import ascend, nvidia
from tasks.preflight.vendor_tools.states import DevicesFound

PACKAGES = ("torch", "transformers", "ray", "vllm", "vllm-ascend", "torch-npu", "triton-ascend")
CODE = ("dapo_core", "tasks", "eval", "durable.py", "redaction.py")
_RANGE = re.compile(r"\s*(\d+)-(\d+)\s*")
CONNECT_SECONDS = 3.0
MAX_CONNECTIONS = 32  # at a time
MAX_ATTEMPTS = 2  # if a connection is not answered in time
TOOLS = {"npu": ascend.devices, "cuda": nvidia.devices}
GREETING_BYTES = 32


def node_environment() -> dict[str, str]:
    """Return the environment of the node's raylet: Ray changes some variables for workers."""
    raylet = _raylet()
    return dict(os.environ) if raylet is None else dict(raylet.environ())


def ray_options() -> dict[str, str]:
    """Return the options of the node's raylet, by name; {} outside Ray."""
    raylet = _raylet()
    words = [] if raylet is None else raylet.cmdline()
    pairs = (word.removeprefix("--").partition("=") for word in words)
    return {name: value for name, _, value in pairs}


def _raylet() -> psutil.Process | None:
    """The raylet that started this process; None outside Ray."""
    parent = psutil.Process().parent()
    return parent if parent is not None and parent.name() == "raylet" else None


def port_ranges(
    environment: Mapping[str, str], ray: Mapping[str, str]
) -> dict[str, tuple[int, int]]:
    """Return first and last port of the ranges that training listens on; 0: any free port."""
    ranges = {"any free port": (0, 0)}
    first, last = (int(ray.get(f"{end}_worker_port", "0")) for end in ("min", "max"))
    if first:
        ranges[f"Ray's workers, {first}-{last}"] = (first, last)
    if hccl := _RANGE.fullmatch(environment.get("HCCL_HOST_SOCKET_PORT_RANGE", "")):
        ranges[f"HCCL_HOST_SOCKET_PORT_RANGE={hccl[0]}"] = (int(hccl[1]), int(hccl[2]))
    return ranges


def versions_here(
    device: str, environment: Mapping[str, str], found: Mapping[str, Any] | None
) -> dict[str, str]:
    """Return the installed versions by name."""
    versions = {"Python": platform.python_version(), "code": code_digest(CODE)[:12]}
    versions |= {name: version for name in PACKAGES if (version := installed(name)) is not None}
    if device == "npu" and (toolkit := ascend.cann_version(environment)):
        versions["CANN"] = toolkit
    driver = (found or {}).get("driver") or (ascend.driver_version() if device == "npu" else None)
    return versions | ({"driver": driver} if driver else {})


def devices_here(device: str, environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the visible devices with their processes, links and unread lines; None for a CPU."""
    if device not in TOOLS:
        return None
    from dapo_core.machine.device import device_for

    found: DevicesFound = TOOLS[device]()
    variable = device_for(device).visible_variable
    visible, unread = found.devices, list(found.unread)
    if environment.get(variable):
        visible = found.named(*device_for(device).visible(environment))
    if found.devices and not visible:
        selected = f"{variable}={environment[variable]}"
        unread.append(f"{selected} selects none of the devices that {found.tool} shows")
    report: dict[str, Any] = {
        "tool": found.tool,
        "driver": found.driver,
        "devices": [asdict(each) | {"processes": _processes(each.processes)} for each in visible],
        "unread": unread,
    }
    if device == "npu" and visible:
        links, reason = ascend.links([each.number for each in visible])
        report |= {"links": [asdict(link) for link in links], "links_unread": reason}
    return report


def _processes(processes: Sequence[Any]) -> list[dict[str, Any]]:
    return [asdict(process) | {"is_of_ray": _is_of_ray(process.pid)} for process in processes]


def _is_of_ray(pid: int) -> bool:
    """True if the process is a worker of the node's Ray, as far as this process can see."""
    try:
        return any(parent.name() == "raylet" for parent in psutil.Process(pid).parents())
    except psutil.Error:  # it has ended, or runs outside this container
        return False


def limits() -> dict[str, int | None]:
    """Return the resource limits of a process by name; None: unlimited."""
    found = {"open files": resource.RLIMIT_NOFILE, "locked memory": resource.RLIMIT_MEMLOCK}
    values = {name: resource.getrlimit(number)[0] for name, number in found.items()}
    return {name: None if each == resource.RLIM_INFINITY else each for name, each in values.items()}


def memory() -> dict[str, int]:
    """Return the bytes of the node's memory, of /dev/shm, and of unused huge pages."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    names = ("HugePages_Free", "Hugepagesize")
    unused, size = (int(lines.get(name, "0").split()[0]) for name in names)
    shared = Path("/dev/shm")
    return {
        "total": int(psutil.virtual_memory().total),
        "shared": shutil.disk_usage(shared).total if shared.is_dir() else 0,
        "unused_huge_pages": unused * size * 1024,
    }


def disk(path: str) -> dict[str, int]:
    """Return the bytes of the file system that holds a folder."""
    usage = shutil.disk_usage(path)
    return {"total": usage.total, "free": usage.free}


class _Server(socketserver.ThreadingTCPServer):
    request_queue_size = 1024  # all nodes connect at the same time
    daemon_threads = True


class NodeProbe:
    """The preflight's Ray actor on a node."""

    def __init__(self) -> None:
        self._servers: list[_Server] = []

    def report(self, device: str, conditions: frozenset[str]) -> dict[str, Any]:
        """Return versions, devices, limits, disks and environment variables of this node."""
        environment, folder = node_environment(), tempfile.gettempdir()
        found = devices_here(device, environment)
        variables = lint_under(environment, device, conditions | {NODE})
        return {
            "versions": versions_here(device, environment, found),
            "stack": stack(),
            "devices": found,
            "limits": limits(),
            "memory": memory(),
            "disk": {
                path: disk(path) for path in (folder, ray_options().get("session_dir", folder))
            },
            "environment": [asdict(variable) for variable in variables],
        }

    def now(self) -> float:
        """Return this node's clock, in epoch seconds."""
        return time.time()

    def differences(
        self, paths: Mapping[str, Path], expected: Mapping[str, str], probe: str
    ) -> list[str]:
        """Return the shared files that differ on this node."""
        from dapo_core.cluster.shared_files import differences  # loads Ray

        return differences(paths, expected, probe)

    def listen(self, address: str) -> dict[str, Any]:
        """Listen on a port of each range; returns the ports, their addresses, and the greeting.

        A port is None if its range is taken. `address` is Ray's; variables may select others.
        """
        environment, greeting = node_environment(), secrets.token_hex(GREETING_BYTES // 2)
        ranges = port_ranges(environment, ray_options())
        ports = {name: self._serve(first, last, greeting) for name, (first, last) in ranges.items()}
        addresses = {"Ray's address": address} | chosen_addresses(environment)
        # Nodes may run other versions of this code: keep the keys.
        return {"ports": ports, "addresses": addresses, "word": greeting}

    def _serve(self, first: int, last: int, greeting: str) -> int | None:
        class Greet(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                self.request.sendall(greeting.encode())

        for port in range(last, first - 1, -1):  # Ray assigns its ports from the first one up
            try:
                server = _Server(("", port), Greet)
            except OSError:
                continue
            threading.Thread(target=server.serve_forever, daemon=True).start()
            self._servers.append(server)
            return int(server.server_address[1])
        return None

    def reach(self, targets: Sequence[tuple[str, int, str]]) -> list[str]:
        """Connect to each address and port; returns why it failed or greets otherwise, or ""."""
        with ThreadPoolExecutor(MAX_CONNECTIONS) as pool:
            return list(pool.map(_reach, targets))

    @staticmethod
    def reach_seconds(num_targets: int) -> float:
        """Return the longest that `reach` takes, if no target answers."""
        return 2 * MAX_ATTEMPTS * CONNECT_SECONDS * -(-num_targets // MAX_CONNECTIONS)

    def rendezvous(self, address: str) -> str:
        """Return a rendezvous URL on this node."""
        return meeting_point(address)


def _reach(target: tuple[str, int, str]) -> str:
    for _ in range(MAX_ATTEMPTS):
        with contextlib.suppress(TimeoutError):
            return _reach_once(*target)
    return f"no answer within {CONNECT_SECONDS:.0f} s"


def _reach_once(host: str, port: int, greeting: str) -> str:
    try:
        with socket.create_connection((host, port), CONNECT_SECONDS) as connection:
            connection.settimeout(CONNECT_SECONDS)
            received = b""
            while len(received) < GREETING_BYTES and (more := connection.recv(GREETING_BYTES)):
                received += more
    except TimeoutError:
        raise
    except OSError as error:
        return error.strerror or str(error)
    return "" if received.decode(errors="replace") == greeting else "another program answers there"


def all_reduce(rank: int, meeting_point: str, kind: str, max_seconds: float) -> float:
    """Return the seconds of an all-reduce with the other rank, once they are connected.

    Raises ConfigError for a wrong sum, and torch's own errors.
    """
    from datetime import timedelta

    import torch
    from torch import distributed

    from dapo_core.errors import ConfigError
    from dapo_core.machine.device import device_for

    device = device_for(kind)
    device.prepare(os.environ, is_shared=False)
    device.require()
    limit = timedelta(seconds=max_seconds)
    distributed.init_process_group(device.backend, meeting_point, limit, world_size=2, rank=rank)
    try:
        values = torch.full((1024,), float(rank + 1), device=device.torch_device())
        distributed.all_reduce(values)  # the first one connects
        began = time.monotonic()
        distributed.all_reduce(values)
        device.synchronize()
        took, total = time.monotonic() - began, values[0].item()
    finally:
        distributed.destroy_process_group()
    if total != 6.0:  # (1 + 2) on both ranks, then twice that
        raise ConfigError(f"3 + 3 over {device.backend} gives {total:g}")
    return took
