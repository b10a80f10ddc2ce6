"""The deployments that prefect.yaml describes are flows of this project, with parameters that they accept."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.client.schemas.schedules import CronSchedule
from prefect.flows import load_flow_from_entrypoint
from prefect.utilities.callables import parameter_schema

from flows.cli.chain import StageName
from flows.config import load_config
from flows.single_stages import STAGE_FLOWS

ROOT = Path(__file__).parents[2]
DEPLOYMENTS = yaml.safe_load((ROOT / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]
BY_NAME = {deployment["name"]: deployment for deployment in DEPLOYMENTS}


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=list(BY_NAME))
def test_the_deployment_is_the_flow_of_its_name_and_its_parameters_are_valid(
    deployment: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    flow = load_flow_from_entrypoint(deployment["entrypoint"])
    # What Flow.serve hands to its processes has lost the names that annotations kept as text would need.
    assert not any(isinstance(annotation, str) for annotation in flow.fn.__annotations__.values())
    assert deployment["name"] == flow.name
    assert deployment["work_pool"] == {"name": "dapo"}
    parameters = flow.validate_parameters(deployment["parameters"])
    load_config(ROOT / parameters["config"], parameters["overrides"])
    fields = parameter_schema(flow).properties
    assert all(field["description"] for field in fields.values())
    assert "Args:" not in flow.description


def test_there_is_one_deployment_for_the_chain_the_night_and_each_stage() -> None:
    assert len(BY_NAME) == len(DEPLOYMENTS)
    assert list(BY_NAME) == ["dapo-full", "dapo-nightly", *STAGE_FLOWS]
    assert [name.value for name in StageName] == list(STAGE_FLOWS)


def test_the_night_comes_once_a_day() -> None:
    [schedule] = BY_NAME["dapo-nightly"]["schedules"]
    assert schedule["active"] is True
    assert CronSchedule(cron=schedule["cron"], timezone=schedule["timezone"]).timezone == "UTC"
    minute, hour, *days = schedule["cron"].split()
    assert datetime.time(int(hour), int(minute))
    assert days == ["*", "*", "*"]
