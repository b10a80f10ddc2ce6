"""The node's side of `dapo cluster`, run from the node's own copy of the project.

    ~/.dapo/clusters/HEAD_PORT/HOST/record.json    the supervisor of the running Ray, its interface
                                    ray.log        Ray's output; locked while the supervisor lives
    ~/.dapo/clusters/HEAD_PORT.HOST.lock           locked while Ray is being started or stopped

Ray runs in the foreground under the supervisor of tasks/processes, which ends every process below
it, daemons included. Sessions and sockets are in a temporary folder that is removed with it.
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
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

import durable
from dapo_core.cluster.room import ask_cluster
from dapo_core.cluster.started import (
    ADDRESS,
    AUTH_MODE,
    AUTH_TOKEN,
    AUTH_TOKEN_PATH,
    TOKEN,
    clusters_folder,
)
from dapo_core.errors import WorkerDied
from dapo_core.machine.ports import free_ports
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
TEMP_PREFIX = "dapo-node-"
RAY = "ray"  # world-accessible, as Ray makes it, inside a private folder
STARTED = "ray_current_cluster"  # Ray writes it into its folder once the node has started
BOOT = Path("/proc/sys/kernel/random/boot_id")
DEVICE_FILES = {"npu": "/dev/davinci[0-9]*", "cuda": "/dev/nvidia[0-9]*"}
MAX_ATTEMPTS = 3
RETRY_SECONDS = 1.0  # before the second attempt, twice that before the third
MAX_TEMP_CHARACTERS = 20  # longer paths exceed the limit of Ray's sockets
GRACE_SECONDS = 3.0  # for tasks; Ray itself would wait 30
END_SECONDS = 30.0  # for the supervisor to end all processes, SIGKILL included
KILLED_SECONDS = 12.0
NUM_LINES = 12
POLL_SECONDS = 0.1
OPEN_FILES = 65_536


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Dispatch a request to its handler and return the reply."""
    handlers: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
        "look": _look,
        "routes": _routes,
        "start": _start,
        "nodes": _nodes,
        "status": _status,
        "stop": _stop,
    }
    return handlers[request["verb"]](request)


def folder_of(request: Mapping[str, Any]) -> Path:
    """Return the folder with this node's record of a host's Ray."""
    return clusters_folder() / request["cluster"] / request["host"]


def _look(request: Mapping[str, Any]) -> dict[str, Any]:
    """Inspect the node before Ray starts: running Rays, devices, interface, the head's port."""
    record = running(folder_of(request))
    reply: dict[str, Any] = {"running": record, "others": _other_rays(record)}
    if (pattern := DEVICE_FILES.get(request["device"])) is not None:
        reply["num_devices"] = len(glob.glob(pattern))
    try:
        interface = interface_towards(request["targets"], request["interface"], request["own"])
    except NoInterfaceError as error:
        return {**reply, "problem": str(error)}
    reply["interface"] = asdict(interface)
    port = request["port"]
    if request["is_head"] and record is None and (owner := port_owner(interface.address, port)):
        reply["problem"] = f"port {port} is taken by {owner}: stop it, or set another port"
    return reply


def _routes(request: Mapping[str, Any]) -> dict[str, Any]:
    """Check that this node, the head, reaches every other one; returns faults and warnings."""
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
            owned = f"its address {address} belongs to the head itself"
            faults[name] = f"{owned}: set the host's interface"
        elif back is not None and back.name != request["interface"]:
            warnings[name] = (
                f"packets to the head arrive at {request['address']} on {request['interface']} but "
                f"return through {back.name}: if packets are lost, set interface on both hosts"
            )
    return {"faults": faults, "warnings": warnings}


def _start(request: Mapping[str, Any]) -> dict[str, Any]:
    """Start Ray unless it is running; returns its record and the token, or the problem."""
    folder, temporary = folder_of(request), _temp_folder(request)
    try:
        with _locked(folder):
            if (record := running(folder)) is not None:
                return _started_reply(folder, record)
            if len(temporary) > MAX_TEMP_CHARACTERS:
                limit = f"at most {MAX_TEMP_CHARACTERS} characters"
                return {"problem": f"RAY_TMPDIR={temporary} is too long for Ray's sockets: {limit}"}
            if not request["is_head"] and (fault := unreachable(request)):
                return {"problem": fault}
            _remove_files(folder)
            _write_token(folder, request)
            record = _launch(folder, request)
        return _await_start(folder, record, request)
    except OSError as error:
        return {"problem": f"Ray cannot be started (files in {folder} and {temporary}): {error}"}


def _await_start(
    folder: Path, record: dict[str, Any], request: Mapping[str, Any]
) -> dict[str, Any]:
    """Wait until Ray has started; retry if it fails."""
    deadline, log = time.monotonic() + request["start_seconds"], folder / "ray.log"
    for attempt in range(1, MAX_ATTEMPTS + 1):
        if _has_started(record, deadline):
            break
        with _locked(folder):
            if _read_record(folder) != record:
                return {"problem": "another command, such as `dapo cluster down`, cancelled it"}
            lines = durable.tail(log, NUM_LINES)
            _end(record)
            pause = RETRY_SECONDS * attempt
            if attempt == MAX_ATTEMPTS or time.monotonic() + pause >= deadline:
                fault = f"Ray did not start ({attempt} attempts); last lines of {log}:"
                return {"problem": fault, "log": lines}
            time.sleep(pause)
            _remove_files(folder)
            record = _launch(folder, request)
    return _started_reply(folder, record)


def _started_reply(folder: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    token = folder.parent / TOKEN
    return {"running": record, "token": token.read_text(encoding="utf-8"), "token_path": str(token)}


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Exclude other starts and stops of a host's Ray; the block may remove its folder."""
    lock = folder.parent.with_name(f"{folder.parent.name}.{folder.name}.lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with durable.locked(lock, waiting="which starts or stops Ray here"):
        try:
            yield
        finally:
            lock.unlink()


def _require_reader() -> None:
    """Raise BrokenPipeError if the requesting command has ended and reads no reply."""
    output = select.poll()
    output.register(1, 0)
    if output.poll(0):
        raise BrokenPipeError("the requesting command has ended")


def _launch(folder: Path, request: Mapping[str, Any]) -> dict[str, Any]:
    """Start Ray under a supervisor that outlives the connection, and record it."""
    _require_reader()
    temporary = tempfile.mkdtemp(prefix=TEMP_PREFIX, dir=_temp_folder(request))
    environment: dict[str, str | None] = {
        **request["environment"],
        "RAY_USAGE_STATS_ENABLED": "0",
        AUTH_MODE: "token",
        AUTH_TOKEN_PATH: str(folder.parent / TOKEN),
        AUTH_TOKEN: None,  # it may be another cluster's
        "RAY_ADDRESS": None,
    }
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < OPEN_FILES:
        limit = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    log = prepare_log(folder / "ray.log", "Ray")
    lock = durable.try_lock(log)
    if lock is None:
        raise BlockingIOError(f"{log} is locked by another start of this cluster")
    # Ray outlives this command, and its logs a failure.
    settings = {"parent_pid": None, "grace_seconds": GRACE_SECONDS, "folder": None}
    options = ["--block", "--disable-usage-stats", f"--temp-dir={temporary}/{RAY}"]
    options += request["options"]
    if request["is_head"]:  # Ray's default port may be taken, and the head would fail
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
    """Return the record of the Ray that was started with this folder; None if it is not running."""
    record = _read_record(folder)
    return record if record is not None and _is_alive(record) else None


def _read_record(folder: Path) -> dict[str, Any] | None:
    with contextlib.suppress(FileNotFoundError):
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        assert isinstance(record, dict)
        return record
    return None


def _is_alive(record: Mapping[str, Any]) -> bool:
    """True if the recorded process itself is alive; pids are reused, also after a reboot."""
    fields = stat_fields(record["pid"])
    if not fields or fields[0] == "Z" or fields[19] != record["start_time"]:
        return False
    return bool(record["boot"] == BOOT.read_text().strip())


def _has_started(record: Mapping[str, Any], deadline: float) -> bool:
    while _is_alive(record) and time.monotonic() < deadline:
        if (Path(record["folder"]) / RAY / STARTED).exists():
            return True
        time.sleep(POLL_SECONDS)
    return False


def _nodes(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nodes that the head knows, from a child process."""
    token = clusters_folder() / request["cluster"] / TOKEN
    environment = {**os.environ, AUTH_MODE: "token", AUTH_TOKEN_PATH: str(token)}
    environment.pop(AUTH_TOKEN, None)
    try:
        room = ask_cluster(request["head_address"], request["seconds"], environment)
        return {"nodes": room.nodes}
    except WorkerDied as error:
        return {"problem": str(error)}


def _status(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the running Ray and whether it reaches the head, or how the last one ended."""
    folder = folder_of(request)
    if (record := running(folder)) is not None:
        return {"running": record, "unreachable": unreachable(record)}
    if (last := _read_record(folder)) is not None:
        log = durable.tail(folder / "ray.log", NUM_LINES)
        return {"running": None, "ended": {**last, "log": log}}
    return {"running": None}


def _stop(request: Mapping[str, Any]) -> dict[str, Any]:
    """End the Ray that was started here and remove its files; no other process is touched."""
    folder = folder_of(request)
    with _locked(folder):
        record = _read_record(folder)
        if record is None:
            _remove_folder(folder)  # a start may have failed before Ray
            return {"ended": None}
        was_alive = _is_alive(record)
        num_processes = 1 + len(descendants(record["pid"])) if was_alive else 0
        if not _end(record):
            left = f"the processes below pid {record['pid']}"
            return {"problem": f"{left} did not end within {END_SECONDS:g} s"}
        _remove_folder(folder)
        ended = record["started_at"]
        return {"ended": ended, "num_processes": num_processes, "was_alive": was_alive}


def _remove_folder(folder: Path) -> None:
    """Remove a host's folder, and with the last host's the cluster's token."""
    _remove_files(folder)
    with contextlib.suppress(OSError):  # the home is shared, and another host still uses it
        folder.rmdir()
        names = {path.name for path in folder.parent.iterdir()}
        if names <= {ADDRESS, TOKEN}:
            for name in names:
                (folder.parent / name).unlink()
            folder.parent.rmdir()


def _end(record: Mapping[str, Any]) -> bool:
    """End the supervisor and every process below it; False on failure."""
    for number, seconds in ((signal.SIGTERM, END_SECONDS), (signal.SIGQUIT, KILLED_SECONDS)):
        deadline = time.monotonic() + seconds
        while _is_alive(record) and time.monotonic() < deadline:
            with contextlib.suppress(ProcessLookupError):
                os.kill(record["pid"], number)
            time.sleep(POLL_SECONDS * 5)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(record["pid"], os.WNOHANG)  # it is our child if this process started it
    return not _is_alive(record)


def _remove_files(folder: Path) -> None:
    """Remove the files of a Ray that has ended: its record, log and temporary folder."""
    if (record := _read_record(folder)) is not None:
        temporary = Path(record["folder"])
        if temporary.name.startswith(TEMP_PREFIX) and record["hostname"] == platform.node():
            shutil.rmtree(temporary, ignore_errors=True)
    for name in (RECORD, "ray.log"):
        (folder / name).unlink(missing_ok=True)


def _write_token(folder: Path, request: Mapping[str, Any]) -> None:
    """Write the cluster's address and token into its folder, which only this user can read."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.parent.chmod(0o700)
    durable.write_atomically(folder.parent / ADDRESS, request["head_address"])
    previous = os.umask(0o077)
    try:
        durable.write_atomically(folder.parent / TOKEN, request["token"])
    finally:
        os.umask(previous)


def _other_rays(record: Mapping[str, Any] | None) -> list[str]:
    """Describe the raylets of this machine's network that our supervisor did not start."""
    own = {*descendants(record["pid"]), record["pid"]} if record else set()
    found = []
    for process in psutil.process_iter(["name", "username", "cmdline"]):
        if process.info["name"] == "raylet" and process.pid not in own:
            options = dict(word.partition("=")[::2] for word in process.info["cmdline"] or ())
            address = options.get("--node_ip_address", "127.")  # loopback: a training's own Ray
            if not address.startswith("127.") and _shares_network(process.pid):
                found.append(f"pid {process.pid} of {process.info['username']} at {address}")
    return found


def _shares_network(pid: int) -> bool:
    """True if a process is in our network namespace, or this user may not know."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net")
    return True


def _temp_folder(request: Mapping[str, Any]) -> str:
    """Return the inventory's RAY_TMPDIR, or a temporary folder short enough for Ray's sockets."""
    if configured := request["environment"].get("RAY_TMPDIR"):
        return str(configured)
    default = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    return default if len(default) <= MAX_TEMP_CHARACTERS else "/tmp"
