"""Flows and deployments: validation, names, parameters and logging."""

import datetime
import logging
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prefect import Flow
from prefect.client.schemas.schedules import CronSchedule
from prefect.flows import load_flow_from_entrypoint
from prefect.utilities.callables import parameter_schema

from dapo_core.errors import ConfigError
from flows.cli.chain import STAGES
from flows.config import load_config
from flows.dapo_full import dapo_full
from flows.dapo_nightly import dapo_nightly
from flows.prefect_settings import PROJECT_SETTINGS
from flows.recipe_flow import name_run
from flows.services import CRASH_AUTOMATION_FILE
from flows.single_stages import STAGE_FLOWS
from tasks.execution import page
from tests.operated import ROOT

CONFIG = "configs/arith_cpu.yaml"
DEPLOYMENTS = yaml.safe_load((ROOT / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]
BY_NAME = {deployment["name"]: deployment for deployment in DEPLOYMENTS}
# Behaves like a flow run's process, whose output its worker reads through a pipe.
LOGS_TO_A_CLOSED_PIPE = """
import logging, sys
import prefect.main
sys.stdin.readline()
for number in range(3):
    logging.getLogger("prefect.flow_runs").warning("line %d", number)
    logging.getLogger("tasks").warning("line %d", number)
print("goes on", file=open(sys.argv[1], "w"))
"""


@pytest.mark.parametrize(
    "flow", [dapo_full, dapo_nightly, *STAGE_FLOWS.values()], ids=lambda flow: flow.name
)
def test_an_invalid_value_fails_the_flow_before_it_writes_anything(
    flow: Flow[..., Any], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    refused = r"^train\.total_steps = '-1' is refused: it must be at least 1$"
    with pytest.raises(ConfigError, match=refused):
        flow.fn(str(ROOT / CONFIG), (f"store.path={store}", "train.total_steps='-1'"))
    assert not store.exists()


def test_a_flow_waits_for_its_artifacts_to_be_sent() -> None:
    sent: list[str] = []
    page.sender.submit(lambda: (time.sleep(0.2), sent.append("report")))
    for hook in dapo_full.on_cancellation_hooks[:1]:
        hook(flow=dapo_full, flow_run=None, state=None)  # as when cancelled in the Prefect UI
    assert sent == ["report"]


@pytest.mark.slow
def test_a_flow_survives_the_death_of_its_worker(tmp_path: Path) -> None:
    """With Prefect's console handler it would exit at its next log line."""
    script = [sys.executable, "-c", LOGS_TO_A_CLOSED_PIPE, str(tmp_path / "output")]
    read_end, write_end = os.pipe()
    process = subprocess.Popen(
        script, cwd=ROOT, stdin=subprocess.PIPE, stdout=write_end, stderr=write_end
    )
    os.close(read_end)
    os.close(write_end)
    process.communicate(b"\n", timeout=300)
    assert (tmp_path / "output").read_text() == "goes on\n"


def test_log_lines_of_stages_go_to_the_prefect_ui() -> None:
    config = yaml.safe_load(Path(PROJECT_SETTINGS["PREFECT_LOGGING_CONFIG_PATH"]).read_text())
    for package in ("flows", "tasks", "dapo_core", "eval"):
        assert config["loggers"][package] == {"level": "INFO", "handlers": ["api"]}
        assert logging.getLogger(package).handlers  # Prefect has read the file in this process


@pytest.mark.parametrize(
    ("overrides", "shown"),
    [
        (["run.seed=2", "flow.webhook.url=https://hooks.example/secret"], "run.seed=2"),
        (["a=0", "b=1", "c=2", "d=3"], "a=0 b=1 c=2 d=3"),
        (["a=0", "b=1", "c=2", "d=3", "e=4", "f=5"], "a=0 b=1 c=2 d=3 +2 more"),
    ],
)
def test_a_run_name_has_the_first_changes_and_no_webhook(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], shown: str
) -> None:
    given = {"config": CONFIG, "overrides": overrides}
    monkeypatch.setattr("flows.recipe_flow.flow_run", SimpleNamespace(parameters=given))
    assert name_run() == f"arith_cpu {shown}"


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=list(BY_NAME))
def test_each_deployment_matches_its_flow_with_valid_parameters(
    deployment: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    flow = load_flow_from_entrypoint(deployment["entrypoint"])
    assert deployment["name"] == flow.name
    assert deployment["work_pool"] == {"name": "dapo"}
    parameters = flow.validate_parameters(deployment["parameters"])
    load_config(ROOT / parameters["config"], parameters["overrides"])
    fields = parameter_schema(flow).properties
    assert all(field["description"] for field in fields.values())
    assert "Args:" not in flow.description


def test_the_chain_the_nightly_run_and_each_stage_have_one_deployment() -> None:
    assert list(BY_NAME) == ["dapo-full", "dapo-nightly", *STAGE_FLOWS]
    assert len(BY_NAME) == len(DEPLOYMENTS)
    assert list(STAGES) == list(STAGE_FLOWS)


def test_the_nightly_run_is_scheduled_once_a_day_when_a_recipe_is_named() -> None:
    [schedule] = BY_NAME["dapo-nightly"]["schedules"]
    assert schedule["active"] is False
    assert CronSchedule(cron=schedule["cron"], timezone=schedule["timezone"]).timezone == "UTC"
    minute, hour, *days = schedule["cron"].split()
    assert datetime.time(int(hour), int(minute))
    assert days == ["*", "*", "*"]


@pytest.mark.slow  # as the imports are
def test_a_lost_heartbeat_only_crashes_our_flows() -> None:
    from prefect.server.events.schemas.automations import EventTrigger
    from prefect.server.events.schemas.events import ReceivedEvent

    trigger = EventTrigger.model_validate(
        yaml.safe_load(CRASH_AUTOMATION_FILE.read_text())["trigger"]
    )
    flows = [dapo_full.name, dapo_nightly.name, *(flow.name for flow in STAGE_FLOWS.values())]
    covered = []
    for name in (*flows, "of-another-project"):
        related = {"prefect.resource.id": "prefect.flow.1", "prefect.resource.role": "flow"}
        heartbeat = {
            "id": str(uuid.uuid4()),
            "occurred": "2026-01-31T02:00:00Z",
            "event": "prefect.flow-run.heartbeat",
            "resource": {"prefect.resource.id": "prefect.flow-run.2"},
            "related": [related | {"prefect.resource.name": name}],
        }
        covered += [name] if trigger.covers(ReceivedEvent.model_validate(heartbeat)) else []
    assert covered == flows
