"""What the preflight looks at on a node, from inside: plain data out, no judgement."""

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

from dapo_core.ports import meeting_point
from dapo_core.versions import installed, stack
from tasks.artifacts.stage_key import code_digest
from tasks.preflight.environment import NODE, chosen_addresses, lint_under
from tasks.preflight.vendor_tools import cann, hccn_tool, npu_smi, nvidia_smi
from tasks.preflight.vendor_tools.states import DevicesFound

PACKAGES = ("torch", "transformers", "ray", "vllm", "vllm-ascend", "torch-npu", "triton-ascend")
CODE = ("dapo_core", "tasks", "eval", "durable.py", "redaction.py")
_RANGE = re.compile(r"\s*(\d+)-(\d+)\s*")
CONNECT_SECONDS = 3.0
AT_ONCE = 32  # connections
NUM_TRIES = 2  # of a connection that is not answered in time
TOOLS = {"npu": npu_smi.devices, "cuda": nvidia_smi.devices}
GREETING_BYTES = 32


def node_environment() -> dict[str, str]:
    """The environment of the node's Ray, which changes some variables for workers; this process's without one."""
    parent = psutil.Process().parent()
    if parent is not None and parent.name() == "raylet":
        return dict(parent.environ())
    return dict(os.environ)


def ray_words() -> dict[str, str]:
    """The options that the node's Ray was started with, by name; {} outside Ray."""
    parent = psutil.Process().parent()
    words = parent.cmdline() if parent is not None and parent.name() == "raylet" else []
    return {name: value for name, _, value in (word.removeprefix("--").partition("=") for word in words)}


def port_ranges(environment: Mapping[str, str], ray: Mapping[str, str]) -> dict[str, tuple[int, int]]:
    """First and last port of what processes of a training may listen on, by name; 0 is any free one."""
    ranges = {"any free port": (0, 0)}
    first, last = (int(ray.get(f"{end}_worker_port", "0")) for end in ("min", "max"))
    if first:
        ranges[f"Ray's workers, {first}-{last}"] = (first, last)
    if hccl := _RANGE.fullmatch(environment.get("HCCL_HOST_SOCKET_PORT_RANGE", "")):
        ranges[f"HCCL_HOST_SOCKET_PORT_RANGE={hccl[0]}"] = (int(hccl[1]), int(hccl[2]))
    return ranges


def versions_here(device: str, environment: Mapping[str, str], found: Mapping[str, Any] | None) -> dict[str, str]:
    """Versions by name; what is not installed is absent."""
    versions = {"Python": platform.python_version(), "code": code_digest(CODE)[:12]}
    versions |= {name: version for name in PACKAGES if (version := installed(name)) is not None}
    if device == "npu" and (toolkit := cann.cann_version(environment)):
        versions["CANN"] = toolkit
    driver = (found or {}).get("driver") or (cann.driver_version() if device == "npu" else None)
    return versions | ({"driver": driver} if driver else {})


def devices_here(device: str, environment: Mapping[str, str]) -> dict[str, Any] | None:
    """The visible devices with the processes on them, their links on NPUs, and what could not be read."""
    if device not in TOOLS:
        return None
    from dapo_core.device import device_for

    found: DevicesFound = TOOLS[device]()
    variable = device_for(device).visible_variable
    visible, unread = found.visible(environment.get(variable)), list(found.unread)
    if found.devices and not visible and environment.get(variable):
        unread.append(f"none of the devices that {found.tool} shows is in {variable}={environment[variable]}")
    report: dict[str, Any] = {
        "tool": found.tool,
        "driver": found.driver,
        "devices": [asdict(each) | {"processes": _processes(each.processes)} for each in visible],
        "unread": unread,
    }
    if device == "npu" and visible:
        links, reason = hccn_tool.links([each.number for each in visible])
        report |= {"links": [asdict(link) for link in links], "links_unread": reason}
    return report


def _processes(processes: Sequence[Any]) -> list[dict[str, Any]]:
    return [asdict(process) | {"is_of_ray": _is_of_ray(process.pid)} for process in processes]


def _is_of_ray(pid: int) -> bool:
    """Whether the process is a worker of the node's Ray, as far as this process sees it."""
    try:
        return any(parent.name() == "raylet" for parent in psutil.Process(pid).parents())
    except psutil.Error:  # ended since, or outside this container
        return False


def limits() -> dict[str, int | None]:
    """Limits of a process by name; None is no limit."""
    found = {"open files": resource.RLIMIT_NOFILE, "locked memory": resource.RLIMIT_MEMLOCK}
    values = {name: resource.getrlimit(number)[0] for name, number in found.items()}
    return {name: None if value == resource.RLIM_INFINITY else value for name, value in values.items()}


def memory() -> dict[str, int]:
    """Bytes of the node's memory, of shared memory, and of huge pages that nothing uses."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    unused, size = (int(lines.get(name, "0").split()[0]) for name in ("HugePages_Free", "Hugepagesize"))
    shared = Path("/dev/shm")
    return {
        "total": int(psutil.virtual_memory().total),
        "shared": shutil.disk_usage(shared).total if shared.is_dir() else 0,
        "unused_huge_pages": unused * size * 1024,
    }


def disk(path: str) -> dict[str, int]:
    """Bytes of the file system that holds a folder."""
    usage = shutil.disk_usage(path)
    return {"total": usage.total, "free": usage.free}


class _Server(socketserver.ThreadingTCPServer):
    request_queue_size = 1024  # all nodes dial at once
    daemon_threads = True


class NodeProbe:
    """The preflight's process on a node."""

    def __init__(self) -> None:
        self._servers: list[_Server] = []

    def report(self, device: str, conditions: frozenset[str]) -> dict[str, Any]:
        """Versions, devices, limits, disks and variables of this node."""
        environment = node_environment()
        found = devices_here(device, environment)
        return {
            "versions": versions_here(device, environment, found),
            "stack": stack(),
            "devices": found,
            "limits": limits(),
            "memory": memory(),
            "disk": {
                path: disk(path)
                for path in (tempfile.gettempdir(), ray_words().get("session_dir", tempfile.gettempdir()))
            },
            "environment": [asdict(variable) for variable in lint_under(environment, device, conditions | {NODE})],
        }

    def now(self) -> float:
        """This node's clock, in seconds since 1970."""
        return time.time()

    def differences(self, paths: Mapping[str, Path], expected: Mapping[str, str], probe: str) -> list[str]:
        """Of the shared files those that this node sees otherwise."""
        from dapo_core.cluster.shared_files import differences  # loads Ray

        return differences(paths, expected, probe)

    def listen(self, address: str) -> dict[str, Any]:
        """Listen on a port of each range; returns ports, addresses to reach them at, and a word they answer with.

        A port is None where all of its range are taken. `address` is Ray's; variables may choose other interfaces.
        """
        environment, word = node_environment(), secrets.token_hex(GREETING_BYTES // 2)
        ranges = port_ranges(environment, ray_words())
        ports = {name: self._serve(first, last, word) for name, (first, last) in ranges.items()}
        addresses = {"Ray's address": address} | chosen_addresses(environment)
        return {"ports": ports, "addresses": addresses, "word": word}

    def _serve(self, first: int, last: int, word: str) -> int | None:
        class Greet(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                self.request.sendall(word.encode())

        for port in range(last, first - 1, -1):  # Ray gives its own away from the first on
            try:
                server = _Server(("", port), Greet)
            except OSError:
                continue
            threading.Thread(target=server.serve_forever, daemon=True).start()
            self._servers.append(server)
            return int(server.server_address[1])
        return None

    def reach(self, targets: Sequence[tuple[str, int, str]]) -> list[str]:
        """For each address, port and word, why it cannot be reached; "" where it can."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(_reach, targets))

    @staticmethod
    def reach_seconds(num_targets: int) -> float:
        """Seconds that `reach` takes at most where each target stays silent twice."""
        return 2 * NUM_TRIES * CONNECT_SECONDS * -(-num_targets // AT_ONCE)

    def rendezvous(self, address: str) -> str:
        """An address on this node at which processes can meet."""
        return meeting_point(address)


def _reach(target: tuple[str, int, str]) -> str:
    for _ in range(NUM_TRIES):
        with contextlib.suppress(TimeoutError):
            return _reach_once(*target)
    return f"no answer within {CONNECT_SECONDS:.0f} s"


def _reach_once(host: str, port: int, word: str) -> str:
    try:
        with socket.create_connection((host, port), CONNECT_SECONDS) as connection:
            connection.settimeout(CONNECT_SECONDS)
            heard = b""
            while len(heard) < GREETING_BYTES and (more := connection.recv(GREETING_BYTES)):
                heard += more
    except TimeoutError:
        raise
    except OSError as error:
        return error.strerror or str(error)
    return "" if heard.decode(errors="replace") == word else "another program answers there"


def all_reduce(rank: int, meeting_point: str, kind: str, max_seconds: float) -> float:
    """Seconds that a sum over two processes takes, this one and the other rank's, once both have met.

    Raises ConfigError for a wrong sum; torch raises what else goes wrong.
    """
    from datetime import timedelta

    import torch
    from torch import distributed

    from dapo_core.device import device_for
    from dapo_core.errors import ConfigError

    device = device_for(kind)
    device.prepare(os.environ, is_shared=False)
    device.require()
    distributed.init_process_group(
        device.backend, init_method=meeting_point, rank=rank, world_size=2, timeout=timedelta(seconds=max_seconds)
    )
    try:
        values = torch.full((1024,), float(rank + 1), device=device.torch_device())
        distributed.all_reduce(values)  # the first one connects
        began = time.monotonic()
        distributed.all_reduce(values)
        device.synchronize()
        took, total = time.monotonic() - began, values[0].item()
    finally:
        distributed.destroy_process_group()
    if total != 6.0:  # (1 + 2) on both, then twice that
        raise ConfigError(f"the sum of 3 and 3 over {device.backend} is {total:g}")
    return took
