"""`dapo up`, `doctor` and `down` as typed in a project directory, with both databases that Prefect can use."""

from __future__ import annotations

import contextlib
import http.server
import importlib.metadata
import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from flows.services.daemons import SERVER, WORKER, start_of
from tests.postgres_servers import PASSWORD, started_postgres
from tests.prefect_servers import free_port

ROOT = Path(__file__).resolve().parents[2]
PROJECT_FILES = ("pyproject.toml", "prefect.yaml", "flows", "tasks", "dapo_core", "eval", "configs")
COMMAND_SECONDS = 240.0
pytestmark = pytest.mark.timeout(1500)  # on two busy cores
LONG_STAGE = ["data.arithmetic.num_train=128", "data.arithmetic.num_eval=24", "model.recipe.num_steps=100000"]
# As `dapo run` finds a server for the configuration's store.
PROVIDE_API = """
import os, sys
from pathlib import Path
from flows.prefect_settings import apply_prefect_settings
apply_prefect_settings()
from flows.prefect_server import provide_prefect_api
provide_prefect_api(Path(sys.argv[1]))()
print(os.environ["PREFECT_API_URL"])
"""
# `dapo up` when somebody else takes the port between its choice and the server's start.
LOSE_THE_PORT = """
import sys
from flows.cli import main
from flows.services import start
choices = iter([int(sys.argv.pop(1))])
start._choose_port = lambda host, port: next(choices, port)
main()
"""


@dataclass(frozen=True)
class Project:
    """A project directory of its own, in which commands are typed."""

    folder: Path

    @property
    def services(self) -> Path:
        return self.folder / ".dapo" / ".services"

    def python(self, *words: str, status: int = 0, **env: str) -> str:
        """What `python WORDS` prints, which must end with this exit status."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        python_path = os.pathsep.join([str(self.folder / "site"), str(ROOT)])
        done = subprocess.run(
            [sys.executable, *words],
            cwd=self.folder,
            env={**inherited, "PYTHONPATH": python_path, "HOME": str(self.folder), **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_SECONDS,
        )
        assert done.returncode == status, done.stdout
        return done.stdout

    def dapo(self, *words: str, status: int = 0, **env: str) -> str:
        return self.python("-m", "flows.cli", *words, status=status, **env)

    def state(self) -> dict[str, Any]:
        return json.loads((self.services / "services.json").read_text())

    def pids(self) -> dict[str, int]:
        return {name: daemon["pid"] for name, daemon in self.state()["daemons"].items()}

    def api(self) -> str:
        return f"http://127.0.0.1:{self.state()['port']}/api"


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    """A project directory whose services have ended afterwards, whatever the test did."""
    folder = tmp_path / "project"
    folder.mkdir()
    for name in PROJECT_FILES:
        (folder / name).symlink_to(ROOT / name)
    if not importlib.metadata.entry_points(group="prefect.plugins", name="dapo"):
        write_entry_point(folder / "site")
    project = Project(folder)
    yield project
    if project.services.exists():
        for pid in {process.pid for process in own_processes(project)}:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()


def write_entry_point(site: Path) -> None:
    """The plugin of pyproject.toml for an environment that was installed before it was written."""
    metadata = site / "dapo_entry_points-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: dapo-entry-points\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[prefect.plugins]\ndapo = flows.prefect_plugin\n")


def own_processes(project: Project) -> list[psutil.Process]:
    """Every living process whose Prefect files are those of the project's services."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            if process.environ().get("PREFECT_HOME") == str(project.services / "prefect"):
                found.append(process)
    return found


def deployments() -> set[str]:
    content = yaml.safe_load((ROOT / "prefect.yaml").read_text(encoding="utf-8"))
    return {deployment["name"] for deployment in content["deployments"]}


def check_doctor(project: Project) -> None:
    """All is well, and the nightly deployment really has a run to come."""
    told = project.dapo("doctor")
    rows = {cells[0]: cells[1:] for line in told.splitlines() if len(cells := line.strip("│ ").split("│")) > 2}
    rows = {name.strip(): [cell.strip() for cell in cells] for name, cells in rows.items()}
    assert {rows[name][0] for name in ("Prefect server", "worker", "deployments", "schedules")} == {"ok"}, told
    assert rows["schedules"][1].startswith("dapo-nightly: 20"), told
    assert set(rows["deployments"][1].split(", ")) == deployments()


def wait_until_running(client: httpx.Client, flow_run_id: str) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        run = client.get(f"/flow_runs/{flow_run_id}").raise_for_status().json()
        if run["state_type"] == "RUNNING":
            return
        time.sleep(0.2)
    pytest.fail(f"the flow run is {run['state_name']} after 90 s")


@contextlib.contextmanager
def stranger(port: int = 0) -> Iterator[int]:
    """The port of a web server that answers everything, as a Prefect server that is not ours would."""

    class Healthy(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Healthy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def test_services_on_sqlite(project: Project) -> None:
    with stranger() as taken:
        told = project.python("-c", LOSE_THE_PORT, str(taken), "up")
    assert project.state()["port"] != taken
    api, first = project.api(), project.pids()
    assert f"export PREFECT_API_URL={api}" in told
    page = httpx.get(api.removesuffix("/api"), trust_env=False, follow_redirects=True)
    assert "<html" in page.text

    # Without an export: the plugin knows the server, and so does `dapo run`.
    run_later = ("prefect", "deployment", "run", "dapo-full", "--start-in", "2 hours")
    assert "Created flow run" in project.python("-m", *run_later)
    assert project.python("-c", PROVIDE_API, str(project.folder / ".dapo")).split()[-1] == api
    for name in (SERVER, WORKER):
        assert "plugin" not in (project.services / f"{name}.log").read_text()
    check_doctor(project)

    # The next server gets another port, and the worker that is left must not go on asking at the old one.
    server = psutil.Process(first[SERVER])
    server.kill()
    server.wait(20)
    with stranger(project.state()["port"]):
        project.dapo("up")
    second = project.pids()
    assert not psutil.pid_exists(first[WORKER])
    assert project.api() != api
    api = project.api()

    parameters = {"overrides": LONG_STAGE}
    with httpx.Client(base_url=api, trust_env=False, timeout=60) as client:
        deployment = client.get("/deployments/name/dapo-full/dapo-full").raise_for_status().json()["id"]
        created = client.post(f"/deployments/{deployment}/create_flow_run", json={"parameters": parameters})
        flow_run_id = created.raise_for_status().json()["id"]
        wait_until_running(client, flow_run_id)
        assert flow_run_id in project.dapo("down", status=2)
        # As for want of heartbeats, while the server was away.
        crashed = {"state": {"type": "CRASHED"}, "force": True}
        client.post(f"/flow_runs/{flow_run_id}/set_state", json=crashed).raise_for_status()
    assert flow_run_id in project.dapo("down", status=2)
    assert project.pids() == second
    assert httpx.get(f"{api}/work_pools/dapo", trust_env=False).json()["is_paused"] is False
    assert f"ended worker, pid {second[WORKER]}" in project.dapo("down", "--cancel")
    assert own_processes(project) == []
    assert "no service" in project.dapo("down")
    with contextlib.closing(sqlite3.connect(project.services / "prefect" / "prefect.db")) as database:
        query = "select state_type from flow_run where id = ?"
        assert database.execute(query, [flow_run_id]).fetchall() == [("CANCELLED",)]
        assert database.execute("select is_paused from work_pool").fetchall() == [(0,)]


def test_services_on_postgresql(project: Project) -> None:
    with started_postgres() as url:
        project.dapo("up", "--port", str(free_port()), PREFECT_SERVER_DATABASE_CONNECTION_URL=url)
        started = project.pids()
        project.dapo("up")
        assert project.pids() == started
        assert "dapo down" in project.dapo("up", "--database", "sqlite", status=2)
        check_doctor(project)

        commands = [" ".join(psutil.Process(pid).cmdline()) for pid in started.values()]
        files = [path.read_text(errors="replace") for path in project.services.rglob("*") if path.is_file()]
        assert not any(PASSWORD in text for text in [*commands, *files])
        assert not (project.services / "prefect" / "prefect.db").exists()

        assert f"ended server, pid {started[SERVER]}" in project.dapo("down")
        assert own_processes(project) == []
        assert "password" in project.dapo("up", status=2)


@pytest.mark.parametrize(("ticks_later", "is_ours"), [(0, True), (1, False)])
def test_down_ends_only_the_process_that_started_when_ours_did(
    project: Project, ticks_later: int, is_ours: bool
) -> None:
    """The pid in the state file may have been given to a stranger."""
    with subprocess.Popen(["sleep", "600"]) as process:
        boot, ticks = str(start_of(process.pid)).split("/")
        start = f"{boot}/{int(ticks) + ticks_later}"
        daemon = {"pid": process.pid, "start": start, "command": ["sleep", "600"], "log": "", "started_at": 0.0}
        project.services.mkdir(parents=True)
        (project.services / "services.json").write_text(json.dumps({"daemons": {WORKER: daemon}}))
        told = project.dapo("down")
        try:
            assert (f"ended worker, pid {process.pid}" in told) == is_ours
            assert (process.poll() is not None) == is_ours
        finally:
            process.kill()


def test_down_ends_the_flow_processes_of_its_worker_and_no_others(project: Project, tmp_path: Path) -> None:
    """As they are left when worker and server were killed; a service's own processes are no flow processes."""
    home = project.services / "prefect"
    home.mkdir(parents=True)
    (tmp_path / "link").symlink_to(home)
    engine = [sys.executable, "-c", "import time; time.sleep(600)", "prefect.engine"]
    runs = {name: str(uuid.uuid4()) for name in ("ours", "linked", "another's", "none")}
    homes = {"ours": home, "linked": tmp_path / "link", "another's": tmp_path / "home", "none": home}
    with contextlib.ExitStack() as stack:
        processes = {}
        for name, flow_run in runs.items():
            env = {"PREFECT_HOME": str(homes[name]), "PREFECT__FLOW_RUN_ID": flow_run}
            command = engine[:-1] if name == "none" else engine
            processes[name] = stack.enter_context(subprocess.Popen(command, env=env))
            stack.callback(processes[name].kill)
        refused = project.dapo("down", status=2)
        assert [name for name, flow_run in runs.items() if flow_run in refused] == ["ours", "linked"]
        told = project.dapo("down", "--cancel")
        assert [name for name, flow_run in runs.items() if flow_run in told] == ["ours", "linked"]
        assert [name for name, process in processes.items() if process.poll() is None] == ["another's", "none"]


def test_up_needs_a_project(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    assert "prefect.yaml" in Project(tmp_path / "project").dapo("up", status=2)
