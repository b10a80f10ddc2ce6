"""Variables the chain sets for child processes, as listed in manifests, runs and reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from dapo_core.machine.device import device_for
from flows.cli import app
from flows.config import load_config
from tasks.artifacts.artifact import artifact_at
from tasks.links import link_of
from tasks.preflight.environment import TABLE
from tasks.runs.child_environment import by_children, child_environment
from tasks.runs.report import provenance_of
from tests.recorded_runs import record_run, small_config

RECIPE = "configs/dapo_qwen3_32b_math.yaml"  # NPUs of four nodes, colocated


def test_npu_variables_match_the_table() -> None:
    ours = {
        row["name"]: row["chain_value"]
        for row in yaml.safe_load(TABLE.read_text())
        if "chain_value" in row
    }
    assert device_for("npu").variables(is_shared=True) == ours
    link = link_of(load_config(Path(RECIPE)), "train_policy")
    rows = {row["name"]: row for row in child_environment(link, {}, {"VLLM_ASCEND_ENABLE_NZ": "1"})}
    assert {name: rows[name]["value"] for name in ours} == ours  # of nodes, not of this machine
    assert rows["VLLM_ASCEND_ENABLE_NZ"] == {
        "name": "VLLM_ASCEND_ENABLE_NZ",
        "value": "0",
        "children": "policy ranks and rollout workers, unless their node sets it",
        "why": "Keeps weights in the NZ layout (default 1), in which engines cannot take new "
        "weights.",
    }
    assert "GLOO_SOCKET_IFNAME" not in rows


def test_values_set_by_the_user_are_not_listed(tmp_path: Path) -> None:
    link = link_of(small_config(tmp_path, "rollout.engine=vllm"), "train_policy")
    user = {
        "RAY_COLOR_PREFIX": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }
    rows = {row["name"]: row["value"] for row in child_environment(link, {}, user)}
    assert "RAY_COLOR_PREFIX" not in rows
    assert rows["VLLM_NO_USAGE_STATS"] == "1"
    assert rows["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"  # it is set over the user's
    assert (rows["GLOO_SOCKET_IFNAME"], rows["RAY_AUTH_TOKEN"]) == ("lo", "[redacted]")


def test_batch_invariant_kernels_are_set_for_engines_alone(tmp_path: Path) -> None:
    keys = "rollout.engine=vllm", "train.device=cuda", "train.num_ranks=1"
    for is_set in ("true", "false"):
        config = small_config(tmp_path, *keys, f"rollout.batch_invariant={is_set}")
        rows = {
            row["name"]: row for row in child_environment(link_of(config, "train_policy"), {}, {})
        }
        assert ("VLLM_BATCH_INVARIANT" in rows) == (is_set == "true")
        if is_set == "true":
            assert rows["VLLM_BATCH_INVARIANT"]["children"] == "rollout workers"


def test_a_servers_variables_are_listed_unless_all_was_in_the_store(tmp_path: Path) -> None:
    link = link_of(small_config(tmp_path), "evaluate_before")
    given = by_children(child_environment(link, {}, {}))
    assert "VLLM_NO_USAGE_STATS=1" in given["server"]
    assert "VLLM_API_KEY='[redacted]'" in given["server"]
    assert child_environment(link, {"serve_command": ""}, {}) == []


@pytest.mark.slow
def test_runs_and_reports_list_variables_and_keys_ignore_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_COLOR_PREFIX", raising=False)
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    first = record_run(small_config(tmp_path / "one"))
    monkeypatch.setenv("RAY_COLOR_PREFIX", "1")
    second = record_run(small_config(tmp_path / "two"))
    trained = [run.stages["train_policy"] for run in (first, second)]
    assert (trained[0].key, trained[0].digest) == (trained[1].key, trained[1].digest)
    assert first.environment["train_policy"] != second.environment["train_policy"]
    again = record_run(small_config(tmp_path / "one"))  # all from the store
    assert (again.stages["train_policy"].cached, again.environment) == (True, first.environment)

    shown = (
        CliRunner().invoke(app, ["runs", "show", "latest", "--store", str(tmp_path / "one")]).output
    )
    assert (
        "\n  Ray's workers: OMP_WAIT_POLICY=PASSIVE HF_HUB_DISABLE_PROGRESS_BARS=1 "
        "GLOO_SOCKET_IFNAME=lo LD_PRELOAD=" in shown
    )
    words = ["runs", "show", "latest", "--store", str(tmp_path / "one"), "--json"]
    rows = json.loads(CliRunner().invoke(app, words).output)["environment"]
    [api_key] = [row for row in rows if row["name"] == "VLLM_API_KEY"]
    assert (api_key["value"], api_key["stages"]) == (
        "[redacted]",
        ["evaluate_before", "evaluate_after"],
    )
    made = provenance_of(
        first,
        *(
            artifact_at(Path(first.stages[label].artifact))
            for label in ("evaluate_before", "evaluate_after", "train_policy")
        ),
    ).facts
    assert "; Ray's workers: OMP_WAIT_POLICY=PASSIVE " in made["environment"]
