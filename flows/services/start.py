"""`dapo up` and `dapo down`: bring the services of a store up or down, only as far as they are not there yet.

up:    server -> healthy -> work pool, limit, automation -> worker and deployments side by side
down:  flow runs -> worker -> states of what died with it -> server
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import yaml

from dapo_core.errors import ConfigError
from flows.prefect_server import is_healthy, wait_until_healthy
from flows.prefect_settings import prefect_settings, project_settings
from flows.services.daemons import SERVER, WORKER, Daemon, Services, State
from flows.services.project import project_digest, read_deployments
from tasks.serve_model.command import free_ports
from tasks.serve_model.failure import ServeError

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

logger = logging.getLogger(__name__)

DEFAULT_PORT = 4200
SQLITE = "sqlite"
START_SECONDS = 180.0
STOP_SECONDS = 20.0
CANCEL_SECONDS = 180.0  # training may write a last checkpoint: flow.stop_seconds, and time to tell
POLL_SECONDS = 0.25
PORT_IS_TAKEN = "already in use"
DATABASE_VARIABLES = ("PREFECT_SERVER_DATABASE_CONNECTION_URL", "PREFECT_API_DATABASE_CONNECTION_URL")
PROFILE_VARIABLES = ("PREFECT_PROFILE", "PREFECT_PROFILES_PATH")
# They would lead our processes to another server, or to settings of another home.
FOREIGN_VARIABLES = (*DATABASE_VARIABLES, "PREFECT_API_URL", "PREFECT_API_KEY", *PROFILE_VARIABLES)
FLOW_RUN_VARIABLE = "PREFECT__FLOW_RUN_ID"


@dataclass(frozen=True)
class Wishes:
    """What the user asked for; None keeps what the store's services had before."""

    database: str | None = None
    host: str | None = None
    port: int | None = None


def bring_up(services: Services, project: Path, wishes: Wishes) -> State:
    """Start what does not run, register what changed, and return once the server and the worker answer."""
    if sys.platform != "linux":
        raise ServeError(f"`dapo up` needs Linux, not {sys.platform}; README shows the plain Prefect commands")
    read_deployments(project)  # refused before anything starts
    with services.changing() as state:
        server = _running_server(state, wishes)
        if server:
            logger.info("server: runs")
        else:
            server = _start_server(services, state, wishes)
        use_server(services, state)
        import flows.services.registration  # noqa: F401 - takes seconds, in which the server starts

        server = _wait_until_listening(services, state, wishes, server)
        environment = use_server(services, state)
        wait_until_healthy(state.api_url, lambda: server.is_running, server.tail)
        logger.info("server: healthy")
        _populate(services, state, project, environment, project_digest(project, state.database))
    return state


def take_down(services: Services, cancel: bool) -> list[str]:
    """End worker and server and return what was ended, in words; refuses while flow runs are active."""
    if not services.folder.is_dir():
        return []
    with services.changing() as state:
        is_here = state.machine == socket.gethostname() or any(map(state.running, state.daemons))
        if state.daemons and not is_here:
            raise ServeError(f"the services of {services.folder} were started on {state.machine}: type this there")
        use_server(services, state)
        server = state.running(SERVER)
        if server and is_healthy(state.api_url):
            ended = _end_work(services, state, cancel)
        else:
            if server:
                logger.warning("server: pid %d does not answer; states of flow runs stay as they are", server.pid)
            if (processes := _flow_run_processes(services)) and not cancel:
                raise ServeError(
                    f"{', '.join(_described(processes))} goes on without a server; wait for its end, or type "
                    "`dapo down --cancel`"
                )
            ended = _stop(services, state, WORKER) + _end_flow_runs(_flow_run_processes(services))
        return ended + _stop(services, state, SERVER)


def use_server(services: Services, state: State) -> dict[str, str]:
    """Have Prefect in this process talk to the store's server; returns the environment that does it."""
    environment = worker_env(services, state)
    for name in FOREIGN_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(environment)
    if "prefect" in sys.modules:  # which has read its settings
        from prefect.context import refresh_global_settings_context

        refresh_global_settings_context()
    return environment


def worker_env(services: Services, state: State) -> dict[str, str]:
    """The environment of whatever talks to the store's server: the user's own, without another server's."""
    inherited = {name: value for name, value in os.environ.items() if name not in FOREIGN_VARIABLES}
    settings = prefect_settings(services.home)
    bound_to_home = {name: value for name, value in settings.items() if name not in project_settings()}
    return {**settings, **inherited, **bound_to_home, "PREFECT_API_URL": state.api_url, "PYTHONUNBUFFERED": "1"}


def _running_server(state: State, wishes: Wishes) -> Daemon | None:
    """The server if it runs; raises ServeError when it is not the one that is wished for."""
    server = state.running(SERVER)
    if server:
        told = {"--host": (wishes.host, state.host), "--port": (wishes.port, state.port)}
        if wishes.database is not None:
            told["--database"] = without_password(wishes.database)[0], state.database
        for option, (wish, reality) in told.items():
            if wish is not None and wish != reality:
                raise ServeError(
                    f"the server of this store runs with {option} {reality or SQLITE}, not {wish or SQLITE}; "
                    "type `dapo down` first, or leave the option out"
                )
    return server


def _settle(state: State, wishes: Wishes) -> str:
    """Write into the state how the server is started; returns the database's URL with its password."""
    state.host = wishes.host or state.host
    if wishes.port and not _is_free(state.host, wishes.port):
        raise ServeError(f"port {wishes.port} of {state.host} is taken; leave --port out to get a free one")
    state.port = wishes.port or _choose_port(state.host, state.port)
    if wishes.database is None:
        if state.database_needs_password:
            raise ConfigError(
                f"the server of this store keeps its runs in {state.database}, whose password is not remembered; "
                "give the whole URL with --database, or --database sqlite for a file in the store"
            )
        return state.database
    state.database, state.database_needs_password = without_password(wishes.database)
    return wishes.database if state.database else ""


def without_password(url: str) -> tuple[str, bool]:
    """The database's URL without its password, and whether it had one; "" for SQLite in the store."""
    if url == SQLITE:
        return "", False
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        parsed = make_url(url)
    except ArgumentError:
        raise ConfigError("--database is no URL such as postgresql+asyncpg://user@host/name") from None
    if parsed.drivername not in ("postgresql+asyncpg", "sqlite+aiosqlite"):
        raise ConfigError(
            f"--database begins with {parsed.drivername}; Prefect takes postgresql+asyncpg and sqlite+aiosqlite"
        )
    has_password = parsed.password is not None or "password" in parsed.query
    shown = parsed._replace(password=None).difference_update_query(["password"])
    return shown.render_as_string(hide_password=False), has_password


def _choose_port(host: str, remembered: int) -> int:
    free = (port for port in (remembered, DEFAULT_PORT) if port and _is_free(host, port))
    return next(free, None) or free_ports(host)[0]


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closed server's last connections linger
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise ConfigError(
                f"a server cannot listen at port {port} of {host}: {error.strerror}; --host takes an address of "
                "this machine, --port one above 1023 unless you are root"
            ) from None
    return True


def _start_server(services: Services, state: State, wishes: Wishes) -> Daemon:
    database = _settle(state, wishes)
    options = ["--host", state.host, "--port", str(state.port), "--log-level", "WARNING", "--ui"]
    command = [sys.executable, "-m", "prefect", "--no-prompt", "server", "start", *options]
    env = worker_env(services, state)
    env["PREFECT_SERVER_UI_API_URL"] = f"{state.page_url}/api"
    services.home.mkdir(exist_ok=True)
    (services.home / "logging.yml").write_text(_logging_config(), encoding="utf-8")  # where Prefect looks for it
    if database:
        env[DATABASE_VARIABLES[0]] = database  # in no file and on no command line: it may hold a password
    server = services.start(state, SERVER, command, env)
    logger.info("server: starting as pid %d on %s", server.pid, state.api_url)
    return server


def _wait_until_listening(services: Services, state: State, wishes: Wishes, server: Daemon) -> Daemon:
    """The server once it listens itself: what answers at its port may be somebody else's, who was quicker.

    It is started once more, at another port, when it lost the one that was free a moment before.
    """
    try:
        _wait_for(lambda: _is_listening(server, state.port), server, "the server does not listen")
    except ServeError:
        said = Path(server.log).read_text(encoding="utf-8", errors="replace")  # a traceback follows what matters
        if wishes.port or PORT_IS_TAKEN not in said:
            raise
        state.port = free_ports(state.host)[0]
        server = _start_server(services, state, wishes)
        _wait_for(lambda: _is_listening(server, state.port), server, "the server does not listen")
    return server


def _is_listening(server: Daemon, port: int) -> bool:
    """Whether the server's process, or one below it, has the port."""
    try:
        process = psutil.Process(server.pid)
        family = [process, *process.children(recursive=True)]
        return any(
            each.status == psutil.CONN_LISTEN and each.laddr.port == port
            for member in family
            for each in member.net_connections("tcp")
        )
    except psutil.NoSuchProcess:
        return False


def _logging_config() -> str:
    """Prefect's own logging, without a traceback for each attempt that succeeds when it is made again.

    With SQLite, one at nearly every poll of a worker finds the database locked: 100 MB a day.
    """
    prefect = importlib.util.find_spec("prefect")  # without importing it
    assert prefect is not None
    assert prefect.origin is not None
    config = yaml.safe_load(Path(prefect.origin).with_name("logging").joinpath("logging.yml").read_text("utf-8"))
    config["loggers"]["docket.dependencies"] = {"level": "CRITICAL"}
    return yaml.safe_dump(config)


def _populate(services: Services, state: State, project: Path, env: dict[str, str], digest: str) -> None:
    """Fill the server, then start the worker and register deployments at the same time."""
    from flows.services.registration import (
        WORK_POOL,
        are_registered,
        ensure_objects,
        online_workers,
        server_client,
        start_deploying,
    )

    with server_client() as client:
        ensure_objects(client)
        worker = state.running(WORKER)
        if worker and not _is_told(worker, state.api_url):
            logger.info("worker: pid %d asks at another address than the server's; starting anew", worker.pid)
            worker.stop(STOP_SECONDS)
            worker = None
        if not worker:
            command = [sys.executable, "-m", "prefect", "--no-prompt", "worker", "start"]
            command += ["--pool", WORK_POOL, "--type", "process", "--name", f"dapo-{socket.gethostname()}"]
            worker = services.start(state, WORKER, command, env)
            logger.info("worker: starting as pid %d", worker.pid)
        if digest == state.deployed and are_registered(client, project):
            logger.info("deployments: registered as they are")
        else:
            logger.info("deployments: registering")
            start_deploying(project, services.log_path("deploy"), env)(START_SECONDS)
            state.deployed = digest
            services.write(state)
        _wait_for(lambda: online_workers(client, worker.started_at), worker, "the worker is not online")
        logger.info("worker: online")


def _is_told(worker: Daemon, api_url: str) -> bool:
    """Whether the worker was started for the server at this address; a new server may have got another port."""
    return psutil.Process(worker.pid).environ().get("PREFECT_API_URL") == api_url


def _wait_for(is_there: Callable[[], object], daemon: Daemon, problem: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not is_there():
        if not daemon.is_running or time.monotonic() > deadline:
            why = "its process ended" if not daemon.is_running else f"not within {START_SECONDS:.0f} s"
            raise ServeError(f"{problem}: {why}. {daemon.tail()}")
        time.sleep(POLL_SECONDS)


def _end_work(services: Services, state: State, cancel: bool) -> list[str]:
    """End the worker once no flow run needs it, and set right what says otherwise in the server."""
    from flows.services.registration import paused_pool, server_client

    with server_client() as client, paused_pool(client):
        cancelled = _clear_runs(services, client, cancel, bool(state.running(WORKER)))
        return _stop(services, state, WORKER) + _settle_runs(services, client, cancelled)


def _clear_runs(services: Services, client: SyncPrefectClient, cancel: bool, has_worker: bool) -> set[str]:
    """Make sure that stopping the worker ends nothing unasked; returns ids of flow runs that were cancelled."""
    from flows.services.registration import active_runs, cancel_runs, describe_runs

    runs = active_runs(client, _flow_run_processes(services))
    if runs and not cancel:
        raise ServeError(
            f"flow runs are active and would die with the worker:\n{describe_runs(runs)}\n"
            "wait for them, or type `dapo down --cancel`: training then writes a checkpoint to resume from"
        )
    if runs:
        logger.info("cancelling:\n%s", describe_runs(runs))
        left = cancel_runs(client, runs, CANCEL_SECONDS if has_worker else 0.0)
        if left and has_worker:
            logger.warning("not cancelled after %.0f s:\n%s", CANCEL_SECONDS, describe_runs(left))
    return {str(run.id) for run in runs}


def _settle_runs(services: Services, client: SyncPrefectClient, cancelled: set[str]) -> list[str]:
    """With no worker left to do it: end processes of flow runs, and the state of those that count as active."""
    from prefect.states import Cancelled, Crashed

    from flows.services.registration import active_runs

    runs = active_runs(client)
    ended = _end_flow_runs(_flow_run_processes(services, {str(run.id) for run in runs}))
    for run in runs:
        kind = Cancelled if str(run.id) in cancelled else Crashed
        client.set_flow_run_state(run.id, kind(message="dapo down: no process of it is left"), force=True)
    return ended


def _flow_run_processes(services: Services, flow_runs: Collection[str] = ()) -> dict[str, psutil.Process]:
    """The processes on this machine that execute these flow runs, or any that our worker started; by flow run.

    Told by the environment that a worker hands on, whatever state the server has: a run may be marked as Crashed
    for want of heartbeats, and go on.
    """
    found = {}
    for process in psutil.process_iter():
        try:
            if "prefect.engine" not in process.cmdline():
                continue
            environment = process.environ()
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        flow_run, home = environment.get(FLOW_RUN_VARIABLE), environment.get("PREFECT_HOME")
        if flow_run and (flow_run in flow_runs or (home and Path(home).resolve() == services.home.resolve())):
            found[flow_run] = process
    return found


def _end_flow_runs(processes: Mapping[str, psutil.Process]) -> list[str]:
    """End processes of flow runs, which end what they started; psutil signals none whose pid was given anew."""
    for process in processes.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, stuck = psutil.wait_procs(processes.values(), timeout=STOP_SECONDS)
    for survivor in stuck:
        with contextlib.suppress(psutil.NoSuchProcess):
            survivor.kill()
    return _described(processes)


def _described(processes: Mapping[str, psutil.Process]) -> list[str]:
    return [f"flow run {flow_run}, pid {process.pid}" for flow_run, process in processes.items()]


def _stop(services: Services, state: State, name: str) -> list[str]:
    daemon = state.daemons.pop(name, None)
    ended = [f"{name}, pid {daemon.pid}"] if daemon and daemon.stop(STOP_SECONDS) else []
    services.write(state)
    return ended
