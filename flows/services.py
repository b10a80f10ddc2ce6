"""`dapo up` and `dapo down`: a Prefect server and worker in the background.

If the user's Prefect settings name another server, only the worker is started, and uses that one.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psutil
import yaml

from dapo_core.errors import ConfigError
from dapo_core.machine.ports import bind_fault, free_ports, is_ipv6
from durable import LockHeld, is_locked, locked, tail, write_atomically
from flows.prefect_access import (
    AUTH_VARIABLES,
    ServicesError,
    auth_string,
    configured_api,
    connected,
    is_healthy,
    is_listening,
    is_loopback,
    require_server,
)
from flows.prefect_settings import apply_prefect_settings, no_proxy
from redaction import add_secret_url

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

logger = logging.getLogger(__name__)

DEFAULT_STORE = Path(".dapo")
WORK_POOL = "dapo"  # unless prefect.yaml names another
WORKER = f"dapo-{platform.node()}"
CRASH_AUTOMATION = "dapo: crashed without a heartbeat"
CRASH_AUTOMATION_FILE = Path(__file__).with_name("crashed_runs.yaml")
PREFECT_FILE = "prefect.yaml"
PREFECT = (sys.executable, "-m", "prefect", "--no-prompt")
LOOPBACK, DEFAULT_PORT = "127.0.0.1", 4200
EVERYWHERE = {"0.0.0.0": LOOPBACK, "::": "[::1]"}  # to listen at all addresses, and one of them
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

    def environment_of(self, url: str) -> dict[str, str]:
        """Return the environment of a client of our server, or of the user's."""
        if self.is_own(url):
            return self.environment(PREFECT_API_URL=url)
        environment = {**os.environ, "PREFECT_API_URL": url, "PYTHONUNBUFFERED": "1"}
        apply_prefect_settings(environment)
        return environment

    def is_own(self, url: str | None) -> bool:
        """True for the address of the server that was started last."""
        return self.server.read().get("api_url") == url

    def client(self, url: str) -> AbstractContextManager[SyncPrefectClient]:
        """Return a client of a server as a context manager."""
        os.environ["no_proxy"] = no_proxy(os.environ)
        if self.is_own(url):
            os.environ["PREFECT_HOME"] = str(self.home)  # read when Prefect is imported
        return connected(url)

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
) -> str:
    """Start server and worker unless they run, and register the deployments; returns the API URL.

    If the user's Prefect settings name a server, that one is used and none is started.
    """
    services = Services(store)
    deployments = read_deployments(project)  # raises before anything starts
    pool = work_pool(deployments)
    with services.changing():
        other = _other_server(services)
        if other is None:
            _bring_up_server(services, host, port, database)
        elif {host, port} != {None}:
            raise ServicesError(
                "--host and --port are for a server that `dapo up` starts, but your Prefect "
                f"settings name {other}; unset PREFECT_API_URL to start one"
            )
        url = other or services.api_url
        with services.client(url) as client:
            is_ours = create_pool_and_automation(client, pool)
            if is_ours:
                _start_worker(services, url, pool)
            logger.info("deployments: registering %d, up to a minute", len(deployments))
            deploy(project, services.environment_of(url))
            logger.info("deployments: registered in work pool %s", pool)
            if is_ours:
                services.worker.wait_until(
                    lambda: WORKER in online_workers(client, pool), "is not online"
                )
                logger.info("worker: online")
    return url


def take_down(store: Path, cancel: bool) -> list[str]:
    """Stop worker and server; returns what was stopped. Refuses while flow runs are active."""
    services = Services(store)
    if not services.folder.is_dir():
        return []
    with services.changing():
        running = [each for each in (services.worker, services.server) if each.is_running]
        url = running[0].read()["api_url"] if running else ""
        if running and is_healthy(url):
            with services.client(url) as client:
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


def work_pool(deployments: Sequence[Mapping[str, Any]]) -> str:
    """Return the work pool of the deployments; raises ConfigError if they have several."""
    pools = {str(each.get("work_pool", {}).get("name", WORK_POOL)) for each in deployments}
    if len(pools) > 1:
        raise ConfigError(
            f"{PREFECT_FILE} names the work pools {', '.join(sorted(pools))}: name one, under "
            "definitions"
        )
    return pools.pop() if pools else WORK_POOL


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


def create_pool_and_automation(client: SyncPrefectClient, pool: str) -> bool:
    """Create the work pool, and the automation that marks dead flow runs, unless they exist.

    Returns whether our worker can serve the pool.
    """
    from prefect.automations import AutomationCore
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists

    with contextlib.suppress(ObjectAlreadyExists):
        client.create_work_pool(WorkPoolCreate(name=pool, type="process"))
    automation = AutomationCore.model_validate(
        yaml.safe_load(CRASH_AUTOMATION_FILE.read_text(encoding="utf-8"))
    )
    if not client.read_automations_by_name(CRASH_AUTOMATION):
        client.create_automation(automation)
    kind = client.read_work_pool(pool).type
    if kind != "process":
        logger.warning(
            "worker: work pool %s has type %s, and dapo starts only process workers: start one of "
            "its own in an environment with this project",
            pool,
            kind,
        )
    return kind == "process"


def online_workers(client: SyncPrefectClient, pool: str) -> list[str]:
    """Return the names of online workers in a work pool."""
    return [
        each.name for each in client.read_workers_for_work_pool(pool) if each.status == "ONLINE"
    ]


def active_runs(
    client: SyncPrefectClient, pool: str, worker_pid: int | None = None
) -> list[FlowRun]:
    """Return started, unended flow runs: those of our pool, and our flows' without a pool.

    With `worker_pid`, only those of this worker, as others may share the pool.
    """
    from prefect.client.schemas.filters import FlowFilter, FlowRunFilter, WorkPoolFilter

    state = FlowRunFilter.model_validate({"state": {"type": {"any_": ACTIVE_STATES}}})
    of_pool = WorkPoolFilter.model_validate({"name": {"any_": [pool]}})
    pooled = client.read_flow_runs(flow_run_filter=state, work_pool_filter=of_pool)
    if worker_pid is not None:
        children = psutil.Process(worker_pid).children(recursive=True)
        pids = {str(process.pid) for process in children}
        return [run for run in pooled if run.infrastructure_pid in pids]
    trigger = yaml.safe_load(CRASH_AUTOMATION_FILE.read_text(encoding="utf-8"))["trigger"]
    flows = FlowFilter.model_validate(
        {"name": {"any_": trigger["match_related"]["prefect.resource.name"]}}
    )
    own = client.read_flow_runs(flow_run_filter=state, flow_filter=flows)
    return [*pooled, *(run for run in own if run.work_pool_name is None)]


def _other_server(services: Services) -> str | None:
    """Return the server that the user's Prefect settings name, None if ours is to be used.

    It is, if they name it, or a place on this machine where no server answers.
    """
    url, source = configured_api() or ("", "")
    if not url or services.is_own(url):
        return None
    if is_loopback(urlsplit(url).hostname or "") and not is_healthy(url):
        logger.warning(
            "server: none answers at %s, named by %s; using this store's. `dapo run` looks there, "
            "unless you name the address below",
            url,
            source,
        )
        return None
    if services.server.is_running:
        raise ServicesError(
            f"the server of this store runs at {services.api_url}, but {source} names {url}: run "
            f"`{services.command('down')}` first, or name no other server"
        )
    require_server(url)
    logger.info("server: using %s, named by %s; starting none", url, source)
    return url


def _bring_up_server(
    services: Services, host: str | None, port: int | None, database: str | None
) -> None:
    """Start this store's server unless it runs, and wait for it."""
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
    shown = f"[{host}]" if is_ipv6(host) else host
    api_url = f"http://{EVERYWHERE.get(host, shown)}:{port}/api"
    page_url = f"http://{platform.node() if host in EVERYWHERE else shown}:{port}"
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


def _start_worker(services: Services, url: str, pool: str) -> None:
    worker, place = services.worker, {"api_url": url, "pool": pool}
    if worker.is_running and not place.items() <= worker.read().items():
        logger.info("worker: restarting, since the server's address or the work pool changed")
        worker.stop()
    if not worker.is_running:
        options = ("--pool", pool, "--type", "process", "--name", WORKER)
        command = (*PREFECT, "worker", "start", *options)
        worker.start(command, services.environment_of(url), **place)


def _end_flow_runs(services: Services, client: SyncPrefectClient, cancel: bool) -> None:
    """Cancel active flow runs and wait for them; raises ServicesError for runs to keep."""
    from prefect.states import Cancelled, Cancelling

    worker = services.worker.read()
    worker_pid = None if services.is_own(worker.get("api_url")) else worker["pid"]
    find = partial(active_runs, client, worker.get("pool", WORK_POOL), worker_pid)
    active = find()
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
        wait_until(lambda: not find(), CANCEL_SECONDS)
    for run in find():
        client.set_flow_run_state(
            run.id, Cancelled(message="dapo down: the worker was stopped"), force=True
        )


def _restore_signals() -> None:
    """Reset signals that a shell ignores for background commands: they must stop the worker."""
    for number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
