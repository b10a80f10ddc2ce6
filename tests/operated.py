"""A project folder with its store and the services of `dapo up`, and every process that comes from there."""

from __future__ import annotations

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
from dapo_core.ports import free_ports
from flows.services import Services
from tasks.serve_model.command import SOCKETS_VARIABLE

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
MARK = "DAPO_TEST_SITE"  # each child inherits it, daemons in sessions of their own too
API_SECONDS = 120.0  # SQLite on a busy machine: a writer may wait for another for 60
GONE_SECONDS = 180.0
FINAL = {"COMPLETED", "FAILED", "CANCELLED", "CRASHED"}


@dataclass(frozen=True)
class Site:
    """A project folder, in which commands are typed; `overrides` are in each run of its chain."""

    folder: Path
    overrides: tuple[str, ...] = SMALL
    database: str | None = None  # of the server; None: SQLite in the store
    password: str | None = None  # of the server, whose user is dapo

    def __post_init__(self) -> None:
        self.project.mkdir(parents=True)
        for name in PROJECT_FILES:
            (self.project / name).symlink_to(ROOT / name)

    @property
    def project(self) -> Path:
        """The folder in which commands are typed."""
        return self.folder / "project"

    @property
    def store(self) -> Path:
        """The artifact store: where the commands look by default."""
        return self.project / ".dapo"

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a process of this site: nothing in it leads to another server."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        auth = {"PREFECT_API_AUTH_STRING": f"dapo:{self.password}"} if self.password else {}
        return (
            inherited
            | auth
            | {
                MARK: str(self.folder),
                "SPT_NOENV": "1",  # vLLM's and Ray's processes change their titles, but not over the environment
                "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
                "PYTHONPATH": str(ROOT),
                "PREFECT_HOME": str(self.folder / "prefect"),
                "COLUMNS": "200",
            }
        )

    @property
    def services(self) -> Services:
        """Its server and worker."""
        return Services(self.store)

    def changes(self, *more: str) -> list[str]:
        """The overrides of a run."""
        return [f"store.path={self.store}", *self.overrides, *more]

    def run(self, *command: str, status: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
        """The command, run to its end, which must have this exit status."""
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
        """`dapo WORDS`, run to its end, which must have this exit status."""
        return self.run(sys.executable, "-m", "flows.cli", *words, status=status, **env)

    def chain(self, *words: str, changes: tuple[str, ...] = ()) -> list[str]:
        """WORDS of a `dapo` command, with the small recipe behind them."""
        return [*words, CONFIG, *(word for change in self.changes(*changes) for word in ("--set", change))]

    def start(self, log: Path, *words: str, **env: str) -> subprocess.Popen[bytes]:
        """`dapo WORDS` in the background, in a session of its own; its output goes to the log."""
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
        """What `dapo up` prints. The port is a free one the first time: other tests use the default one, too."""
        port = [] if self.services.server.read() else ["--port", str(free_ports("127.0.0.1")[0])]
        database = {"PREFECT_SERVER_DATABASE_CONNECTION_URL": self.database} if self.database else {}
        return self.dapo("up", *words, *port, **database).stdout

    def down(self) -> None:
        """`dapo down --cancel`, after which nothing of the site runs."""
        self.dapo("down", "--cancel")
        assert self.end_everything() == []

    def run_deployment(self, name: str, *changes: str, **parameters: Any) -> str:
        """`prefect deployment run NAME`, which finds the server by itself; returns the flow run's id."""
        parameters = {"config": CONFIG, "overrides": self.changes(*changes), **parameters}
        words = [word for key, value in parameters.items() for word in ("--param", f"{key}={json.dumps(value)}")]
        done = self.run("prefect", "deployment", "run", name, *words)
        found = re.search(r"UUID: ([0-9a-f-]{36})", done.stdout)
        assert found, done.stdout + done.stderr
        return found[1]

    def create_run(self, name: str, *changes: str, **parameters: Any) -> str:
        """The same by Prefect's REST interface, as its page does."""
        deployment = self.ask("GET", f"/deployments/name/{name}/{name}")
        parameters = {"config": CONFIG, "overrides": self.changes(*changes), **parameters}
        return self.ask("POST", f"/deployments/{deployment['id']}/create_flow_run", parameters=parameters)["id"]

    def cancel(self, flow_run: str) -> None:
        """What Cancel on Prefect's page does."""
        self.ask("POST", f"/flow_runs/{flow_run}/set_state", state={"type": "CANCELLING"})

    def ask(self, method: str, path: str, **json: Any) -> Any:
        """The answer of Prefect's REST interface, None when it has no content; the status must be a good one."""
        answer = self.request(method, path, **json).raise_for_status()
        return answer.json() if answer.content else None

    def request(self, method: str, path: str, **json: Any) -> httpx.Response:
        """The response of Prefect's REST interface, asked again where the server's SQLite was locked (503)."""
        url, auth = f"{self.services.api_url}{path}", ("dapo", self.password) if self.password else None

        def ask() -> httpx.Response | None:
            with httpx.Client(auth=auth, timeout=API_SECONDS, trust_env=False) as client:
                token = client.get(f"{self.services.api_url}/csrf-token", params={"client": "tests"})
                if token.is_success:  # else the server has a password and asks for none
                    client.headers.update(
                        {"Prefect-Csrf-Token": token.json()["token"], "Prefect-Csrf-Client": "tests"}
                    )
                answer = client.request(method, url, json=json or None)
            return None if answer.status_code == 503 else answer

        return self.wait_for(f"{method} {path}", ask, API_SECONDS)

    def run_state(self, flow_run: str) -> dict[str, Any]:
        """The state of a flow run: type, name, message."""
        return self.ask("GET", f"/flow_runs/{flow_run}")["state"]

    def wait_until_final(self, flow_run: str, seconds: float) -> dict[str, Any]:
        """The state that a flow run ends in."""

        def final_state() -> dict[str, Any] | None:
            state = self.run_state(flow_run)
            return state if state["type"] in FINAL else None

        return self.wait_for(f"flow run {flow_run} ends", final_state, seconds)

    def task_states(self, flow_run: str) -> dict[str, str]:
        """The name of each task run's last state by the task run's name."""
        asked = {"flow_runs": {"id": {"any_": [flow_run]}}}
        return {task["name"]: task["state_name"] for task in self.ask("POST", "/task_runs/filter", **asked)}

    def log_messages(self, flow_run: str) -> list[str]:
        """What Prefect's page shows as the flow run's log, oldest first."""
        asked = {"logs": {"flow_run_id": {"any_": [flow_run]}}, "sort": "TIMESTAMP_ASC", "limit": 200}
        messages: list[str] = []
        while page := self.ask("POST", "/logs/filter", offset=len(messages), **asked):
            messages += [entry["message"] for entry in page]
        return messages

    def wait_for(self, what: str, check: Callable[[], Any], seconds: float) -> Any:
        """The first true answer of `check`; fails the test with what the services wrote last otherwise."""
        deadline = time.monotonic() + seconds
        is_over = False
        while not is_over:
            is_over = time.monotonic() >= deadline  # asked before the last check: we may be late ourselves
            if answer := check():
                return answer
            time.sleep(0.5)
        logs = [self.services.server.log, self.services.worker.log]
        tails = "\n".join(f"{log}:\n{log.read_text()[-4000:]}" for log in logs if log.exists())
        pytest.fail(f"{what}: not within {seconds:.0f} s; still there: {describe(self.processes())}\n{tails}")

    def processes(self, *words: str) -> list[psutil.Process]:
        """Running processes of this site whose command line has all these words."""
        found = []
        for process in psutil.process_iter():
            try:
                has_words = not words or set(words) <= set(process.cmdline())  # cheaper to read
                if has_words and process.environ().get(MARK) == str(self.folder) and process.pid != os.getpid():
                    found.append(process)
            except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        return found

    def flow_process(self, flow_run: str) -> psutil.Process | None:
        """The process that executes a flow run."""
        for process in self.processes("prefect.engine"):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if process.environ().get("PREFECT__FLOW_RUN_ID") == flow_run:
                    return process
        return None

    def tree(self, flow_run: str) -> list[psutil.Process]:
        """The process that executes a flow run, and all below it."""
        process = self.flow_process(flow_run)
        assert process is not None
        return [process, *process.children(recursive=True)]

    def service(self, name: str) -> psutil.Process:
        """The server or the worker."""
        service = getattr(self.services, name)
        assert service.is_running
        return psutil.Process(service.read()["pid"])

    def end_everything(self) -> list[str]:
        """SIGKILL every process at once, as a power cut would; returns the commands that ran."""
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
        for folder in filter(None, sockets):  # who would remove it was killed too
            shutil.rmtree(folder, ignore_errors=True)
        return ended


def describe(processes: list[psutil.Process]) -> list[str]:
    """Pids with the beginnings of their command lines."""
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
    """`dapo WORD` below a process."""
    for child in ancestor.children(recursive=True):
        try:
            if child.cmdline()[1:4] == ["-m", "flows.cli", word] and child != but_for:
                return child
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return None


def assert_all_gone(processes: list[psutil.Process]) -> None:
    """They end soon."""
    _, alive = psutil.wait_procs(processes, timeout=GONE_SECONDS)
    assert describe(alive) == []  # which leaves zombies out
