"""A project folder with its store, the services of `dapo up`, and all processes started there."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from bench.small_chain import CONFIG, SMALL
from dapo_core.machine.environment import SOCKETS_VARIABLE
from dapo_core.machine.ports import free_ports
from flows.services import Services

ROOT = Path(__file__).resolve().parents[1]
PROJECT_FILES = (
    "pyproject.toml",
    "prefect.yaml",
    "flows",
    "tasks",
    "dapo_core",
    "eval",
    "interop",
    "configs",
    "deploy",
)
MARK = "DAPO_TEST_SITE"  # inherited by all children, including daemons in their own sessions
API_SECONDS = 120.0  # with SQLite on a busy machine, one writer may wait 60 s for another
GONE_SECONDS = 180.0
FINAL = {"COMPLETED", "FAILED", "CANCELLED", "CRASHED"}


@dataclass(frozen=True)
class Site:
    """A project folder in which commands run; every run of its chain has `overrides`."""

    folder: Path
    overrides: tuple[str, ...] = SMALL
    database: str | None = None  # URL; None for SQLite in the store
    password: str | None = None  # of the server's user, dapo

    def __post_init__(self) -> None:
        self.project.mkdir(parents=True)
        for name in PROJECT_FILES:
            (self.project / name).symlink_to(ROOT / name)

    @property
    def project(self) -> Path:
        """The folder in which commands run."""
        return self.folder / "project"

    @property
    def store(self) -> Path:
        """The artifact store at its default path."""
        return self.project / ".dapo"

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a process of this site, without settings of another server."""
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")
        }
        auth = {"PREFECT_API_AUTH_STRING": f"dapo:{self.password}"} if self.password else {}
        return (
            inherited
            | auth
            | {
                MARK: str(self.folder),
                # keeps vLLM and Ray from overwriting the environment with a title
                "SPT_NOENV": "1",
                "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
                "PYTHONPATH": str(ROOT),
                "PREFECT_HOME": str(self.folder / "prefect"),
                "COLUMNS": "200",
            }
        )

    @property
    def services(self) -> Services:
        """The site's server and worker."""
        return Services(self.store)

    def changes(self, *more: str) -> list[str]:
        """Return the overrides of a run."""
        return [f"store.path={self.store}", *self.overrides, *more]

    def run(self, *command: str, status: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a command and check its exit status."""
        done = subprocess.run(
            command,
            cwd=self.project,
            env={**self.environment, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == status, done.stdout[-5000:] + done.stderr[-5000:]
        return done

    def dapo(self, *words: str, status: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
        """Run `dapo WORDS` and check its exit status."""
        return self.run(sys.executable, "-m", "flows.cli", *words, status=status, **env)

    def chain(self, *words: str, changes: tuple[str, ...] = ()) -> list[str]:
        """Return the words of a `dapo` command followed by the small recipe."""
        return [
            *words,
            CONFIG,
            *(word for change in self.changes(*changes) for word in ("--set", change)),
        ]

    def start(self, log: Path, *words: str, **env: str) -> subprocess.Popen[bytes]:
        """Start `dapo WORDS` in the background in its own session; its output goes to the log."""
        with log.open("wb") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "flows.cli", *words],
                cwd=self.project,
                env={**self.environment, **env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def up(self, *words: str) -> str:
        """Run `dapo up` and return its output. The first port is a free one: other tests use the
        default.
        """
        port = [] if self.services.server.read() else ["--port", str(free_ports("127.0.0.1")[0])]
        database = (
            {"PREFECT_SERVER_DATABASE_CONNECTION_URL": self.database} if self.database else {}
        )
        return self.dapo("up", *words, *port, **database).stdout

    def down(self) -> None:
        """Run `dapo down --cancel` and check that nothing of the site is left."""
        self.dapo("down", "--cancel")
        assert self.end_everything() == []

    def run_deployment(self, name: str, *changes: str, **parameters: Any) -> str:
        """Run `prefect deployment run NAME`; returns the flow run's id."""
        parameters = {"config": CONFIG, "overrides": self.changes(*changes), **parameters}
        words = [
            word
            for key, value in parameters.items()
            for word in ("--param", f"{key}={json.dumps(value)}")
        ]
        done = self.run("prefect", "deployment", "run", name, *words)
        found = re.search(r"UUID: ([0-9a-f-]{36})", done.stdout)
        assert found, done.stdout + done.stderr
        return found[1]

    def create_run(self, name: str, *changes: str, **parameters: Any) -> str:
        """Create the same flow run through Prefect's REST API, like its UI."""
        deployment = self.ask("GET", f"/deployments/name/{name}/{name}")
        parameters = {"config": CONFIG, "overrides": self.changes(*changes), **parameters}
        return self.ask(
            "POST", f"/deployments/{deployment['id']}/create_flow_run", parameters=parameters
        )["id"]

    def cancel(self, flow_run: str) -> None:
        """Cancel a flow run like the Prefect UI."""
        self.ask("POST", f"/flow_runs/{flow_run}/set_state", state={"type": "CANCELLING"})

    def ask(self, method: str, path: str, **json: Any) -> Any:
        """Return the JSON answer of Prefect's REST API, None without content; raises for an error
        status.
        """
        answer = self.request(method, path, **json).raise_for_status()
        return answer.json() if answer.content else None

    def request(self, method: str, path: str, **json: Any) -> httpx.Response:
        """Return the response of Prefect's REST API; retries while the server's SQLite is locked
        (503).
        """
        url, auth = (
            f"{self.services.api_url}{path}",
            ("dapo", self.password) if self.password else None,
        )

        def ask() -> httpx.Response | None:
            with httpx.Client(auth=auth, timeout=API_SECONDS, trust_env=False) as client:
                token = client.get(
                    f"{self.services.api_url}/csrf-token", params={"client": "tests"}
                )
                if token.is_success:  # a server with a password has no CSRF tokens
                    client.headers.update(
                        {
                            "Prefect-Csrf-Token": token.json()["token"],
                            "Prefect-Csrf-Client": "tests",
                        }
                    )
                answer = client.request(method, url, json=json or None)
            return None if answer.status_code == 503 else answer

        return self.wait_for(f"{method} {path}", ask, API_SECONDS)

    def run_state(self, flow_run: str) -> dict[str, Any]:
        """Return the state of a flow run: type, name, message."""
        return self.ask("GET", f"/flow_runs/{flow_run}")["state"]

    def wait_until_final(self, flow_run: str, seconds: float) -> dict[str, Any]:
        """Wait for a flow run to end and return its state."""

        def final_state() -> dict[str, Any] | None:
            state = self.run_state(flow_run)
            return state if state["type"] in FINAL else None

        return self.wait_for(f"flow run {flow_run} ends", final_state, seconds)

    def task_states(self, flow_run: str) -> dict[str, str]:
        """Return the last state's name for each task run."""
        asked = {"flow_runs": {"id": {"any_": [flow_run]}}}
        return {
            task["name"]: task["state_name"]
            for task in self.ask("POST", "/task_runs/filter", **asked)
        }

    def log_messages(self, flow_run: str) -> list[str]:
        """Return the flow run's log lines in the Prefect UI, oldest first."""
        asked = {
            "logs": {"flow_run_id": {"any_": [flow_run]}},
            "sort": "TIMESTAMP_ASC",
            "limit": 200,
        }
        messages: list[str] = []
        while page := self.ask("POST", "/logs/filter", offset=len(messages), **asked):
            messages += [entry["message"] for entry in page]
        return messages

    def wait_for(self, what: str, check: Callable[[], Any], seconds: float) -> Any:
        """Return the first true answer of `check`; otherwise fail the test with the services' last
        output.
        """
        deadline = time.monotonic() + seconds
        is_over = False
        while not is_over:
            # read before the last check, since we may be late ourselves
            is_over = time.monotonic() >= deadline
            if answer := check():
                return answer
            time.sleep(0.5)
        logs = [self.services.server.log, self.services.worker.log]
        tails = "\n".join(f"{log}:\n{log.read_text()[-4000:]}" for log in logs if log.exists())
        pytest.fail(
            f"{what}: not within {seconds:.0f} s; still there: "
            f"{describe(self.processes())}\n{tails}"
        )

    def processes(self, *words: str) -> list[psutil.Process]:
        """Return this site's running processes whose command line has all these words."""
        found = []
        for process in psutil.process_iter():
            try:
                has_words = not words or set(words) <= set(process.cmdline())  # cheaper to read
                if (
                    has_words
                    and process.environ().get(MARK) == str(self.folder)
                    and process.pid != os.getpid()
                ):
                    found.append(process)
            except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        return found

    def flow_process(self, flow_run: str) -> psutil.Process | None:
        """Return the process that executes a flow run."""
        for process in self.processes("prefect.engine"):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if process.environ().get("PREFECT__FLOW_RUN_ID") == flow_run:
                    return process
        return None

    def tree(self, flow_run: str) -> list[psutil.Process]:
        """Return the process that executes a flow run, and its descendants."""
        process = self.flow_process(flow_run)
        assert process is not None
        return [process, *process.children(recursive=True)]

    def service(self, name: str) -> psutil.Process:
        """Return the process of the server or the worker."""
        service = getattr(self.services, name)
        assert service.is_running
        return psutil.Process(service.read()["pid"])

    def end_everything(self) -> list[str]:
        """SIGKILL every process at once, like a power failure; returns their commands."""
        ended, sockets = [], set()
        while processes := self.processes():
            ended += describe(processes)
            for process in processes:
                try:
                    sockets.add(process.environ().get(SOCKETS_VARIABLE))
                    process.send_signal(signal.SIGKILL)
                except psutil.NoSuchProcess:
                    continue
            psutil.wait_procs(processes, timeout=5)
        for folder in filter(None, sockets):  # the process that would remove it was killed too
            shutil.rmtree(folder, ignore_errors=True)
        return ended


def describe(processes: list[psutil.Process]) -> list[str]:
    """Return pids with the start of their command lines."""
    lines = []
    for process in processes:
        try:
            lines.append(f"{process.pid} {' '.join(process.cmdline())[:150]}")
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return lines


def find_command(
    ancestor: psutil.Process, word: str, but_for: psutil.Process | None = None
) -> psutil.Process | None:
    """Return the `dapo WORD` process below a process."""
    for child in ancestor.children(recursive=True):
        try:
            if child.cmdline()[1:4] == ["-m", "flows.cli", word] and child != but_for:
                return child
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return None


def assert_all_gone(processes: list[psutil.Process]) -> None:
    """Check that the processes exit soon."""
    _, alive = psutil.wait_procs(processes, timeout=GONE_SECONDS)
    assert describe(alive) == []  # ignores zombies
