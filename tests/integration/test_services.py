"""`dapo up`, `doctor` and `down` as typed in a project directory."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from flows.services import Services, read_deployments
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


@dataclass(frozen=True)
class Project:
    """A project directory of its own, in which commands are typed."""

    folder: Path

    @property
    def services(self) -> Services:
        return Services(self.folder / ".dapo")

    def python(self, *words: str, status: int = 0, **env: str) -> str:
        """What `python WORDS` prints, which must end with this exit status."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        done = subprocess.run(
            [sys.executable, *words],
            cwd=self.folder,
            env={**inherited, "PYTHONPATH": str(ROOT), "HOME": str(self.folder), **env},
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

    def pids(self) -> dict[str, int]:
        services = (self.services.server, self.services.worker)
        return {service.name: service.read()["pid"] for service in services if service.is_running}


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    """A project directory whose services have ended afterwards, whatever the test did."""
    folder = tmp_path / "project"
    folder.mkdir()
    for name in PROJECT_FILES:
        (folder / name).symlink_to(ROOT / name)
    project = Project(folder)
    yield project
    if project.services.folder.exists():
        for pid in {process.pid for process in own_processes(project)}:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()


def own_processes(project: Project) -> list[psutil.Process]:
    """Every living process whose Prefect files are those of the project's services."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            if process.environ().get("PREFECT_HOME") == str(project.services.home):
                found.append(process)
    return found


def check_doctor(project: Project) -> None:
    """Nothing is wrong, and the nightly deployment really has a run to come."""
    output = project.dapo("doctor")
    rows = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in output.splitlines()]
    found = {cells[0]: cells[1:] for cells in rows if len(cells) > 2}
    assert {found[name][0] for name in ("Prefect server", "worker", "deployments", "schedules")} == {"ok"}, output
    assert found["schedules"][1].startswith("dapo-nightly: 20"), output
    assert set(found["deployments"][1].split(", ")) == {each["name"] for each in read_deployments(ROOT)}


def wait_until_running(client: httpx.Client, flow_run_id: str) -> None:
    deadline = time.monotonic() + 90
    while client.get(f"/flow_runs/{flow_run_id}").raise_for_status().json()["state_type"] != "RUNNING":
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_server_and_worker_come_up_serve_the_project_and_go_down(project: Project) -> None:
    output = project.dapo("up", "--port", str(free_port()))
    first, api = project.pids(), project.services.api_url
    assert f"export PREFECT_API_URL={api}" in output
    page = httpx.get(api.removesuffix("/api"), trust_env=False, follow_redirects=True)
    assert "<html" in page.text

    # Without an export: the plugin knows the server, and so does `dapo run`.
    run_later = ("prefect", "deployment", "run", "dapo-full", "--start-in", "2 hours")
    assert "Created flow run" in project.python("-m", *run_later)
    assert project.python("-c", PROVIDE_API, str(project.folder / ".dapo")).split()[-1] == api
    check_doctor(project)
    for service in (project.services.server, project.services.worker):
        assert "plugin" not in service.log.read_text()

    # A server that died gets its port again; the worker, which may run a training, stays.
    psutil.Process(first["server"]).kill()
    assert "dapo down --cancel" in project.dapo("down", status=2)
    project.dapo("up")
    assert project.services.api_url == api
    assert project.pids()["server"] != first["server"]
    assert project.pids()["worker"] == first["worker"]
    assert "type `dapo down` before" in project.dapo("up", "--port", str(free_port()), status=2)

    with httpx.Client(base_url=api, trust_env=False, timeout=60) as client:
        deployment = client.get("/deployments/name/dapo-full/dapo-full").raise_for_status().json()["id"]
        asked = {"parameters": {"overrides": LONG_STAGE}}
        created = client.post(f"/deployments/{deployment}/create_flow_run", json=asked)
        flow_run_id = created.raise_for_status().json()["id"]
        wait_until_running(client, flow_run_id)
    assert flow_run_id in project.dapo("down", status=2)
    assert f"ended worker, pid {first['worker']}" in project.dapo("down", "--cancel")
    assert own_processes(project) == []
    assert "no service" in project.dapo("down")
    with contextlib.closing(sqlite3.connect(project.services.home / "prefect.db")) as database:
        query = "select state_type from flow_run where id = ?"
        assert database.execute(query, [flow_run_id]).fetchall() == [("CANCELLED",)]


def test_up_needs_a_project(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    assert "prefect.yaml" in Project(tmp_path / "project").dapo("up", status=2)
