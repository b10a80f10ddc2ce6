"""`dapo doctor` reports every kind of problem."""

import contextlib
import errno
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from uuid import uuid4

import prefect
import psutil
import pytest
from prefect.client.schemas.objects import WorkerStatus
from prefect.exceptions import ObjectNotFound
from typer.testing import CliRunner

from dapo_core.errors import ConfigError
from dapo_core.machine import torchvision_ops
from dapo_core.machine.device import Cuda, memory_limits
from dapo_core.memory.devices import GIB
from flows import doctor
from flows.cli import app
from flows.doctor import FAIL, OK, WARN, Finding
from tests.processes import wait_until

ROOT = Path(__file__).resolve().parents[2]
URL = "http://127.0.0.1:9/api"  # nothing listens there
ONLINE, OFFLINE = WorkerStatus.ONLINE, WorkerStatus.OFFLINE


def deployment(active: bool = True, **values: Any) -> SimpleNamespace:
    """Return a deployment with one schedule."""
    defaults = {"name": "dapo-nightly", "pool": "dapo", "paused": False, "has_run": True}
    schedules = [SimpleNamespace(active=active)]
    return SimpleNamespace(id=uuid4(), schedules=schedules, **{**defaults, **values})


@dataclass
class Server:
    """Answers like a Prefect server in this state."""

    version: str = prefect.__version__
    api_url: str = URL
    has_pool: bool = True
    is_paused: bool = False
    workers: dict[str, WorkerStatus] = field(default_factory=lambda: {"dapo-here": ONLINE})
    automations: list[bool] = field(default_factory=lambda: [True])  # enabled or not
    deployments: list[SimpleNamespace] = field(default_factory=lambda: [deployment()])
    asked_until_scheduled: int = 0

    def api_version(self) -> str:
        return self.version

    def read_work_pool(self, name: str) -> SimpleNamespace:
        if not self.has_pool:
            raise ObjectNotFound(Exception(name))
        return SimpleNamespace(name=name, is_paused=self.is_paused)

    def read_workers_for_work_pool(self, name: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(name=each, status=self.workers[each]) for each in self.workers]

    def read_automations_by_name(self, name: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(enabled=enabled) for enabled in self.automations]

    def read_deployments(self, *, work_pool_filter: Any) -> list[SimpleNamespace]:
        return [each for each in self.deployments if each.pool in work_pool_filter.name.any_]

    def read_flow_runs(self, *, deployment_filter: Any, **_: Any) -> list[SimpleNamespace]:
        self.asked_until_scheduled -= 1
        (asked,) = deployment_filter.id.any_
        has_run = any(each.has_run for each in self.deployments if each.id == asked)
        run = SimpleNamespace(expected_start_time=datetime(2026, 11, 22, 2))
        return [run] if has_run and self.asked_until_scheduled < 0 else []


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project directory with one deployment."""
    text = "deployments: [{name: dapo-nightly, entrypoint: flows/a.py:a}]"
    (tmp_path / "prefect.yaml").write_text(text)
    return tmp_path


def examined(
    monkeypatch: pytest.MonkeyPatch, server: Server, project: Path, wait: float = 0
) -> list[Finding]:
    """Return the findings about the server."""
    client = "prefect.client.orchestration.SyncPrefectClient"
    monkeypatch.setattr(client, lambda _, **__: contextlib.nullcontext(server))
    monkeypatch.setattr(doctor, "named_api", lambda _: URL)
    monkeypatch.setattr(doctor, "is_healthy", lambda url: url == URL)
    monkeypatch.setattr("flows.services.POLL_SECONDS", 0.01)
    return list(doctor.examine_server(project / "store", project, wait))


def test_a_healthy_server_has_no_findings(
    monkeypatch: pytest.MonkeyPatch, project: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    findings = examined(monkeypatch, Server(), project)
    assert {finding.status for finding in findings} == {OK}
    assert findings[-1] == Finding("schedules", OK, "dapo-nightly: 2026-11-22 02:00 UTC")
    assert examined(monkeypatch, Server(asked_until_scheduled=3), project, wait=60)[-1].status == OK
    others = ({"pool": "theirs"}, {"paused": True}, {"active": False})  # none is waited for
    server = Server(deployments=[deployment(), *(deployment(**e, has_run=False) for e in others)])
    assert examined(monkeypatch, server, project)[-1] == findings[-1]
    elsewhere = tmp_path_factory.mktemp("elsewhere")  # deployments are not checked there
    assert examined(monkeypatch, Server(deployments=[]), elsewhere)[-1].check == "crash detection"


@pytest.mark.parametrize(
    ("server", "check", "status", "expected"),
    [
        (Server(version="3.0.0"), "Prefect server", FAIL, "3.0.0, this environment has"),
        (Server(has_pool=False), "worker", FAIL, "no work pool dapo"),
        (Server(workers={"dapo-a": OFFLINE}), "worker", FAIL, "none online in work pool dapo"),
        (Server(is_paused=True), "worker", FAIL, "work pool dapo is paused"),
        (Server(automations=[]), "crash detection", WARN, "`dapo up --store"),
        (Server(automations=[False]), "crash detection", WARN, "automation resume 'dapo: crashed"),
        (Server(deployments=[deployment(pool="b")]), "deployments", FAIL, "not registered"),
        (Server(deployments=[deployment(has_run=False)]), "schedules", FAIL, "no run is scheduled"),
    ],
)
def test_a_problem_is_the_only_finding(
    monkeypatch: pytest.MonkeyPatch,
    project: Path,
    server: Server,
    check: str,
    status: str,
    expected: str,
) -> None:
    (finding,) = [each for each in examined(monkeypatch, server, project) if each.status != OK]
    assert (finding.check, finding.status) == (check, status)
    assert expected in f"{finding.found} {finding.advice}"
    assert finding.advice


def test_an_unreachable_server_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", URL)
    (finding,) = doctor.examine_server(tmp_path, ROOT, 0)
    assert (finding.status, finding.found) == (FAIL, f"{URL} does not respond")


@pytest.mark.parametrize(
    ("variables", "status", "found"),
    [
        ({"RAY_AUTH_MODE": "disabled"}, WARN, "no authentication (pid "),
        ({"RAY_AUTH_MODE": "token"}, OK, "1 running, with a token"),
    ],
)
def test_a_ray_head_without_a_token_is_a_warning(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variables: dict[str, str],
    status: str,
    found: str,
) -> None:
    head = tmp_path / "gcs_server"
    shutil.copy("/bin/sleep", head)
    with subprocess.Popen([head, "600"], env=variables) as process:
        wait_until(
            lambda: psutil.Process(process.pid).environ() == variables,
            "the environment that the kernel fills in after exec",
        )
        monkeypatch.setattr(psutil, "process_iter", lambda: [psutil.Process(process.pid)])
        finding = doctor.check_ray()
        process.kill()
    assert (finding.status, found in finding.found) == (status, True), finding
    assert ("ray get-auth-token --generate" in finding.advice) == (status == WARN)


class Anyone(BaseHTTPRequestHandler):
    """Answers every request with the server's status."""

    def do_GET(self) -> None:
        self.send_response(self.server.status)  # type: ignore[attr-defined]
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("host", "answers", "status", "found"),
    [
        ("0.0.0.0", 200, WARN, "anyone who can reach it can run code as the worker's user"),
        ("0.0.0.0", 401, OK, "password required"),
        ("127.0.0.1", 200, OK, "reachable from this machine only"),
    ],
)
def test_a_server_reachable_from_other_machines_needs_a_password(
    host: str, answers: int, status: str, found: str
) -> None:
    """The check uses the machine's network address, although the URL says 127.0.0.1."""
    with ThreadingHTTPServer((host, 0), Anyone) as server:
        server.status = answers  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        finding = doctor.check_access(f"http://127.0.0.1:{server.server_address[1]}/api")
        server.shutdown()
    assert finding.status == status
    assert found in finding.found
    assert ("PREFECT_SERVER_API_AUTH_STRING" in finding.advice) == (status == WARN)


def test_a_server_elsewhere_is_asked_at_its_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(doctor, "lets_anyone_in", asked.append)
    urls = ["https://prefect.example.org/api", "http://[2001:db8::7]:4200/api"]
    assert {doctor.check_access(url).found for url in urls} == {"password required"}
    assert {*asked} == {*urls}


@pytest.mark.parametrize(
    ("free", "status"), [(20 * GIB, OK), (20 * GIB - 1, WARN), (GIB, WARN), (GIB - 1, FAIL)]
)
def test_low_disk_space_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, status: str
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    assert doctor.check_space(tmp_path).status == status


def test_a_file_system_without_locks_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert doctor.check_locks(tmp_path).status == OK
    monkeypatch.setattr(doctor, "TRY_LOCK", "pass")
    assert doctor.check_locks(tmp_path).found == "flock does not exclude other processes"
    fault = OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr(doctor, "locked", mock.Mock(side_effect=fault))
    assert doctor.check_locks(tmp_path).found == "flock failed: No locks available"
    assert list(tmp_path.iterdir()) == []


def test_incompatible_packages_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"sqlalchemy": "2.1.0", "torch": "2.9.0+cpu", "torchvision": "0.24.0"}
    installed = doctor._version
    monkeypatch.setattr(
        doctor, "_version", lambda name: versions.get(name.lower()) or installed(name)
    )
    finding = doctor.check_packages()
    assert finding.status == FAIL
    assert "2.1.0, needs" in finding.found
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    if torchvision_ops.is_installed():
        sys.meta_path.remove(torchvision_ops._Finder)
    finding = doctor.check_torch()
    advice = "python -m dapo_core.machine.torchvision_ops"
    assert (finding.status, finding.advice) == (FAIL, advice)
    torchvision_ops.install()
    assert doctor.check_torch().status == OK
    versions["torchaudio"] = "2.9.0"
    finding = doctor.check_torch()
    assert (finding.status, finding.advice) == (FAIL, "pip uninstall torchaudio")
    versions |= dict.fromkeys(("torchvision", "torchaudio"), "0.24.0+cpu")  # from torch's index
    assert doctor.check_torch().status == OK


def test_memory_is_limited_by_the_cgroups_of_a_container_or_a_job(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("5:pids:/docker/7\n4:memory:/docker/7\n0::/user/job\n")
    limits = {"memory/memory.limit_in_bytes": "300", "user/memory.max": "200"}
    for name, limit in {**limits, "user/job/memory.max": "max"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(limit)
    assert memory_limits(tmp_path, tmp_path) == [300, 200]


def test_low_memory_and_broken_drivers_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Cuda, "visible", lambda device, environment: [])
        memory = SimpleNamespace(available=4 * GIB - 1, total=8 * GIB)
        patch.setattr(psutil, "virtual_memory", lambda: memory)
        assert doctor.check_hardware().status == WARN

    def broken(device: Cuda, environment: Mapping[str, str]) -> list[str]:
        raise ConfigError(f"no {device.kind}")

    monkeypatch.setattr(Cuda, "visible", broken)
    assert doctor.check_hardware().status == FAIL


def test_an_unwritable_store_exits_with_1_and_one_hint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = tmp_path / "file"
    store.touch()
    monkeypatch.setattr(doctor, "check_torch", lambda: Finding("of this machine", OK, ""))
    monkeypatch.setattr(doctor, "check_hardware", lambda: Finding("of this machine", OK, ""))
    monkeypatch.setattr(doctor, "named_api", lambda _: "")
    result = CliRunner().invoke(app, ["doctor", "--store", str(store), "--json"])
    assert result.exit_code == 1
    assert result.output.count("set store.path") == 1
    assert "free space" not in result.output
    assert f"start one with `dapo up --store {store}`" in result.output
