"""The deployment that prefect.yaml describes is the flow of this project, with parameters it accepts."""

from __future__ import annotations

from pathlib import Path

import yaml

from dapo_core.config import load_config
from flows.dapo_full import dapo_full

ROOT = Path(__file__).parents[2]


def test_the_deployment_is_the_flow_and_its_parameters_are_valid() -> None:
    (deployment,) = yaml.safe_load((ROOT / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]
    assert (deployment["name"], dapo_full.name) == ("dapo-full", "dapo-full")
    file, name = deployment["entrypoint"].split(":")
    assert (ROOT / file).samefile(str(dapo_full.fn.__code__.co_filename))
    assert name == dapo_full.fn.__name__
    parameters = dapo_full.validate_parameters(deployment["parameters"])
    load_config(ROOT / parameters["config"], parameters["overrides"])
