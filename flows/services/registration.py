"""What must be in a Prefect server before a deployment can run: work pool, limit, automation, deployments.

Every function here talks to the server that Prefect's settings name, so set those before this is imported.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from uuid import UUID

import yaml
from prefect.automations import AutomationCore
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterName,
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import FlowRun, StateType, WorkerStatus
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectAlreadyExists
from prefect.states import Cancelling
from prefect.workers.process import ProcessWorker

from flows.services.daemons import tail_of
from flows.services.project import read_deployments
from tasks.serve_model.failure import ServeError
from tasks.training_limit import LIMIT as TRAINING_LIMIT

WORK_POOL = "dapo"
OUR_POOL = WorkPoolFilter(name=WorkPoolFilterName(any_=[WORK_POOL]))
CRASH_AUTOMATION = "dapo: crashed without a heartbeat"
ACTIVE = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING]
POLL_SECONDS = 0.25


@contextlib.contextmanager
def server_client() -> Iterator[SyncPrefectClient]:
    """Yields a client of the server."""
    with get_client(sync_client=True) as client:
        yield client


def ensure_objects(client: SyncPrefectClient) -> None:
    """Have work pool, limit and automation be there; what a user changed in the pool, or disabled, stays."""
    with contextlib.suppress(ObjectAlreadyExists):
        template = ProcessWorker.get_default_base_job_template()
        client.create_work_pool(WorkPoolCreate(name=WORK_POOL, type="process", base_job_template=template))
    client.upsert_global_concurrency_limit_by_name(TRAINING_LIMIT, 1)
    wanted = crash_automation()
    found = client.read_automations_by_name(CRASH_AUTOMATION)
    if not found:
        client.create_automation(wanted)
    for known in found:
        if known.trigger.model_dump(exclude={"id"}) != wanted.trigger.model_dump(exclude={"id"}):
            client.update_automation(known.id, wanted.model_copy(update={"enabled": known.enabled}))


def crash_automation() -> AutomationCore:
    """What marks a flow run as Crashed when its process is gone, which nobody else may be left to tell."""
    content = yaml.safe_load(Path(__file__).with_name("crashed_runs.yaml").read_text(encoding="utf-8"))
    return AutomationCore.model_validate(content)


def registered_deployments(client: SyncPrefectClient, names: Iterable[str]) -> list[DeploymentResponse]:
    """Deployments of these names in our work pool; a server may have others, of strangers."""
    return client.read_deployments(
        deployment_filter=DeploymentFilter(name=DeploymentFilterName(any_=list(names))),
        work_pool_filter=OUR_POOL,
    )


def are_registered(client: SyncPrefectClient, project: Path) -> bool:
    """Whether our work pool has a deployment of each name in prefect.yaml."""
    wanted = {deployment["name"] for deployment in read_deployments(project)}
    return wanted == {deployment.name for deployment in registered_deployments(client, wanted)}


def start_deploying(project: Path, log_path: Path, env: Mapping[str, str]) -> Callable[[float], None]:
    """Register all deployments as `prefect deploy --all` does; returns what waits for its end."""
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    with open(log_path, "wb") as log:
        popen = subprocess.Popen(
            command, cwd=project, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(env)
        )

    def finish(patience_seconds: float) -> None:
        try:
            outcome = f"ended with exit code {popen.wait(patience_seconds)}"
        except subprocess.TimeoutExpired:
            outcome = f"has not ended after {patience_seconds:.0f} s"
        finally:  # an interrupt too: it must not go on behind our back
            popen.kill()
            popen.wait()
        if popen.returncode != 0:
            raise ServeError(
                f"`prefect deploy --all` {outcome} in {project}; {log_path} ends:\n{tail_of(log_path, 30)}"
            )

    return finish


def online_workers(client: SyncPrefectClient, since: float = 0.0) -> list[str]:
    """Names of the workers of our pool that are online and were heard of after `since`, a time in seconds."""
    return [
        worker.name
        for worker in client.read_workers_for_work_pool(WORK_POOL)
        if worker.status == WorkerStatus.ONLINE and _seconds(worker.last_heartbeat_time) >= since
    ]


def active_runs(client: SyncPrefectClient, living: Iterable[str] = ()) -> list[FlowRun]:
    """Flow runs of our pool that a worker has taken up and that have not ended, and the `living`, by id."""
    filters = [FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=ACTIVE)))]
    if ids := [UUID(flow_run) for flow_run in living]:
        filters.append(FlowRunFilter(id=FlowRunFilterId(any_=ids)))
    found = [client.read_flow_runs(flow_run_filter=each, work_pool_filter=OUR_POOL) for each in filters]
    return list({run.id: run for runs in found for run in runs}.values())


@contextlib.contextmanager
def paused_pool(client: SyncPrefectClient) -> Iterator[None]:
    """No flow run of our pool is handed to a worker meanwhile; a pool that was paused already stays so."""
    pools = [pool for pool in client.read_work_pools(work_pool_filter=OUR_POOL) if not pool.is_paused]
    for pool in pools:
        client.update_work_pool(pool.name, WorkPoolUpdate(is_paused=True))
    try:
        yield
    finally:
        for pool in pools:
            client.update_work_pool(pool.name, WorkPoolUpdate(is_paused=False))


def describe_runs(runs: list[FlowRun]) -> str:
    """One line for each flow run: name, state, since when, id."""
    lines = []
    for run in runs:
        since = f", started {run.start_time:%Y-%m-%d %H:%M} UTC" if run.start_time else ""
        lines.append(f"  {run.name} ({run.state_name}{since}), id {run.id}")
    return "\n".join(lines)


def cancel_runs(client: SyncPrefectClient, runs: list[FlowRun], patience_seconds: float) -> list[FlowRun]:
    """Cancel flow runs as Prefect's page does and wait until they ended; returns those that did not in time."""
    for run in runs:
        is_active = run.state_type in ACTIVE  # else it goes on although it is marked as ended
        client.set_flow_run_state(run.id, Cancelling(message="dapo down --cancel"), force=not is_active)
    deadline = time.monotonic() + patience_seconds
    asked = {run.id for run in runs}
    while left := [run for run in active_runs(client) if run.id in asked]:
        if time.monotonic() > deadline:
            return left
        time.sleep(POLL_SECONDS)
    return []


def _seconds(moment: datetime | None) -> float:
    return moment.timestamp() if moment else 0.0
