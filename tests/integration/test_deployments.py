"""prefect.yaml on a real server: deployed twice, run by name alone, parameters checked, nights scheduled."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tomllib
from flows.services.registration import CRASH_AUTOMATION, crash_automation
from prefect.automations import Automation

from flows.config import load_config
from tasks.training_lock import hold, night_lock_path
from tests.integration.browser import Browser
from tests.prefect_servers import ROOT, PrefectServer, started_server, wait_for

NAMES = [
    "compare",
    "dapo-full",
    "dapo-nightly",
    "evaluate-model",
    "fetch-model",
    "merge-checkpoint",
    "prepare-data",
    "train-policy",
]
SCHEDULE_SECONDS = 90.0
ANSWER_SECONDS = 60.0
WRONG = [
    ("config", "configs/arith_cpu.json"),
    ("overrides", ["seed=2"]),
    ("overrides", ["trian.total_steps=2"]),
    ("overrides", ["train.totl_steps=2"]),
    ("overrides", ["run.seed=2", "train.total_steps=-1"]),
    ("overrides", "run.seed=2"),
    ("side", "both"),
    ("force", "perhaps"),
]
REFUSED_HERE = [
    (["train.totl_steps=2"], "unknown key train.totl_steps = 2 (did you mean train.total_steps?)"),
    (["train.total_steps=-1"], "train.total_steps = -1 is refused: input should be greater than or equal to 1"),
]
STATES = """
import datetime, json, sys, time
from prefect.client.orchestration import get_client
from prefect.flow_engine import run_flow
from prefect.states import AwaitingRetry, Scheduled
from flows.dapo_full import dapo_full
from flows.dapo_nightly import dapo_nightly
from flows.single_stages import train
from tasks.training_limit import LIMIT, shown_as_training

def told(state):
    return [state.type.value, state.name, state.message]

store = f"store.path={sys.argv[1]}"
five_hours_ago = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(hours=5)
states = {
    "night": told(dapo_nightly(overrides=(store,), return_state=True)),
    "misspelt": told(dapo_full(overrides=(store, "train.total_stpes=2"), return_state=True)),
    "out of bounds": told(dapo_full(overrides=(store, "train.total_steps=-1"), return_state=True)),
    "without inputs": told(train(overrides=(store,), return_state=True)),
}
with get_client(sync_client=True) as client:
    due = Scheduled(scheduled_time=five_hours_ago)
    run = client.create_flow_run(dapo_nightly, parameters={"overrides": [store]}, state=due)
    states["late"] = told(run_flow(dapo_nightly, flow_run=run, return_type="state"))
    client.set_flow_run_state(run.id, AwaitingRetry(), force=True)
    again = client.read_flow_run(run.id)
    states["late, but tried again"] = told(run_flow(dapo_nightly, flow_run=again, return_type="state"))
    def slots():
        return client.read_global_concurrency_limit_by_name(LIMIT).active_slots
    def slots_reach(number):
        deadline = time.monotonic() + 20
        while slots() != number and time.monotonic() < deadline:
            time.sleep(0.1)
        return slots()
    with shown_as_training():
        states["slots while training"] = slots_reach(1)
    states["slots afterwards"] = slots_reach(0)
    states["names"] = [run.name for run in client.read_flow_runs()]
print(json.dumps(states))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    folder = tmp_path_factory.mktemp("deployments")
    with started_server(folder, **plugin_installed(folder / "site")) as server:
        yield server


@pytest.fixture(scope="module")
def deployed(server: PrefectServer) -> list[dict[str, Any]]:
    """The deployments after the second of two times, which must leave them what they were."""
    for words in (
        ["work-pool", "create", "dapo", "--type", "process"],
        ["gcl", "create", "dapo-training", "-l", "1"],
        ["automation", "create", "--from-file", "flows/services/crashed_runs.yaml"],
    ):
        done = server.prefect(*words)
        assert done.returncode == 0, done.stdout + done.stderr
    found = []
    for _ in range(2):
        done = server.prefect("--no-prompt", "deploy", "--all")
        assert done.returncode == 0, done.stdout + done.stderr
        found.append(ask(server, "/deployments/filter", sort="NAME_ASC").raise_for_status().json())
    first, second = (
        [(each["id"], each["name"], len(each["schedules"])) for each in each_time] for each_time in found
    )
    assert first == second
    return found[1]


def plugin_installed(site: Path) -> dict[str, str]:
    """The environment in which Prefect finds our plugin, also where the installation lacks its entry point."""
    if importlib.metadata.entry_points(group="prefect.plugins", name="dapo"):
        return {}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    metadata = site / "dapo_entry_points-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: dapo-entry-points\nVersion: 0\n")
    plugins = project["entry-points"]["prefect.plugins"].items()
    (metadata / "entry_points.txt").write_text(
        "[prefect.plugins]\n" + "\n".join(f"{name} = {module}" for name, module in plugins)
    )
    return {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}


def run_python(server: PrefectServer, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`python WORDS`, run to its end, with this server as Prefect's."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, **server.environment, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


def ask(server: PrefectServer, path: str, **content: Any) -> httpx.Response:
    """The answer to a POST, asked again where the server's SQLite was locked (503)."""
    with server.client() as client:
        return wait_for(
            path,
            lambda: answer if (answer := client.post(path, json=content)).status_code != 503 else None,
            ANSWER_SECONDS,
            server.folder / "server.log",
        )


def flow_runs(server: PrefectServer, deployment: str) -> list[dict[str, Any]]:
    """The flow runs of the deployment of this name."""
    chosen = {"name": {"any_": [deployment]}}
    return ask(server, "/flow_runs/filter", deployments=chosen).raise_for_status().json()


def test_every_flow_is_deployed_with_a_form_that_explains_itself(deployed: list[dict[str, Any]]) -> None:
    assert [deployment["name"] for deployment in deployed] == NAMES
    for deployment in deployed:
        assert deployment["description"]
        assert deployment["work_pool_name"] == "dapo"
        assert deployment["enforce_parameter_schema"]
        fields = deployment["parameter_openapi_schema"]["properties"]
        assert all(field["description"] and field["type"] for field in fields.values())
        assert set(deployment["parameters"]) <= set(fields)


def test_plain_prefect_makes_the_automation_that_dapo_up_looks_for(
    server: PrefectServer, deployed: list[dict[str, Any]]
) -> None:
    [content] = ask(server, "/automations/filter").raise_for_status().json()
    made, wanted = Automation.model_validate(content), crash_automation()
    assert (made.name, made.enabled) == (CRASH_AUTOMATION, True)
    assert made.trigger.model_dump(exclude={"id"}) == wanted.trigger.model_dump(exclude={"id"})
    assert made.actions == wanted.actions


def test_a_deployment_runs_by_its_name_alone(server: PrefectServer, deployed: list[dict[str, Any]]) -> None:
    done = server.prefect("deployment", "run", "dapo-full", "--param", 'overrides=["run.seed=2"]')
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    [run] = flow_runs(server, "dapo-full")
    assert run["parameters"] == {"config": "configs/arith_cpu.yaml", "overrides": ["run.seed=2"]}
    assert run["state_type"] == "SCHEDULED"


def test_wrong_parameters_are_refused_before_a_run_exists(
    server: PrefectServer, deployed: list[dict[str, Any]]
) -> None:
    for overrides, refusal in REFUSED_HERE:
        done = server.prefect("deployment", "run", "compare", "--param", f"overrides={json.dumps(overrides)}")
        assert done.returncode == 1, done.stdout + done.stderr
        assert done.stderr == refusal + "\n"
    [evaluation] = [each for each in deployed if each["name"] == "evaluate-model"]
    for name, value in WRONG:
        answer = ask(server, f"/deployments/{evaluation['id']}/create_flow_run", parameters={name: value})
        assert answer.status_code == 409, (name, value)
        assert name in answer.json()["detail"]
    assert flow_runs(server, "compare") == flow_runs(server, "evaluate-model") == []


def test_the_form_says_beside_a_field_what_is_wrong(server: PrefectServer, deployed: list[dict[str, Any]]) -> None:
    [full] = [each for each in deployed if each["name"] == "dapo-full"]
    before = [run["id"] for run in flow_runs(server, "dapo-full")]
    given = json.dumps({"overrides": ["run.seed=2", "train.totl_steps=2"]})
    with Browser() as browser:
        browser.open(
            f"{server.api.removesuffix('/api')}/deployments/deployment/{full['id']}/run?parameters={given}"
        )
        submit = "[...document.querySelectorAll('button')].find(button => button.innerText.trim() === 'Submit')"
        browser.wait_for(f"{submit} !== undefined && document.querySelectorAll('textarea').length === 3")
        for description in ("The recipe, a YAML file", "Changes to it, each section.key=value"):
            assert description in browser.evaluate("document.body.innerText")
        browser.evaluate(f"{submit}.click()")
        refusal = "'train.totl_steps=2' is not one of ['train.key=value, key: device, num_ranks, "
        browser.wait_for(f"document.body.innerText.includes({json.dumps(refusal)})")
    assert [run["id"] for run in flow_runs(server, "dapo-full")] == before


def test_a_name_that_says_too_little_is_answered_with_the_names_there_are(
    server: PrefectServer, deployed: list[dict[str, Any]]
) -> None:
    done = server.prefect("deployment", "run", "dapo-fool")
    said = "".join((done.stdout + done.stderr).split())  # Prefect breaks its lines anywhere
    assert done.returncode != 0
    assert "nodeploymentiscalled'dapo-fool'" in said
    assert all(f"{name}/{name}" in said for name in NAMES)
    for name in ("one", "other"):
        flow = ask(server, "/flows/", name=name).raise_for_status().json()["id"]
        ask(server, "/deployments/", name="twin", flow_id=flow).raise_for_status()
    done = server.prefect("deployment", "run", "twin")
    assert done.returncode != 0
    assert "one/twin,other/twin" in "".join((done.stdout + done.stderr).split())


def test_the_nightly_schedule_creates_runs(server: PrefectServer, deployed: list[dict[str, Any]]) -> None:
    """With SQLAlchemy 2.1 Prefect's scheduler fails at each pass and no night ever comes."""
    [nightly] = [each for each in deployed if each["name"] == "dapo-nightly"]
    [schedule] = nightly["schedules"]
    assert schedule["active"]
    assert not nightly["paused"]
    log = server.folder / "server.log"
    runs = wait_for("a scheduled run", lambda: flow_runs(server, "dapo-nightly"), SCHEDULE_SECONDS, log)
    assert {run["state_type"] for run in runs} == {"SCHEDULED"}
    assert all(run["auto_scheduled"] and "T02:00:00" in run["expected_start_time"] for run in runs)


def test_states_say_why_a_run_ended(server: PrefectServer, deployed: list[dict[str, Any]], tmp_path: Path) -> None:
    config = load_config(ROOT / "configs/arith_cpu.yaml", [f"store.path={tmp_path / 'store'}"])
    with hold(night_lock_path(config), "the-other-night"):
        done = run_python(server, "-c", STATES, str(tmp_path / "store"), PREFECT_LOGGING_EXTRA_LOGGERS="")
    assert done.returncode == 0, done.stdout + done.stderr
    states = json.loads(done.stdout.splitlines()[-1])
    for night, reason in (
        ("night", "run the-other-night on "),
        ("late", "came 5.0 hours late"),
        ("late, but tried again", "run the-other-night on "),
    ):
        kind, name, message = states[night]
        assert (kind, name) == ("COMPLETED", "Skipped")
        assert reason in message
    records = [json.loads(path.read_text()) for path in (tmp_path / "store" / "runs").glob("*/run.json")]
    assert sorted(record["state"] for record in records) == ["failed", "skipped", "skipped", "skipped"]
    assert "has no output of prepare_data" in states["without inputs"][2]
    assert states["misspelt"][0] == states["out of bounds"][0] == "FAILED"
    assert "did you mean train.total_steps?" in states["misspelt"][2]
    assert "train.total_steps = -1 is refused" in states["out of bounds"][2]
    assert (states["slots while training"], states["slots afterwards"]) == (1, 0)
    lines = [line["message"] for line in ask(server, "/logs/filter").raise_for_status().json()]
    assert any(line.startswith("skipped: came 5.0 hours late") for line in lines)  # our own lines are on the page
    assert f"arith_cpu store.path={tmp_path / 'store'} train.total_steps=-1" in states["names"]


def test_dapo_stage_runs_one_stage_and_says_where_its_output_is(server: PrefectServer, tmp_path: Path) -> None:
    changes = (f"store.path={tmp_path / 'store'}", "data.arithmetic.num_train=64", "data.arithmetic.num_eval=8")
    words = [word for change in changes for word in ("--set", change)]
    done = run_python(server, "-m", "flows.cli", "stage", "prepare-data", "configs/arith_cpu.yaml", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    output = Path(done.stdout.splitlines()[-1])
    assert (output / "train.parquet").is_file()
    [record] = (tmp_path / "store" / "runs").glob("*/run.json")
    run = json.loads(record.read_text())
    assert (run["flow"], run["state"]) == ("prepare-data", "completed")
    assert {label: stage["artifact"] for label, stage in run["stages"].items()} == {"prepare_data": str(output)}
