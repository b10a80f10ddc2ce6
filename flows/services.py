"""`dapo up` and `dapo down`: a Prefect server and worker in the background.

    STORE/.services/{server,worker}.json   pid, host and address of the last start
                    {server,worker}.lock   held by the service while it runs
                    {server,worker}.log    output since the last start
                    prefect/               PREFECT_HOME of both; nothing outside the store changes

Both run Prefect's own commands in new sessions, without `prefect server start --background`, which
discards the log and does not start again after a power failure. Importing this module is cheap
because Prefect's start-up plugin calls `api_url`. Linux only.
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

import yaml

from dapo_core.errors import ConfigError
from dapo_core.machine.ports import bind_fault, free_ports
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
    from prefect.client.schemas.objects import FlowRun

logger = logging.getLogger(__name__)

DEFAULT_STORE = Path(".dapo")
WORK_POOL = "dapo"
CRASH_AUTOMATION = "dapo: crashed without a heartbeat"
CRASH_AUTOMATION_FILE = Path(__file__).with_name("crashed_runs.yaml")
PREFECT_FILE = "prefect.yaml"
PREFECT = (sys.executable, "-m", "prefect", "--no-prompt")
LOOPBACK, DEFAULT_PORT = "127.0.0.1", 4200
DATABASE_VARIABLES = (
    "PREFECT_SERVER_DATABASE_CONNECTION_URL",
    "PREFECT_API_DATABASE_CONNECTION_URL",
)
# These would point our processes at another server or another Prefect home.
FOREIGN_VARIABLES = {
    *DATABASE_VARIABLES,
    "PREFECT_API_URL",
    "PREFECT_API_KEY",
    "PREFECT_PROFILE",
    "PREFECT_PROFILES_PATH",
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
        """True while the process holds its lock, on any host."""
        return is_locked(self.lock)

    def read(self) -> dict[str, Any]:
        """Return the record of the last start, {} if there is none."""
        try:
            record: dict[str, Any] = json.loads(self.record_path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except ValueError as error:
            raise ServicesError(f"{self.record_path} is damaged ({error}): remove it") from None
        return record

    def start(
        self, command: tuple[str, ...], environment: Mapping[str, str], **record: Any
    ) -> None:
        """Start the command in a new session and record its pid. Raises LockHeld if it runs."""
        with locked(self.lock) as descriptor, open(self.log, "wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(environment),
                pass_fds=[descriptor],  # the service keeps the lock; its children do not inherit it
                start_new_session=True,
                preexec_fn=_restore_signals,
            )
            record |= {"pid": process.pid, "machine": platform.node()}
            write_atomically(self.record_path, json.dumps(record))
        process.returncode = 0  # otherwise Popen warns that the process is still running
        logger.info("%s: started as pid %d", self.name, process.pid)

    def stop(self) -> list[str]:
        """Send SIGTERM, then SIGKILL after STOP_SECONDS; returns what was stopped."""
        if not self.is_running:
            return []
        record = self.read()
        if record["machine"] != platform.node():
            raise ServicesError(
                f"the {self.name} was started on {record['machine']}: run the command there"
            )
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.kill(record["pid"], number)
            if wait_until(lambda: not self.is_running, STOP_SECONDS):
                return [f"{self.name}, pid {record['pid']}"]
        raise ServicesError(f"the {self.name}, pid {record['pid']}, did not exit after SIGKILL")

    def wait_until(self, check: Callable[[], bool], problem: str) -> None:
        """Wait until the check is true; raises ServicesError with the end of the log otherwise."""
        is_over = wait_until(lambda: not self.is_running or check(), START_SECONDS)
        if is_over and self.is_running:
            return
        why = "its process exited" if is_over else f"timed out after {START_SECONDS:.0f} s"
        raise ServicesError(
            f"the {self.name} {problem}: {why}. {self.log} "
            f"ends:\n{indented(tail(self.log, NUM_LOG_LINES))}"
        )


class Services:
    """The server and the worker of a store."""

    def __init__(self, store: Path) -> None:
        self.folder = store.resolve() / ".services"
        self.home = self.folder / "prefect"
        self.server = Service(self.folder, "server")
        self.worker = Service(self.folder, "worker")

    def command(self, words: str) -> str:
        """Return `dapo WORDS` with the --store option."""
        return f"dapo {words}{store_option(self.folder.parent)}"

    @property
    def api_url(self) -> str:
        """The API address, on this host, of the server that was started last."""
        return str(self.server.read()["api_url"])

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Lock these services against other `dapo up` and `dapo down` commands."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with locked(self.folder / "lock"):
                yield
        except LockHeld as error:
            raise ServicesError(
                f"another `dapo up` or `dapo down` is running: {error}; wait for it"
            ) from None
        except (FileExistsError, NotADirectoryError, PermissionError) as error:
            raise ServicesError(
                f"cannot write {error.filename}: {error.strerror}; set --store to a writable folder"
            ) from None

    def environment(self, **more: str) -> dict[str, str]:
        """Return the services' environment: the user's, without settings of another server."""
        inherited = {
            name: value for name, value in os.environ.items() if name not in FOREIGN_VARIABLES
        }
        environment = {**inherited, "PREFECT_HOME": str(self.home), "PYTHONUNBUFFERED": "1", **more}
        environment |= dict.fromkeys(AUTH_VARIABLES, auth) if (auth := auth_string()) else {}
        apply_prefect_settings(environment)
        return environment

    def client(self) -> AbstractContextManager[SyncPrefectClient]:
        """Return a client of the server as a context manager."""
        os.environ["PREFECT_HOME"] = str(self.home)  # read when Prefect is imported
        return connected(self.api_url)

    def answers(self) -> bool:
        """True if this store's server answers, rather than another one on the same port."""
        record = self.server.read()
        if record["machine"] == platform.node() and not is_listening(record["pid"], record["port"]):
            return False
        return is_healthy(self.api_url)


def store_option(store: Path) -> str:
    """Return the --store option for a command, "" for the default store."""
    is_default = store.resolve() == DEFAULT_STORE.resolve()
    return "" if is_default else f" --store {shlex.quote(str(store))}"


def api_url(store: Path = DEFAULT_STORE) -> str | None:
    """Return the API address of the store's server, None if it is not running."""
    services = Services(store)
    return services.api_url if services.server.is_running else None


def bring_up(
    store: Path,
    project: Path,
    *,
    host: str | None = None,
    port: int | None = None,
    database: str | None = None,
) -> Services:
    """Start server and worker unless they run, register the deployments, and wait for both."""
    services = Services(store)
    deployments = read_deployments(project)  # raises before anything starts
    with services.changing():
        last = services.server.read()
        if not services.server.is_running:
            _start_server(services, host, port, database)
        elif not {host, port} <= {None, last["host"], last["port"]}:
            raise ServicesError(
                f"the server runs at {services.api_url}; run `{services.command('down')}` to "
                "change its address"
            )
        services.server.wait_until(services.answers, "does not respond")
        logger.info("server: ready at %s", services.api_url)
        with services.client() as client:
            create_pool_and_automation(client)
            _start_worker(services)
            logger.info("deployments: registering %d, up to a minute", len(deployments))
            deploy(project, services.environment(PREFECT_API_URL=services.api_url))
            logger.info("deployments: registered")
            services.worker.wait_until(lambda: bool(online_workers(client)), "is not online")
            logger.info("worker: online")
    return services


def take_down(store: Path, cancel: bool) -> list[str]:
    """Stop worker and server; returns what was stopped. Refuses while flow runs are active."""
    services = Services(store)
    if not services.folder.is_dir():
        return []
    with services.changing():
        if services.server.is_running and is_healthy(services.api_url):
            with services.client() as client:
                _end_flow_runs(services, client, cancel)
        elif services.worker.is_running and not cancel:
            raise ServicesError(
                "the server does not respond, so its active flow runs are unknown: "
                f"`{services.command('up')}` restarts it; `{services.command('down --cancel')}` "
                "stops the worker and everything it runs"
            )
        return services.worker.stop() + services.server.stop()


def wait_until(check: Callable[[], object], seconds: float) -> bool:
    """Poll until the check is true; returns False after `seconds`."""
    deadline = time.monotonic() + seconds
    while not check():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def indented(lines: list[str]) -> str:
    """Format log lines to follow a message."""
    return "\n".join(f"  | {line}" for line in lines) or "  | (no output)"


def read_deployments(project: Path) -> list[dict[str, Any]]:
    """Return the deployments in the project's prefect.yaml; raises ConfigError if unreadable."""
    path = project / PREFECT_FILE
    if not path.is_file():
        raise ConfigError(f"no {PREFECT_FILE} in {project}: run this in the project directory")
    try:
        return list(yaml.safe_load(path.read_text(encoding="utf-8"))["deployments"])
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} has no readable deployments: {type(error).__name__}: {error}"
        ) from None


def deploy(project: Path, environment: Mapping[str, str]) -> None:
    """Register the deployments in prefect.yaml; raises ServicesError with Prefect's output."""
    done = subprocess.run(
        [*PREFECT, "deploy", "--all"],
        cwd=project,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        output = indented((done.stdout + done.stderr).splitlines()[-NUM_LOG_LINES:])
        raise ServicesError(
            f"`prefect deploy --all` failed with exit code {done.returncode} in "
            f"{project}:\n{output}"
        )


def create_pool_and_automation(client: SyncPrefectClient) -> None:
    """Create the work pool and the automation that marks dead flow runs, unless they exist."""
    from prefect.automations import AutomationCore
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists

    with contextlib.suppress(ObjectAlreadyExists):
        client.create_work_pool(WorkPoolCreate(name=WORK_POOL, type="process"))
    automation = AutomationCore.model_validate(
        yaml.safe_load(CRASH_AUTOMATION_FILE.read_text(encoding="utf-8"))
    )
    if not client.read_automations_by_name(CRASH_AUTOMATION):
        client.create_automation(automation)


def online_workers(client: SyncPrefectClient) -> list[str]:
    """Return the names of online workers in our pool."""
    return [
        each.name
        for each in client.read_workers_for_work_pool(WORK_POOL)
        if each.status == "ONLINE"
    ]


def active_runs(client: SyncPrefectClient) -> list[FlowRun]:
    """Return started, unended flow runs: those of our pool, and our flows' without a pool."""
    from prefect.client.schemas.filters import FlowFilter, FlowRunFilter, WorkPoolFilter

    state = FlowRunFilter.model_validate({"state": {"type": {"any_": ACTIVE_STATES}}})
    pool = WorkPoolFilter.model_validate({"name": {"any_": [WORK_POOL]}})
    trigger = yaml.safe_load(CRASH_AUTOMATION_FILE.read_text(encoding="utf-8"))["trigger"]
    flows = FlowFilter.model_validate(
        {"name": {"any_": trigger["match_related"]["prefect.resource.name"]}}
    )
    pooled = client.read_flow_runs(flow_run_filter=state, work_pool_filter=pool)
    own = client.read_flow_runs(flow_run_filter=state, flow_filter=flows)
    return [*pooled, *(run for run in own if run.work_pool_name is None)]


def _start_server(
    services: Services, host: str | None, port: int | None, database: str | None
) -> None:
    last = services.server.read()
    kind = database.partition(":")[0] if database else "sqlite"
    if database is None and last.get("database", kind) != kind:
        raise ConfigError(
            f"this store's server uses a {last['database']} database: give its URL with --database "
            f"or {DATABASE_VARIABLES[0]}, or use --database sqlite for a file in the store"
        )
    is_given, host = host is not None, host or last.get("host", LOOPBACK)
    if not is_loopback(host) and not auth_string():
        source = (
            f"--host {host}"
            if is_given
            else f"the host {host}, used by the last `dapo up` of this store,"
        )
        other = "" if is_given else f"; or use `{services.command(f'up --host {LOOPBACK}')}`"
        raise ConfigError(
            f"{source} is reachable from other machines, and anyone who can reach a Prefect server "
            f"without a password can run code as you: export {AUTH_VARIABLES[1]}=USER:PASSWORD, "
            f"also for clients{other}"
        )
    port = port or _choose_port(host, last.get("port", DEFAULT_PORT))
    api_url = f"http://{LOOPBACK if host == '0.0.0.0' else host}:{port}/api"
    page_url = f"http://{platform.node() if host == '0.0.0.0' else host}:{port}"
    environment = services.environment(
        PREFECT_API_URL=api_url, PREFECT_SERVER_UI_API_URL=f"{page_url}/api"
    )
    if not auth_string():  # any web page in a local browser could read data and start flow runs
        here = (f"http://{LOOPBACK}:{port}", f"http://localhost:{port}")
        own_pages = dict.fromkeys((page_url, *here))
        environment.setdefault("PREFECT_SERVER_CORS_ALLOWED_ORIGINS", ",".join(own_pages))
        environment.setdefault("PREFECT_SERVER_CSRF_PROTECTION_ENABLED", "true")
    if database not in (None, "sqlite"):  # not on the command line: it may hold a password
        environment[DATABASE_VARIABLES[0]] = str(database)
        add_secret_url(str(database))
    options = ("--host", host, "--port", str(port), "--log-level", "WARNING", "--ui")
    record = {"host": host, "port": port, "database": kind, "page_url": page_url}
    command = (*PREFECT, "server", "start", *options)
    services.server.start(command, environment, api_url=api_url, **record)


def _choose_port(host: str, last: int) -> int:
    """Return the last port if free, else 4200, else any. Prefect reports a wrong host."""
    for port in (last, DEFAULT_PORT):
        if not bind_fault(host, port):
            return port
    with contextlib.suppress(OSError):
        return free_ports(host)[0]
    return DEFAULT_PORT


def _start_worker(services: Services) -> None:
    worker = services.worker
    if worker.is_running and worker.read()["api_url"] != services.api_url:
        logger.info("worker: restarting, since the server's address changed")
        worker.stop()
    if not worker.is_running:
        options = ("--pool", WORK_POOL, "--type", "process", "--name", f"dapo-{platform.node()}")
        environment = services.environment(PREFECT_API_URL=services.api_url)
        worker.start((*PREFECT, "worker", "start", *options), environment, api_url=services.api_url)


def _end_flow_runs(services: Services, client: SyncPrefectClient, cancel: bool) -> None:
    """Cancel active flow runs and wait for them; raises ServicesError for runs to keep."""
    from prefect.states import Cancelled, Cancelling

    active = active_runs(client)
    described = {
        run.id: f"{run.name} ({run.state_name} since {run.start_time}), id {run.id}"
        for run in active
    }
    in_terminals = [described[run.id] for run in active if run.work_pool_name is None]
    if in_terminals:
        raise ServicesError(
            "`dapo run` uses this server:\n  "
            + "\n  ".join(in_terminals)
            + "\nwait, or press Ctrl-C in its terminal: training then writes a checkpoint to "
            "resume from. A run whose process is gone becomes Crashed within minutes; `prefect "
            "flow-run delete ID` removes it at once"
        )
    if active and not cancel:
        raise ServicesError(
            "active flow runs would be killed with the worker:\n  "
            + "\n  ".join(described.values())
            + f"\nwait for them, or run `{services.command('down --cancel')}`: training then "
            "writes a last checkpoint"
        )
    for flow_run, description in described.items():
        logger.info("cancelling %s", description)
        client.set_flow_run_state(flow_run, Cancelling(message="dapo down --cancel"), force=True)
    if services.worker.is_running:
        wait_until(lambda: not active_runs(client), CANCEL_SECONDS)
    for run in active_runs(client):
        client.set_flow_run_state(
            run.id, Cancelled(message="dapo down: the worker was stopped"), force=True
        )


def _restore_signals() -> None:
    """Reset signals that a shell ignores for background commands: they must stop the worker."""
    for number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
