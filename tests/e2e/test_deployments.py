"""Deployments, parameters, schedules and the Prefect UI's data, with a real Prefect server."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import prefect.settings
import pytest
import yaml

from dapo_core.machine.ports import free_ports
from flows.config import load_config
from flows.prefect_settings import apply_prefect_settings
from flows.services import CRASH_AUTOMATION, CRASH_AUTOMATION_FILE, PREFECT
from tasks.execution.training_lock import hold, nightly_lock_path
from tests.operated import API_SECONDS, ROOT, Site
from tests.webhooks import started_receiver

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
SCHEDULE_SECONDS = 300.0
WRONG = [
    ("overrides", "run.seed=2"),
    ("side", "both models"),
    ("force", "perhaps"),
]
STATES = """
import datetime, json, sys
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.schedules import CronSchedule
from prefect.flow_engine import run_flow
from prefect.states import AwaitingRetry, Scheduled
from flows.dapo_full import dapo_full
from flows.dapo_nightly import dapo_nightly
from flows.single_stages import train_policy

def ending(state):
    return [state.type.value, state.name, state.message]

store = f"store.path={sys.argv[1]}"
def run_state(flow, run):
    return ending(run_flow(flow, flow_run=run, return_type="state"))

five_hours_ago = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(hours=5)
states = {
    "night": ending(dapo_nightly(overrides=(store,), return_state=True)),
    "misspelt": ending(dapo_full(overrides=(store, "train.total_stpes=2"), return_state=True)),
    "bounds": ending(dapo_full(overrides=(store, "train.total_steps=-1"), return_state=True)),
    "without inputs": ending(train_policy(overrides=(store,), return_state=True)),
}
with get_client(sync_client=True) as client:
    due = Scheduled(scheduled_time=five_hours_ago)
    run = client.create_flow_run(dapo_nightly, parameters={"overrides": [store]}, state=due)
    states["late"] = run_state(dapo_nightly, run)
    client.set_flow_run_state(run.id, AwaitingRetry(), force=True)
    again = client.read_flow_run(run.id)
    states["late, but tried again"] = run_state(dapo_nightly, again)
    berlin = CronSchedule(cron="30 1 * * *", timezone="Europe/Berlin")
    night = DeploymentScheduleCreate(schedule=berlin, active=False)
    flow = client.create_flow(dapo_nightly)
    in_berlin = client.create_deployment(flow, "in-berlin", schedules=[night])
    midnight = datetime.datetime(2026, 3, 29, 23, 30, tzinfo=datetime.timezone.utc)
    parameters, due = {"overrides": [store]}, Scheduled(scheduled_time=midnight)
    run = client.create_flow_run_from_deployment(in_berlin, parameters=parameters, state=due)
    states["in Berlin"] = run_state(dapo_nightly, run)
    states["names"] = [run.name for run in client.read_flow_runs()]
print(json.dumps(states))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A project with a server started by plain Prefect as in docs/security.md."""
    site, port = Site(tmp_path_factory.mktemp("deployments")), free_ports("127.0.0.1")[0]
    server, api_url = site.services.server, f"http://127.0.0.1:{port}/api"
    site.services.folder.mkdir(parents=True)
    start = (*PREFECT, "server", "start", "--host", "127.0.0.1", "--port", str(port))
    try:
        environment = {
            **site.environment,
            "PREFECT_API_URL": api_url,  # also tells the server the address of its UI
            "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": api_url.removesuffix("/api"),
            "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",
        }
        server.start(start, environment, api_url=api_url, port=port)
        server.wait_until(site.services.answers, "does not respond")
        yield site
    finally:
        site.end_everything()


@pytest.fixture(scope="module")
def deployed(site: Site) -> list[dict[str, Any]]:
    """The deployments of deploy/setup.sh; deploying again must change nothing."""
    found = []
    for command in (["deploy/setup.sh"], ["prefect", "--no-prompt", "deploy", "--all"]):
        site.run(*command)
        found.append(site.ask("POST", "/deployments/filter", sort="NAME_ASC"))
    first, second = (
        [(one["id"], one["name"], len(one["schedules"])) for one in once] for once in found
    )
    assert first == second
    [automation] = site.ask("POST", "/automations/filter")
    assert (automation["name"], automation["enabled"]) == (CRASH_AUTOMATION, True)
    return found[1]


def flow_runs(site: Site, deployment: str) -> list[dict[str, Any]]:
    """Return the flow runs of a deployment."""
    return site.ask("POST", "/flow_runs/filter", deployments={"name": {"any_": [deployment]}})


def run_flows(site: Site, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS`, whose flows report to the server."""
    environment = {
        "PREFECT_HOME": str(site.folder / "prefect"),
        "PREFECT_API_URL": site.services.api_url,
    }
    apply_prefect_settings(environment)
    return site.run(sys.executable, *words, **environment)


def test_every_flow_is_deployed_with_described_parameters(deployed: list[dict[str, Any]]) -> None:
    assert [deployment["name"] for deployment in deployed] == NAMES
    for deployment in deployed:
        assert deployment["description"]
        assert deployment["work_pool_name"] == "dapo"
        assert deployment["enforce_parameter_schema"]
        fields = deployment["parameter_openapi_schema"]["properties"]
        assert all(field["description"] and field["type"] for field in fields.values())
        assert set(deployment["parameters"]) <= set(fields)


def test_the_guides_automation_posts_crashed_runs(
    site: Site, deployed: list[dict[str, Any]], tmp_path: Path
) -> None:
    guide = (
        (ROOT / "docs/notifications.md")
        .read_text()
        .split("## Runs that end unseen")[1]
        .split("\n## ")[0]
    )
    code, automation = re.findall(r"```(?:python|yaml)\n(.*?)```", guide, re.DOTALL)
    [action] = yaml.safe_load(CRASH_AUTOMATION_FILE.read_text())["actions"]
    with started_receiver() as receiver:
        block = run_flows(
            site, "-c", code.replace("https://hooks.example.org/...", receiver.url())
        ).stdout
        path = tmp_path / "unseen-crashes.yaml"
        path.write_text(automation.replace("BLOCK_ID", block.strip()))
        site.run("prefect", "automation", "create", "--from-file", str(path))
        flow_run = site.create_run("prepare-data")
        crashed = {"type": "CRASHED", "name": "Crashed", "message": action["message"]}
        site.ask("POST", f"/flow_runs/{flow_run}/set_state", state=crashed, force=True)
        site.wait_for("the webhook", lambda: receiver.received, SCHEDULE_SECONDS)
        [(_, event)] = receiver.received
    assert (event["event"], event["reason"]) == ("crashed", action["message"])
    assert event["flow_run"]["url"].endswith(flow_run)


def test_deploy_files_use_existing_prefect_commands_and_settings(site: Site) -> None:
    units = {path.name: path.read_text() for path in (ROOT / "deploy").iterdir()}
    start = re.compile(r"prefect ((?:server|worker) start.*?)[\n\"]")
    commands = {command for text in units.values() for command in start.findall(text)}
    assert len(commands) == 3
    for kind in ("server", "worker"):
        page = site.run("prefect", kind, "start", "--help").stdout
        words = [
            word for command in commands if command.startswith(kind) for word in command.split()
        ]
        assert [word for word in words if word.startswith("--") and word not in page] == []
    variables = {name for text in units.values() for name in re.findall(r"PREFECT_\w+", text)}
    assert [name for name in variables if not hasattr(prefect.settings, name)] == []


def test_a_deployment_runs_by_its_short_name(site: Site, deployed: list[dict[str, Any]]) -> None:
    done = site.run(
        "prefect", "deployment", "run", "dapo-full", "--param", 'overrides=["run.seed=2"]'
    )
    assert done.stderr == ""
    [run] = flow_runs(site, "dapo-full")
    assert run["parameters"] == {"config": "configs/arith_cpu.yaml", "overrides": ["run.seed=2"]}
    assert run["state_type"] == "SCHEDULED"


def test_other_web_sites_cannot_use_the_server(site: Site) -> None:
    url, headers = f"{site.services.api_url}/flow_runs/filter", {"Origin": "https://site.example"}
    answer = httpx.post(url, content="{}", headers=headers, trust_env=False, timeout=API_SECONDS)
    assert (answer.status_code, answer.headers.get("access-control-allow-origin")) == (403, None)


def test_wrong_parameters_are_refused_before_a_run_exists(
    site: Site, deployed: list[dict[str, Any]]
) -> None:
    [evaluation] = [each for each in deployed if each["name"] == "evaluate-model"]
    for name, value in WRONG:
        path = f"/deployments/{evaluation['id']}/create_flow_run"
        answer = site.request("POST", path, parameters={name: value})
        assert answer.status_code == 409, (name, value)
        assert name in answer.json()["detail"]
    assert flow_runs(site, "evaluate-model") == []


def test_the_nightly_schedule_creates_runs(site: Site, deployed: list[dict[str, Any]]) -> None:
    """With SQLAlchemy 2.1, Prefect's scheduler fails and never creates a run."""
    [nightly] = [each for each in deployed if each["name"] == "dapo-nightly"]
    [schedule] = nightly["schedules"]
    assert not schedule["active"]  # until a recipe is named
    assert not nightly["paused"]
    site.ask("PATCH", f"/deployments/{nightly['id']}/schedules/{schedule['id']}", active=True)
    runs = site.wait_for(
        "a scheduled run", lambda: flow_runs(site, "dapo-nightly"), SCHEDULE_SECONDS
    )
    assert {run["state_type"] for run in runs} == {"SCHEDULED"}
    assert all(run["auto_scheduled"] and "T02:00:00" in run["expected_start_time"] for run in runs)


def test_states_explain_why_a_run_ended(
    site: Site, deployed: list[dict[str, Any]], tmp_path: Path
) -> None:
    config = load_config(ROOT / "configs/arith_cpu.yaml", [f"store.path={tmp_path / 'store'}"])
    with hold(nightly_lock_path(config), "the-other-night"):
        done = run_flows(site, "-c", STATES, str(tmp_path / "store"))
    states = json.loads(done.stdout.splitlines()[-1])
    for night, reason in (
        ("night", "because run the-other-night ("),
        ("late", "started 5.0 hours late"),
        ("in Berlin", "due 2026-03-29 23:30 UTC"),
        ("late, but tried again", "because run the-other-night ("),
    ):
        kind, name, message = states[night]
        assert (kind, name) == ("COMPLETED", "Skipped")
        assert reason in message
    records = [
        json.loads(path.read_text()) for path in (tmp_path / "store" / "runs").glob("*/run.json")
    ]
    assert sorted(record["state"] for record in records) == ["failed", *["skipped"] * 4]
    assert "has no output of prepare_data" in states["without inputs"][2]
    assert states["misspelt"][0] == states["bounds"][0] == "FAILED"
    assert "did you mean train.total_steps?" in states["misspelt"][2]
    assert "train.total_steps = -1 is refused" in states["bounds"][2]
    lines = [line["message"] for line in site.ask("POST", "/logs/filter")]
    assert any("skipped because it started 5.0 hours late" in line for line in lines)  # in the UI
    assert f"arith_cpu store.path={tmp_path / 'store'} train.total_steps=-1" in states["names"]
    # the date in Berlin
    assert f"arith_cpu store.path={tmp_path / 'store'} 2026-03-30" in states["names"]


@dataclass(frozen=True)
class Seen:
    """What the server knows about the four runs of page_flow, oldest first."""

    folder: Path
    flow_runs: list[dict[str, Any]]
    tasks: list[dict[str, dict[str, Any]]]  # for each flow run, its task runs by the task's name
    logs: list[dict[str, Any]]
    artifacts: list[dict[str, Any]]
    posted: list[dict[str, Any]]  # payloads sent to the webhook

    def of(self, key: str) -> list[dict[str, Any]]:
        return [artifact for artifact in self.artifacts if artifact["key"] == key]


@pytest.fixture(scope="module")
def seen(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("page")
    with started_receiver() as webhook:
        run_flows(site, "-m", "tests.integration.page_flow", str(folder), webhook.url())
    flows = {"name": {"any_": ["seen"]}}
    flow_runs = site.ask("POST", "/flow_runs/filter", sort="START_TIME_ASC", flows=flows)
    task_runs = site.ask("POST", "/task_runs/filter", flows=flows)
    for task_run in task_runs:
        task_run["states"] = site.ask("GET", f"/task_run_states/?task_run_id={task_run['id']}")
    tasks = [
        {run["name"]: run for run in task_runs if run["flow_run_id"] == flow_run["id"]}
        for flow_run in flow_runs
    ]
    logs = site.ask("POST", "/logs/filter", sort="TIMESTAMP_ASC")
    artifacts = site.ask("POST", "/artifacts/filter", sort="CREATED_DESC")[::-1]
    return Seen(
        folder, flow_runs, tasks, logs, artifacts, [payload for _, payload in webhook.received]
    )


def test_states_show_whether_and_when_a_stage_was_built(seen: Seen) -> None:
    message = r"built in \d+\.\d s on \d{4}-\d\d-\d\d, key [0-9a-f]{16}"
    for label in ("prepare_data", "fetch_model", "train_policy"):
        first, second = (tasks[label]["state"] for tasks in seen.tasks[:2])
        assert [(state["type"], state["name"]) for state in (first, second)] == [
            ("COMPLETED", "Completed"),
            ("COMPLETED", "Cached"),
        ]
        assert re.fullmatch(message, first["message"])
        assert second["message"] == first["message"]
    assert [run["state"]["type"] for run in seen.flow_runs] == [
        "COMPLETED",
        "COMPLETED",
        "FAILED",
        "FAILED",
    ]


def test_a_killed_child_is_retried_with_the_reason_in_the_log(seen: Seen) -> None:
    run = seen.tasks[0]["train_policy"]
    names = [state["name"] for state in sorted(run["states"], key=lambda state: state["timestamp"])]
    assert names == ["Pending", "Running", "AwaitingRetry", "Retrying", "Completed"]
    [line] = [
        log for log in seen.logs if log["level"] == 30 and "attempt 1 of 4 failed" in log["message"]
    ]
    assert line["task_run_id"] == run["id"]
    assert (
        "retrying in 0.2 s: ChildProcessFailed: train_policy was killed by SIGKILL"
        in line["message"]
    )
    assert line["message"].endswith(".log: the engine is lost")


def test_a_permanent_error_is_not_retried_and_is_one_line(seen: Seen) -> None:
    run = seen.tasks[2]["train_policy"]
    assert (run["run_count"], run["state"]["name"]) == (1, "Failed")
    for state in (run["state"], seen.flow_runs[2]["state"]):
        assert (
            "ChildProcessFailed: train_policy ended with exit code 2; its log is "
            in state["message"]
        )
        assert state["message"].endswith(": DataError: no rows")
        assert "\n" not in state["message"]


def test_a_timeout_names_the_key(seen: Seen) -> None:
    run = seen.tasks[3]["train_policy"]
    assert (run["run_count"], run["state"]["name"], run["state"]["type"]) == (
        1,
        "TimedOut",
        "FAILED",
    )
    assert "exceeded timeout of 7.2 second(s)" in run["state"]["message"]
    stopped = "flow.time_limits.train_policy_hours=0.002: the stage was stopped; raise it, or run"
    assert stopped in seen.flow_runs[3]["state"]["message"]
    logs = (seen.folder / "store" / ".logs").glob("train_policy-*.log")
    assert any("kept a checkpoint" in log.read_text() for log in logs)


def test_a_stages_artifact_links_to_its_inputs(seen: Seen) -> None:
    first, second, *_ = seen.of("arith-cpu-train-policy")
    assert (first["type"], first["flow_run_id"]) == ("markdown", seen.flow_runs[0]["id"])
    assert first["task_run_id"] == seen.tasks[0]["train_policy"]["id"]
    assert first["description"].startswith("built in ")
    assert second["description"].startswith("cached, built in ")
    assert str(seen.folder / "store" / "train_policy") in first["data"]
    assert "| sampler/accuracy | 4 |" in first["data"]
    links = re.findall(
        r"^- \[(\w+)\]\(/artifacts/key/([a-z0-9-]+)\): `[0-9a-f]{16}`$", first["data"], re.MULTILINE
    )
    assert links == [
        ("prepare_data", "arith-cpu-prepare-data"),
        ("fetch_model", "arith-cpu-fetch-model"),
    ]
    assert all(seen.of(key) for _, key in links)


def test_training_updates_one_bar_and_one_table(seen: Seen) -> None:
    [bar] = seen.of("arith-cpu-train-policy-progress")
    [table] = seen.of("arith-cpu-train-policy-steps")
    assert (bar["type"], bar["data"]) == ("progress", 100.0)
    rows = json.loads(table["data"])
    assert [row["step"] for row in rows] == [12, 11, 10, 9, 8, 7, 6, 5, 4, 3]
    assert rows[1] == {
        "step": 11,
        "accuracy": 3.667,
        "response tokens": None,
        "entropy": None,
        "KL": None,
        "clip fraction": None,
        "seconds": None,
        "engines idle": None,
        "tokens/s per device": 123456,
    }


def test_the_report_is_an_artifact_of_its_recipe(seen: Seen) -> None:
    first, second = seen.of("arith-cpu-report")
    report = next(seen.folder.glob("store/runs/*/report/report.json"))
    assert first["description"] == json.loads(report.read_text())["verdict"]
    for artifact in (first, second):
        assert re.search(r"`\S+/report/report\.html`", artifact["data"])
        assert "| accuracy " in artifact["data"]
        assert "[train_policy](/artifacts/key/arith-cpu-train-policy)" in artifact["data"]


def test_the_webhook_is_called_once_per_run_with_its_ui_url(seen: Seen) -> None:
    assert [payload["event"] for payload in seen.posted] == ["report", "report", "failed", "failed"]
    for payload, flow_run in zip(seen.posted, seen.flow_runs, strict=True):
        assert payload["flow_run"]["name"] == flow_run["name"]
        assert payload["flow_run"]["url"].endswith(f"/runs/flow-run/{flow_run['id']}")
    assert (seen.posted[0]["before"], seen.posted[0]["after"], seen.posted[0]["n"]) == (
        0.25,
        0.75,
        4,
    )
    assert seen.posted[2]["reason"] == seen.flow_runs[2]["state"]["message"]
    assert (seen.posted[3]["state"], seen.posted[3]["recipe"]) == ("TimedOut", "arith_cpu")
