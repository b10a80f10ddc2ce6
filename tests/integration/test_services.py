"""`dapo up`, `doctor` and `down` as typed in a project directory."""

from __future__ import annotations

import contextlib
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from flows.services import read_deployments
from tests.operated import ROOT, Site, free_port

pytestmark = pytest.mark.timeout(1500)  # on two busy cores
LONG_STAGE = "model.recipe.num_steps=100000"
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


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.end_everything()


def check_doctor(site: Site) -> None:
    """Nothing is wrong, and the nightly deployment really has a run to come."""
    output = site.dapo("doctor").stdout
    rows = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in output.splitlines()]
    found = {cells[0]: cells[1:] for cells in rows if len(cells) > 2}
    assert {found[name][0] for name in ("Prefect server", "worker", "deployments", "schedules")} == {"ok"}, output
    assert found["schedules"][1].startswith("dapo-nightly: 20"), output
    assert set(found["deployments"][1].split(", ")) == {each["name"] for each in read_deployments(ROOT)}


def pids(site: Site) -> dict[str, int]:
    services = (site.services.server, site.services.worker)
    return {service.name: service.read()["pid"] for service in services if service.is_running}


def test_server_and_worker_come_up_serve_the_project_and_go_down(site: Site) -> None:
    output = site.up()
    first, api = pids(site), site.services.api_url
    assert f"export PREFECT_API_URL={api}" in output
    page = httpx.get(api.removesuffix("/api"), trust_env=False, follow_redirects=True)
    assert "<html" in page.text

    # Without an export: the plugin knows the server, and so does `dapo run`.
    done = site.run("prefect", "deployment", "run", "dapo-full", "--start-in", "2 hours")
    assert "Created flow run" in done.stdout
    assert site.run(sys.executable, "-c", PROVIDE_API, ".dapo").stdout.split()[-1] == api
    check_doctor(site)
    for service in (site.services.server, site.services.worker):
        assert "plugin" not in service.log.read_text()

    # A server that died gets its port again; the worker, which may run a training, stays.
    psutil.Process(first["server"]).kill()
    assert "dapo down --cancel" in site.dapo("down", status=2).stderr
    site.up()
    assert site.services.api_url == api
    assert pids(site)["server"] != first["server"]
    assert pids(site)["worker"] == first["worker"]
    assert "type `dapo down` before" in site.dapo("up", "--port", str(free_port()), status=2).stderr

    flow_run = site.create_run("dapo-full", LONG_STAGE)
    site.wait_for("the run begins", lambda: site.run_state(flow_run)["type"] == "RUNNING", 90)
    assert flow_run in site.dapo("down", status=2).stderr
    assert f"ended worker, pid {first['worker']}" in site.dapo("down", "--cancel").stdout
    assert site.end_everything() == []
    assert "no service" in site.dapo("down").stdout
    with contextlib.closing(sqlite3.connect(site.services.home / "prefect.db")) as database:
        query = "select state_type from flow_run where id = ?"
        assert database.execute(query, [flow_run]).fetchall() == [("CANCELLED",)]
