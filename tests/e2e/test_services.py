"""`dapo up`, `doctor` and `down` in a project directory."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from dapo_core.machine.ports import free_ports
from flows.prefect_access import ServicesError, is_healthy, own_addresses
from flows.prefect_server import named_api
from flows.services import bring_up, read_deployments, take_down
from tests.operated import ROOT, Site

pytestmark = pytest.mark.timeout(1500)  # on two busy cores
LONG_STAGE = "model.recipe.num_steps=100000"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path, password="correct-horse-battery")
    yield site
    site.end_everything()


def check_doctor(site: Site) -> None:
    """Check that everything is ok and the nightly deployment has an upcoming run."""
    output = site.dapo("doctor").stdout
    rows = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in output.splitlines()]
    found = {cells[0]: cells[1:] for cells in rows if len(cells) > 2}
    assert {
        found[name][0] for name in ("Prefect server", "worker", "deployments", "schedules")
    } == {"ok"}, output
    assert found["schedules"][1].startswith("dapo-nightly: 20"), output
    assert set(found["deployments"][1].split(", ")) == {
        each["name"] for each in read_deployments(ROOT)
    }


def pids(site: Site) -> dict[str, int]:
    services = (site.services.server, site.services.worker)
    return {service.name: service.read()["pid"] for service in services if service.is_running}


def test_server_and_worker_start_serve_the_project_and_stop(site: Site) -> None:
    output = site.up("--host", "0.0.0.0")
    first, api = pids(site), site.services.api_url
    assert f"export PREFECT_API_URL={api}" in output
    page = httpx.get(api.removesuffix("/api"), trust_env=False, follow_redirects=True, timeout=300)
    assert "<html" in page.text
    assert named_api(site.store) == api  # used by `dapo run`
    check_doctor(site)
    for service in (site.services.server, site.services.worker):
        assert "plugin" not in service.log.read_text()

    # Other machines can reach it, but need the password.
    address = f"http://{own_addresses()[0]}:{site.services.server.read()['port']}/api"
    assert is_healthy(address)
    for password, status in ((None, 401), ("guessed", 401), (site.password, 200)):
        auth = ("dapo", password) if password else None
        answer = httpx.post(
            f"{address}/deployments/filter", json={}, auth=auth, trust_env=False, timeout=300
        )
        assert (answer.status_code, "dapo-full" in answer.text) == (status, status == 200)
    assert (
        "needs a password: export PREFECT_API_AUTH_STRING="
        in site.dapo("down", status=2, PREFECT_API_AUTH_STRING="").stderr
    )

    # A server that died gets the same port; the worker, which may run a training, keeps running.
    psutil.Process(first["server"]).kill()
    with pytest.raises(
        ServicesError, match=r"`dapo down --cancel --store .*/\.dapo` stops the worker"
    ):
        take_down(site.store, cancel=False)
    site.up()
    assert site.services.api_url == api
    assert pids(site)["server"] != first["server"]
    assert pids(site)["worker"] == first["worker"]
    with pytest.raises(ServicesError, match=r"run `dapo down --store .*/\.dapo` to change"):
        bring_up(site.store, site.project, port=free_ports("127.0.0.1")[0])

    flow_run = site.run_deployment("dapo-full", LONG_STAGE)
    site.wait_for("the run to start", lambda: site.run_state(flow_run)["type"] == "RUNNING", 300)
    assert flow_run in site.dapo("down", status=2).stderr
    assert f"stopped worker, pid {first['worker']}" in site.dapo("down", "--cancel").stdout
    assert site.end_everything() == []
    assert take_down(site.store, cancel=False) == []
    with contextlib.closing(sqlite3.connect(site.services.home / "prefect.db")) as database:
        query = "select state_type from flow_run where id = ?"
        assert database.execute(query, [flow_run]).fetchall() == [("CANCELLED",)]
