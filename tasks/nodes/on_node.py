"""What `dapo cluster` does on a node, from the node's own copy of the project: look, start Ray, end it again.

    ~/.dapo/clusters/HEAD_PORT/HOST/record.json    what runs: the supervisor's pid and start time, interface
                                    ray.log        Ray's output; locked while the supervisor lives
    ~/.dapo/clusters/HEAD_PORT.HOST.lock           locked while the host's Ray is being started or ended

Ray runs in the foreground under the supervisor of tasks/processes, which ends every process below it, daemons
included. Its sessions and sockets are in a folder of their own, which goes with it.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import platform
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

import durable
from dapo_core.cluster.room import ask_cluster
from dapo_core.cluster.started import ADDRESS, AUTH_MODE, AUTH_TOKEN, AUTH_TOKEN_PATH, TOKEN, clusters_folder
from dapo_core.errors import WorkerDied
from dapo_core.ports import free_ports
from tasks.nodes.interface import (
    NoInterfaceError,
    interface_of,
    interface_towards,
    port_owner,
    source_towards,
    unreachable,
)
from tasks.processes.child import prepare_log, start_supervisor
from tasks.processes.supervisor import descendants, stat_fields

RECORD = "record.json"
RAY_FOLDER = "dapo-node-"
RAY = "ray"  # Ray opens it to all, inside of a folder that is not
STARTED = "ray_current_cluster"  # Ray writes it into its folder once a node has started
BOOT = Path("/proc/sys/kernel/random/boot_id")
DEVICE_FILES = {"npu": "/dev/davinci[0-9]*", "cuda": "/dev/nvidia[0-9]*"}
NUM_STARTS = 3
MAX_PLACE = 20  # characters of a folder, so that the paths of Ray's sockets in it fit
PAUSE_SECONDS = 1.0  # before the second start, and twice that before the third
GRACE_SECONDS = 3.0  # Ray would let tasks go on for 30
END_SECONDS = 30.0  # for the supervisor to end everything, SIGKILL included
KILLED_SECONDS = 12.0
NUM_LINES = 12
POLL_SECONDS = 0.1
OPEN_FILES = 65_536


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """What the node says to a request."""
    verbs: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
        "look": _look, "routes": _routes, "start": _start, "nodes": _nodes, "status": _status, "stop": _stop,
    }  # fmt: skip
    return verbs[request["verb"]](request)


def folder_of(request: Mapping[str, Any]) -> Path:
    """Where this node keeps what it knows of a host's Ray."""
    return clusters_folder() / request["cluster"] / request["host"]


def _look(request: Mapping[str, Any]) -> dict[str, Any]:
    """The node before a start: its interface, our Ray, other Rays, who has the head's port, its devices."""
    said: dict[str, Any] = {"running": running(folder_of(request))}
    said["others"] = _other_rays(said["running"])
    if (pattern := DEVICE_FILES.get(request["device"])) is not None:
        said["num_devices"] = len(glob.glob(pattern))
    try:
        found = interface_towards(request["targets"], request["interface"], request["own"])
    except NoInterfaceError as error:
        return {**said, "problem": str(error)}
    said["interface"] = {"name": found.name, "address": found.address, "mtu": found.mtu}
    if request["is_head"] and said["running"] is None and (owner := port_owner(found.address, request["port"])):
        said["problem"] = f"port {request['port']} is taken by {owner}: stop it, or set another port"
    return said


def _routes(request: Mapping[str, Any]) -> dict[str, Any]:
    """Why this node, the head, does not reach others at their addresses, and what may be in the way of packets."""
    faults: dict[str, str] = {}
    warnings: dict[str, str] = {}
    for name, address in request["addresses"].items():
        try:
            source = source_towards(address)
        except OSError as error:
            faults[name] = f"the head cannot reach it at {address}: {error.strerror}"
            continue
        back = interface_of(source)
        if source == address:
            faults[name] = f"its address {address} is one of the head itself: set the host's interface"
        elif back is not None and back.name != request["interface"]:
            warnings[name] = (
                f"it reaches the head at {request['address']} on {request['interface']}, which uses {back.name} "
                "back: where packets are lost, set interface on both"
            )
    return {"faults": faults, "warnings": warnings}


def _start(request: Mapping[str, Any]) -> dict[str, Any]:
    """Start Ray unless it runs; with what runs and the cluster's token, or why it does not."""
    folder = folder_of(request)
    try:
        with _alone(folder):
            if (record := running(folder)) is not None:
                return _runs(folder, record)
            if fault := _hindrance(request):
                return {"problem": fault}
            _forget(folder)
            _write_secret(folder, request)
            record = _launch(folder, request)
        return _outlast_failures(folder, record, request)
    except OSError as error:
        return {"problem": f"Ray cannot be started with {folder} and {_place(request)}: {error}"}


def _outlast_failures(folder: Path, record: dict[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """Wait until Ray has started, and start it again if it fails."""
    deadline = time.monotonic() + request["start_seconds"]
    for attempt in range(1, NUM_STARTS + 1):
        if _has_started(record, deadline):
            break
        with _alone(folder):
            if _was_ended(folder, record):
                return {"problem": "its start was ended by another command, such as `dapo cluster down`"}
            log = durable.tail(folder / "ray.log", NUM_LINES)
            _end(folder, record)
            pause = PAUSE_SECONDS * attempt
            if attempt == NUM_STARTS or time.monotonic() + pause >= deadline:
                return {
                    "problem": f"Ray did not start ({attempt} attempts); the end of {folder}/ray.log:",
                    "log": log,
                }
            time.sleep(pause)
            _forget(folder)
            record = _launch(folder, request)
    return _runs(folder, record)


def _runs(folder: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    token = folder.parent / TOKEN
    return {"running": record, "token": token.read_text(encoding="utf-8"), "token_path": str(token)}


def _hindrance(request: Mapping[str, Any]) -> str:
    """Why Ray cannot be started here, "" if it can."""
    if len(place := _place(request)) > MAX_PLACE:
        return f"RAY_TMPDIR={place} is too long for Ray's sockets: at most {MAX_PLACE} characters"
    return "" if request["is_head"] else unreachable(request)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other start or end of a host's Ray is at work; its folder may be removed inside."""
    lock = folder.parent.with_name(f"{folder.parent.name}.{folder.name}.lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with durable.locked(lock, waiting="which starts or ends Ray here"):
        try:
            yield
        finally:
            lock.unlink()


def _require_reader() -> None:
    """Raise BrokenPipeError if the command that asked was interrupted, and no longer reads our answer."""
    output = select.poll()
    output.register(1, 0)
    if output.poll(0):
        raise BrokenPipeError("the command that wanted it has ended")


def _launch(folder: Path, request: Mapping[str, Any]) -> dict[str, Any]:
    """Start Ray under a supervisor that no connection ends, and record it."""
    _require_reader()
    temporary = tempfile.mkdtemp(prefix=RAY_FOLDER, dir=_place(request))
    environment: dict[str, str | None] = {
        **request["environment"],
        "RAY_USAGE_STATS_ENABLED": "0",
        AUTH_MODE: "token",
        AUTH_TOKEN_PATH: str(folder.parent / TOKEN),
        AUTH_TOKEN: None,  # of another cluster
        "RAY_ADDRESS": None,
    }
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limits[0] < OPEN_FILES:
        most = OPEN_FILES if limits[1] == resource.RLIM_INFINITY else min(OPEN_FILES, limits[1])
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    log = prepare_log(folder / "ray.log", "Ray")
    lock = durable.try_lock(log)
    if lock is None:
        raise BlockingIOError(f"{log} is locked by another start of this cluster")
    settings = {
        "grace_seconds": GRACE_SECONDS,
        "stop_seconds": 0,
        "folder": None,  # its logs outlive a failure
        "detached": {"stem": str(folder / "ray"), "unwatched_seconds": float("inf")},
    }
    options = ["--block", "--disable-usage-stats", f"--temp-dir={temporary}/{RAY}", *request["options"]]
    if request["is_head"]:  # one of Ray's own may be taken, and with it all would end
        options.append(f"--ray-client-server-port={free_ports(request['address'])[0]}")
    with os.fdopen(lock):
        os.ftruncate(lock, 0)
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options]
        pid = start_supervisor(command, log, [lock], settings, environment).pid
    record = {
        "pid": pid,
        "start_time": stat_fields(pid)[19],
        "boot": BOOT.read_text().strip(),
        "started_at": time.time(),
        "hostname": platform.node(),
        "folder": temporary,
        **{name: request[name] for name in ("address", "interface", "head_address")},
    }
    durable.write_atomically(folder / RECORD, json.dumps(record))
    return record


def running(folder: Path) -> dict[str, Any] | None:
    """The record of the Ray that this folder's last start left running; None if it has ended."""
    record = _read_record(folder)
    return record if record is not None and _is_alive(record) else None


def _was_ended(folder: Path, record: Mapping[str, Any]) -> bool:
    """Whether another command ends the start of a record, or has removed it."""
    try:
        state = json.loads((folder / "ray.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        state = {}
    return state.get("stopping") == "requested" or _read_record(folder) != record


def _read_record(folder: Path) -> dict[str, Any] | None:
    with contextlib.suppress(FileNotFoundError):
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        assert isinstance(record, dict)
        return record
    return None


def _is_alive(record: Mapping[str, Any]) -> bool:
    """Whether the very process of a record lives; after a restart of the machine, another may have its pid."""
    fields = stat_fields(record["pid"])
    return (
        record["boot"] == BOOT.read_text().strip()
        and bool(fields)
        and fields[0] != "Z"
        and fields[19] == record["start_time"]
    )


def _has_started(record: Mapping[str, Any], deadline: float) -> bool:
    while _is_alive(record) and time.monotonic() < deadline:
        if (Path(record["folder"]) / RAY / STARTED).exists():
            return True
        time.sleep(POLL_SECONDS)
    return False


def _nodes(request: Mapping[str, Any]) -> dict[str, Any]:
    """The nodes that the cluster's head knows, asked in a process of its own."""
    token = clusters_folder() / request["cluster"] / TOKEN
    environment = {**os.environ, AUTH_MODE: "token", AUTH_TOKEN_PATH: str(token)}
    environment.pop(AUTH_TOKEN, None)
    try:
        return {"nodes": ask_cluster(request["head_address"], request["seconds"], environment).nodes}
    except WorkerDied as error:
        return {"problem": str(error)}


def _status(request: Mapping[str, Any]) -> dict[str, Any]:
    """What runs here, or how it ended, and whether the head can be reached."""
    folder = folder_of(request)
    record = running(folder)
    said: dict[str, Any] = {"running": record}
    if record is None and (last := _read_record(folder)) is not None:
        said["ended"] = {**last, "log": durable.tail(folder / "ray.log", NUM_LINES)}
    if record is not None:
        said["unreachable"] = unreachable(record)
    return said


def _stop(request: Mapping[str, Any]) -> dict[str, Any]:
    """End what was started here and remove what it left; other processes are not touched."""
    folder = folder_of(request)
    with _alone(folder):
        record = _read_record(folder)
        if record is None:
            _remove(folder)  # what a start left that failed before Ray
            return {"ended": None}
        was_alive = _is_alive(record)
        num_processes = 1 + len(descendants(record["pid"])) if was_alive else 0
        if not _end(folder, record):
            return {"problem": f"its processes under pid {record['pid']} did not end within {END_SECONDS:g} s"}
        _remove(folder)
        return {"ended": record["started_at"], "num_processes": num_processes, "was_alive": was_alive}


def _remove(folder: Path) -> None:
    """Remove what a host's start left, and with the last host's the cluster's token."""
    _forget(folder)
    with contextlib.suppress(OSError):  # another host of the cluster still uses it: its home is shared
        folder.rmdir()
        names = {path.name for path in folder.parent.iterdir()}
        if names <= {ADDRESS, TOKEN}:
            for name in names:
                (folder.parent / name).unlink()
            folder.parent.rmdir()


def _end(folder: Path, record: Mapping[str, Any]) -> bool:
    """End the supervisor and all below it; False if it does not."""
    for number, seconds in ((signal.SIGTERM, END_SECONDS), (signal.SIGQUIT, KILLED_SECONDS)):
        deadline = time.monotonic() + seconds
        while _is_alive(record) and time.monotonic() < deadline:
            with contextlib.suppress(ProcessLookupError):
                os.kill(record["pid"], number)
            time.sleep(POLL_SECONDS * 5)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(record["pid"], os.WNOHANG)  # our own child, where this very process started it
    return not _is_alive(record)


def _forget(folder: Path) -> None:
    """Remove the files of an ended Ray: its record, its log, its own folder."""
    if (record := _read_record(folder)) is not None:
        temporary = Path(record["folder"])
        if temporary.name.startswith(RAY_FOLDER) and record["hostname"] == platform.node():
            shutil.rmtree(temporary, ignore_errors=True)
    for name in (RECORD, "ray.log", "ray.json"):
        (folder / name).unlink(missing_ok=True)


def _write_secret(folder: Path, request: Mapping[str, Any]) -> None:
    """Write the cluster's token where only this user reads it, beside the host's folder, which keeps it there."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.parent.chmod(0o700)
    durable.write_atomically(folder.parent / ADDRESS, request["head_address"])
    before = os.umask(0o077)
    try:
        durable.write_atomically(folder.parent / TOKEN, request["token"])
    finally:
        os.umask(before)


def _other_rays(record: Mapping[str, Any] | None) -> list[str]:
    """Raylets of this machine's network that are not below our supervisor, in words."""
    own = {*descendants(record["pid"]), record["pid"]} if record else set()
    found = []
    for process in psutil.process_iter(["pid", "name", "username", "cmdline"]):
        words = process.info["cmdline"] or []
        address = next((w.partition("=")[2] for w in words if w.startswith("--node_ip_address=")), None)
        if process.info["name"] != "raylet" or process.info["pid"] in own or not _is_of_this_network(process.pid):
            continue
        if address is not None and not address.startswith("127."):  # a training's private one
            found.append(f"pid {process.pid} of {process.info['username']} at {address}")
    return found


def _is_of_this_network(pid: int) -> bool:
    """Whether a process is in our network namespace, as far as this user may know."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net")
    return True


def _place(request: Mapping[str, Any]) -> str:
    """A folder in which the path of Ray's sockets is not too long; RAY_TMPDIR of the inventory as it is."""
    if wanted := request["environment"].get("RAY_TMPDIR"):
        return str(wanted)
    place = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    return place if len(place) <= MAX_PLACE else "/tmp"
