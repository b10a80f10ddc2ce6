"""`dapo up` and `dapo down`: a Prefect server and a worker that outlive the command that starts them.

    STORE/.services/server.json, worker.json   pid, machine and address of the last start
                    server.lock, worker.lock   locked by the service itself until it ends
                    server.log, worker.log     what it wrote since its last start
                    prefect/                   PREFECT_HOME of both: nothing outside the store is touched

Both are Prefect's own commands in a session of their own. `prefect server start --background` is not used: it
discards the server's log and refuses to start after a power cut, and `prefect server stop` signals whatever
process has the pid by then. Light to import, since Prefect's startup plugin asks `api_url`. Linux only.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import yaml

from dapo_core.errors import ConfigError
from dapo_core.ports import bind_fault, free_ports
from durable import LockHeld, is_locked, locked, tail, write_atomically
from flows.prefect_access import (
    AUTH_VARIABLES,
    ServicesError,
    auth_string,
    connected,
    is_healthy,
    is_listening,
    is_loopback,
)
from flows.prefect_settings import apply_prefect_settings
from redaction import add_secret_url

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

logger = logging.getLogger(__name__)

DEFAULT_STORE = Path(".dapo")
WORK_POOL = "dapo"
CRASH_AUTOMATION = "dapo: crashed without a heartbeat"
CRASH_AUTOMATION_FILE = Path(__file__).with_name("crashed_runs.yaml")
PREFECT_FILE = "prefect.yaml"
PREFECT = (sys.executable, "-m", "prefect", "--no-prompt")
LOOPBACK, DEFAULT_PORT = "127.0.0.1", 4200
DATABASE_VARIABLES = ("PREFECT_SERVER_DATABASE_CONNECTION_URL", "PREFECT_API_DATABASE_CONNECTION_URL")
# They would lead our processes to another server, or to settings of another home.
FOREIGN_VARIABLES = {
    *DATABASE_VARIABLES,
    *("PREFECT_API_URL", "PREFECT_API_KEY", "PREFECT_PROFILE", "PREFECT_PROFILES_PATH"),
}
ACTIVE_STATES = ["PENDING", "RUNNING", "CANCELLING"]
START_SECONDS = 180.0
STOP_SECONDS = 20.0
CANCEL_SECONDS = 180.0  # training writes a last checkpoint within flow.stop_seconds
POLL_SECONDS = 0.25
NUM_LOG_LINES = 20


class Service:
    """The server or the worker of a store."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self.lock = folder / f"{name}.lock"
        self.record_path = folder / f"{name}.json"

    @property
    def is_running(self) -> bool:
        """True while the process holds its lock, on whichever machine it runs."""
        return is_locked(self.lock)

    def read(self) -> dict[str, Any]:
        """The record of the last start, {} if there was none."""
        try:
            record: dict[str, Any] = json.loads(self.record_path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except ValueError as error:
            raise ServicesError(f"{self.record_path} is damaged ({error}): remove it") from None
        return record

    def start(self, command: tuple[str, ...], environment: Mapping[str, str], **record: Any) -> None:
        """Start the command in a session of its own and record its pid. Raises LockHeld when one is running."""
        with locked(self.lock) as descriptor, open(self.log, "wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(environment),
                pass_fds=[descriptor],  # keeps the lock; the children of the service do not inherit it
                start_new_session=True,
                preexec_fn=_restore_signals,
            )
            record |= {"pid": process.pid, "machine": platform.node()}
            write_atomically(self.record_path, json.dumps(record))
        process.returncode = 0  # it outlives us: without this, Popen warns that it is left running
        logger.info("%s: started as pid %d", self.name, process.pid)

    def stop(self) -> list[str]:
        """End it by SIGTERM, after STOP_SECONDS by SIGKILL; returns a description of what was ended."""
        if not self.is_running:
            return []
        record = self.read()
        if record["machine"] != platform.node():
            raise ServicesError(f"the {self.name} was started on {record['machine']}: type the command there")
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.kill(record["pid"], number)
            if wait_until(lambda: not self.is_running, STOP_SECONDS):
                return [f"{self.name}, pid {record['pid']}"]
        raise ServicesError(f"the {self.name}, pid {record['pid']}, survives SIGKILL")

    def wait_until(self, check: Callable[[], bool], problem: str) -> None:
        """Return once the check is true; raises ServicesError with the end of the log if it never is."""
        if not wait_until(lambda: not self.is_running or check(), START_SECONDS) or not self.is_running:
            why = f"not within {START_SECONDS:.0f} s" if self.is_running else "its process ended"
            raise ServicesError(
                f"the {self.name} {problem}: {why}. {self.log} ends:\n{indented(tail(self.log, NUM_LOG_LINES))}"
            )


class Services:
    """The server and the worker of a store."""

    def __init__(self, store: Path) -> None:
        self.folder = store.resolve() / ".services"
        self.home = self.folder / "prefect"
        self.server = Service(self.folder, "server")
        self.worker = Service(self.folder, "worker")

    def command(self, words: str) -> str:
        """`dapo WORDS` for this store, as it can be typed in the current directory."""
        return f"dapo {words}{store_option(self.folder.parent)}"

    @property
    def api_url(self) -> str:
        """Where programs on this machine reach the server that was started last."""
        return str(self.server.read()["api_url"])

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Keep other commands from starting and stopping these services for the block."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with locked(self.folder / "lock"):
                yield
        except LockHeld as error:
            raise ServicesError(f"another `dapo up` or `dapo down` is running: {error}; wait for it") from None
        except (FileExistsError, NotADirectoryError, PermissionError) as error:
            raise ServicesError(
                f"{error.filename} cannot be written: {error.strerror}; give --store a folder you may write"
            ) from None

    def environment(self, **more: str) -> dict[str, str]:
        """The environment of the services' processes: the user's own, without another server's settings."""
        inherited = {name: value for name, value in os.environ.items() if name not in FOREIGN_VARIABLES}
        environment = {**inherited, "PREFECT_HOME": str(self.home), "PYTHONUNBUFFERED": "1", **more}
        environment |= dict.fromkeys(AUTH_VARIABLES, auth) if (auth := auth_string()) else {}
        apply_prefect_settings(environment)
        return environment

    def client(self) -> AbstractContextManager[SyncPrefectClient]:
        """A client of the server for the length of a block."""
        os.environ["PREFECT_HOME"] = str(self.home)  # read when Prefect is imported
        return connected(self.api_url)

    def answers(self) -> bool:
        """True if the store's own server answers, not another one that took the port first."""
        record = self.server.read()
        is_here = record["machine"] == platform.node()
        return (not is_here or is_listening(record["pid"], record["port"])) and is_healthy(self.api_url)


def store_option(store: Path) -> str:
    """The option that names the store to a command, "" for the default."""
    return "" if store.resolve() == DEFAULT_STORE.resolve() else f" --store {shlex.quote(str(store))}"


def api_url(store: Path = DEFAULT_STORE) -> str | None:
    """The address of the store's running server, None when there is none."""
    services = Services(store)
    return services.api_url if services.server.is_running else None


def bring_up(
    store: Path, project: Path, *, host: str | None = None, port: int | None = None, database: str | None = None
) -> Services:
    """Start what is not running, register the deployments, and return once server and worker answer."""
    services = Services(store)
    read_deployments(project)  # fails before anything starts
    with services.changing():
        last = services.server.read()
        if not services.server.is_running:
            _start_server(services, host, port, database)
        elif not {host, port} <= {None, last["host"], last["port"]}:
            raise ServicesError(
                f"the server runs at {services.api_url}; type `{services.command('down')}` before you move it"
            )
        services.server.wait_until(services.answers, "does not answer")
        logger.info("server: answers at %s", services.api_url)
        with services.client() as client:
            create_pool_and_automation(client)
            _start_worker(services)
            deploy(project, services.environment(PREFECT_API_URL=services.api_url))
            logger.info("deployments: registered")
            services.worker.wait_until(lambda: bool(online_workers(client)), "is not online")
            logger.info("worker: online")
    return services


def take_down(store: Path, cancel: bool) -> list[str]:
    """End worker and server and describe what was ended. Raises ServicesError while flow runs are active."""
    services = Services(store)
    if not services.folder.is_dir():
        return []
    with services.changing():
        if services.server.is_running and is_healthy(services.api_url):
            with services.client() as client:
                _end_flow_runs(services, client, cancel)
        elif services.worker.is_running and not cancel:
            raise ServicesError(
                "the server does not answer, so its active flow runs are unknown: "
                f"`{services.command('up')}` starts it again, and `{services.command('down --cancel')}` ends the "
                "worker with whatever it runs"
            )
        return services.worker.stop() + services.server.stop()


def wait_until(check: Callable[[], object], seconds: float) -> bool:
    """True as soon as the check is true, False if it is not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not check():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def indented(lines: list[str]) -> str:
    """The lines of a log, indented to follow a message."""
    return "\n".join(f"  | {line}" for line in lines) or "  | (it wrote nothing)"


def read_deployments(project: Path) -> list[dict[str, Any]]:
    """The deployments in the project's prefect.yaml. Raises ConfigError if they cannot be read."""
    path = project / PREFECT_FILE
    if not path.is_file():
        raise ConfigError(f"no {PREFECT_FILE} in {project}: type this in the project directory")
    try:
        return list(yaml.safe_load(path.read_text(encoding="utf-8"))["deployments"])
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} lists no deployments: {type(error).__name__}: {error}") from None


def deploy(project: Path, environment: Mapping[str, str]) -> None:
    """Register what prefect.yaml describes. Raises ServicesError with Prefect's own output when that fails."""
    command = [*PREFECT, "deploy", "--all"]
    done = subprocess.run(
        command, cwd=project, env=dict(environment), stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode != 0:
        output = indented((done.stdout + done.stderr).splitlines()[-NUM_LOG_LINES:])
        raise ServicesError(
            f"`prefect deploy --all` ended with exit code {done.returncode} in {project}:\n{output}"
        )


def create_pool_and_automation(client: SyncPrefectClient) -> None:
    """Create the work pool and the automation that marks dead flow runs, unless the server has them."""
    from prefect.automations import AutomationCore
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists

    with contextlib.suppress(ObjectAlreadyExists):
        client.create_work_pool(WorkPoolCreate(name=WORK_POOL, type="process"))
    automation = AutomationCore.model_validate(yaml.safe_load(CRASH_AUTOMATION_FILE.read_text(encoding="utf-8")))
    if not client.read_automations_by_name(CRASH_AUTOMATION):
        client.create_automation(automation)


def online_workers(client: SyncPrefectClient) -> list[str]:
    """Names of the workers of our pool that are online."""
    return [each.name for each in client.read_workers_for_work_pool(WORK_POOL) if each.status == "ONLINE"]


def active_runs(client: SyncPrefectClient) -> dict[UUID, str]:
    """The flow runs of our pool that a worker has started and that have not ended: a description by id."""
    from prefect.client.schemas.filters import FlowRunFilter, WorkPoolFilter

    runs = client.read_flow_runs(
        flow_run_filter=FlowRunFilter.model_validate({"state": {"type": {"any_": ACTIVE_STATES}}}),
        work_pool_filter=WorkPoolFilter.model_validate({"name": {"any_": [WORK_POOL]}}),
    )
    return {run.id: f"{run.name} ({run.state_name} since {run.start_time}), id {run.id}" for run in runs}


def _start_server(services: Services, host: str | None, port: int | None, database: str | None) -> None:
    last = services.server.read()
    kind = database.partition(":")[0] if database else "sqlite"
    if database is None and last.get("database", kind) != kind:
        raise ConfigError(
            f"the server of this store keeps its runs in {last['database']}: give its URL with --database or "
            f"{DATABASE_VARIABLES[0]}, or --database sqlite for a file in the store"
        )
    is_typed, host = host is not None, host or last.get("host", LOOPBACK)
    if not is_loopback(host) and not auth_string():
        typed = f"--host {host}" if is_typed else f"the host {host}, kept from the last `dapo up` of this store,"
        other = "" if is_typed else f"; or give another: `{services.command(f'up --host {LOOPBACK}')}`"
        raise ConfigError(
            f"{typed} lets other machines in, and whoever reaches Prefect's server without a password runs code "
            f"as you: export {AUTH_VARIABLES[1]}=USER:PASSWORD first, also where the server is used from{other}"
        )
    port = port or _choose_port(host, last.get("port", DEFAULT_PORT))
    api_url = f"http://{LOOPBACK if host == '0.0.0.0' else host}:{port}/api"
    page_url = f"http://{platform.node() if host == '0.0.0.0' else host}:{port}"
    environment = services.environment(PREFECT_API_URL=api_url, PREFECT_SERVER_UI_API_URL=f"{page_url}/api")
    if not auth_string():  # else the page of any site, in a browser here, could read all and start flow runs
        own_pages = dict.fromkeys((page_url, f"http://{LOOPBACK}:{port}", f"http://localhost:{port}"))
        environment.setdefault("PREFECT_SERVER_CORS_ALLOWED_ORIGINS", ",".join(own_pages))
        environment.setdefault("PREFECT_SERVER_CSRF_PROTECTION_ENABLED", "true")
    if database not in (None, "sqlite"):
        environment[DATABASE_VARIABLES[0]] = str(database)  # not on the command line: it may hold a password
        add_secret_url(str(database))
    options = ("--host", host, "--port", str(port), "--log-level", "WARNING", "--ui")
    record = {"host": host, "port": port, "database": kind, "api_url": api_url, "page_url": page_url}
    services.server.start((*PREFECT, "server", "start", *options), environment, **record)


def _choose_port(host: str, last: int) -> int:
    """The last port if it is free, else 4200, else any free one. Prefect reports a wrong host."""
    for port in (last, DEFAULT_PORT):
        if not bind_fault(host, port):
            return port
    with contextlib.suppress(OSError):
        return free_ports(host)[0]
    return DEFAULT_PORT


def _start_worker(services: Services) -> None:
    worker = services.worker
    if worker.is_running and worker.read()["api_url"] != services.api_url:
        logger.info("worker: restarts, since the server has another address")
        worker.stop()
    if not worker.is_running:
        options = ("--pool", WORK_POOL, "--type", "process", "--name", f"dapo-{platform.node()}")
        environment = services.environment(PREFECT_API_URL=services.api_url)
        worker.start((*PREFECT, "worker", "start", *options), environment, api_url=services.api_url)


def _end_flow_runs(services: Services, client: SyncPrefectClient, cancel: bool) -> None:
    """Cancel active flow runs as Prefect's page does and wait until they have ended, or refuse."""
    from prefect.states import Cancelled, Cancelling

    active = active_runs(client)
    if active and not cancel:
        raise ServicesError(
            "flow runs are active and would end with the worker:\n  " + "\n  ".join(active.values()) + "\n"
            f"wait for them, or type `{services.command('down --cancel')}`: training then writes a checkpoint to "
            "resume from"
        )
    for flow_run, description in active.items():
        logger.info("cancelling %s", description)
        client.set_flow_run_state(flow_run, Cancelling(message="dapo down --cancel"), force=True)
    if services.worker.is_running:
        wait_until(lambda: not active_runs(client), CANCEL_SECONDS)
    for flow_run in active_runs(client):
        client.set_flow_run_state(flow_run, Cancelled(message="dapo down: its worker has ended"), force=True)


def _restore_signals() -> None:
    """Reset the signals that a shell ignores for background commands; else the worker could not be stopped."""
    for number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
