"""`dapo up`, `doctor` and `down` in a project directory."""

import contextlib
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from bench.small_chain import CONFIG
from dapo_core.machine.ports import free_ports
from flows.prefect_access import ServicesError, is_healthy, own_addresses
from flows.prefect_server import named_api
from flows.services import PREFECT, bring_up, read_deployments, take_down, wait_until
from tasks.processes.child import background_command
from tests.operated import ROOT, Site

pytestmark = pytest.mark.timeout(1500)  # on two busy cores
LONG_STAGE = "model.recipe.num_steps=100000"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path, password="correct-horse-battery")
    yield site
    site.end_everything()


def check_doctor(site: Site) -> None:
    """Check that everything is ok, and that no nightly run starts before a recipe is named."""
    output = site.dapo("doctor").stdout
    rows = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in output.splitlines()]
    found = {cells[0]: cells[1:] for cells in rows if len(cells) > 2}
    assert {
        found[name][0] for name in ("Prefect server", "worker", "deployments", "schedules")
    } == {"ok"}, output
    assert found["schedules"][1] == "no deployment has an active schedule", output
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


@pytest.fixture
def their_server(tmp_path: Path) -> Iterator[str]:
    """The API address of a Prefect server that somebody else started, with the work pool gpu."""
    port = free_ports("127.0.0.1")[0]
    url, log = f"http://127.0.0.1:{port}/api", tmp_path / "theirs.log"
    command = (*PREFECT, "server", "start", "--host", "127.0.0.1", "--port", str(port), "--no-ui")
    env = {"PREFECT_HOME": str(tmp_path / "theirs"), "PREFECT_API_URL": url}
    with background_command(command, log_path=log, label="Prefect", env=env):
        assert wait_until(lambda: is_healthy(url), 180), log.read_text()
        ask(url, "POST", "/work_pools/", name="gpu", type="process")
        yield url


def ask(url: str, method: str, path: str, **json: Any) -> Any:
    answer = httpx.request(method, f"{url}{path}", json=json, trust_env=False, timeout=120)
    return answer.raise_for_status().json()


def test_an_existing_server_and_work_pool_are_used(tmp_path: Path, their_server: str) -> None:
    site, url = Site(tmp_path / "site"), their_server
    deployments = site.project / "prefect.yaml"
    deployments.unlink()
    own = (ROOT / "prefect.yaml").read_text()
    deployments.write_text(own.replace("    name: dapo\n", "    name: gpu\n"))
    try:
        output = site.dapo("up", PREFECT_API_URL=url).stdout
        assert f"server: using {url}, named by PREFECT_API_URL; starting none" in output
        assert "Scheduled:      nothing; for nightly runs name your recipe" in output
        assert list(pids(site)) == ["worker"]
        found = site.dapo("doctor", PREFECT_API_URL=url).stdout
        assert re.search(r"worker +│ ok +│ dapo-\S+ in work pool gpu ", found), found
        assert ask(url, "POST", "/work_pools/filter")[0]["name"] == "gpu"

        deployment = ask(url, "GET", "/deployments/name/dapo-full/dapo-full")["id"]
        parameters = {"config": CONFIG, "overrides": site.changes(LONG_STAGE)}
        run = ask(url, "POST", f"/deployments/{deployment}/create_flow_run", parameters=parameters)[
            "id"
        ]
        state = lambda: ask(url, "GET", f"/flow_runs/{run}")["state"]["type"]  # noqa: E731
        site.wait_for("the run to start", lambda: state() == "RUNNING", 300)
        site.wait_for("a stage", lambda: [*site.store.glob("runs/*/fetch_model.log")], 300)
        assert run in site.dapo("down", status=2, PREFECT_API_URL=url).stderr
        cancelling = {"type": "CANCELLING"}
        ask(url, "POST", f"/flow_runs/{run}/set_state", state=cancelling)  # as the Prefect UI does
        site.wait_for("the end of the run", lambda: state() == "CANCELLED", 300)
        stopped = site.dapo("down").stdout
        assert stopped.startswith("stopped worker, pid ")
        assert "server" not in stopped
        assert "Traceback" not in site.services.worker.log.read_text()
        assert is_healthy(url)
    finally:
        site.end_everything()
