"""What a real Prefect server knows of runs of our tasks: states and their messages, logs, artifacts and links."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.prefect_servers import ROOT, started_server
from tests.webhooks import started_receiver


@dataclass(frozen=True)
class Seen:
    """What the server answers after four runs of page_flow, oldest first."""

    folder: Path
    flow_runs: list[dict[str, Any]]
    tasks: list[dict[str, dict[str, Any]]]  # for each flow run, its task runs by the task's name
    logs: list[dict[str, Any]]
    artifacts: list[dict[str, Any]]
    told: list[dict[str, Any]]  # to the webhook

    def of(self, key: str) -> list[dict[str, Any]]:
        return [artifact for artifact in self.artifacts if artifact["key"] == key]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("page")
    with started_receiver() as webhook, started_server(folder) as server, server.client() as client:
        done = subprocess.run(
            [sys.executable, "-m", "tests.integration.page_flow", str(folder), webhook.url()],
            cwd=ROOT,
            env={**os.environ, **server.environment},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]

        def read(what: str, **query: Any) -> list[dict[str, Any]]:
            return client.post(f"/{what}/filter", json=query).raise_for_status().json()

        flow_runs = read("flow_runs", sort="START_TIME_ASC")
        task_runs = read("task_runs")
        for task_run in task_runs:
            task_run["states"] = client.get("/task_run_states/", params={"task_run_id": task_run["id"]}).json()
        tasks = [
            {run["name"].rpartition("-")[0]: run for run in task_runs if run["flow_run_id"] == flow_run["id"]}
            for flow_run in flow_runs
        ]
        logs = read("logs", sort="TIMESTAMP_ASC")
        artifacts = read("artifacts", sort="CREATED_DESC")[::-1]
    return Seen(folder, flow_runs, tasks, logs, artifacts, [payload for _, payload in webhook.received])


def test_the_state_says_whether_a_stage_was_cached_and_when_it_was_built(seen: Seen) -> None:
    message = r"built in \d+\.\d s on \d{4}-\d\d-\d\d, key [0-9a-f]{16}"
    for label in ("prepare-data", "fetch-model", "train-policy"):
        first, second = (tasks[label]["state"] for tasks in seen.tasks[:2])
        assert [(state["type"], state["name"]) for state in (first, second)] == [
            ("COMPLETED", "Completed"),
            ("COMPLETED", "Cached"),
        ]
        assert re.fullmatch(message, first["message"])
        assert second["message"] == first["message"]
    assert [run["state"]["type"] for run in seen.flow_runs] == ["COMPLETED", "COMPLETED", "FAILED", "FAILED"]


def test_a_killed_child_is_started_again_and_the_page_says_why(seen: Seen) -> None:
    run = seen.tasks[0]["train-policy"]
    names = [state["name"] for state in sorted(run["states"], key=lambda state: state["timestamp"])]
    assert names == ["Pending", "Running", "AwaitingRetry", "Retrying", "Completed"]
    [line] = [log for log in seen.logs if log["level"] == 30 and "attempt 1 of 4 failed" in log["message"]]
    assert line["task_run_id"] == run["id"]
    assert (
        "the next one begins in 0.2 s: ChildProcessFailed: train_policy was killed by SIGKILL" in line["message"]
    )
    assert line["message"].endswith(".log: the engine is lost")


def test_what_cannot_pass_is_not_tried_again_and_is_told_in_one_line(seen: Seen) -> None:
    run = seen.tasks[2]["train-policy"]
    assert (run["run_count"], run["state"]["name"]) == (1, "Failed")
    for state in (run["state"], seen.flow_runs[2]["state"]):
        assert "ChildProcessFailed: train_policy ended with exit code 2; its log is " in state["message"]
        assert state["message"].endswith(": DataError: no rows")
        assert "\n" not in state["message"]


def test_a_stage_that_takes_too_long_names_the_key(seen: Seen) -> None:
    run = seen.tasks[3]["train-policy"]
    assert (run["run_count"], run["state"]["name"], run["state"]["type"]) == (1, "TimedOut", "FAILED")
    for state in (run["state"], seen.flow_runs[3]["state"]):
        assert (
            "flow.time_limits.train_policy_hours=0.0003: ended after 1.08 s; raise it, or run it"
            in state["message"]
        )


def test_a_stage_is_shown_with_links_to_what_it_was_made_from(seen: Seen) -> None:
    first, second, *_ = seen.of("arith-cpu-train-policy")
    assert (first["type"], first["flow_run_id"]) == ("markdown", seen.flow_runs[0]["id"])
    assert first["task_run_id"] == seen.tasks[0]["train-policy"]["id"]
    assert first["description"].startswith("built in ")
    assert second["description"].startswith("cached, built in ")
    assert str(seen.folder / "store" / "train_policy") in first["data"]
    assert "| sampler/accuracy | 4 |" in first["data"]
    links = re.findall(
        r"^- \[(\w+)\]\(/artifacts/key/([a-z0-9-]+)\): `[0-9a-f]{16}`$", first["data"], re.MULTILINE
    )
    assert links == [("prepare_data", "arith-cpu-prepare-data"), ("fetch_model", "arith-cpu-fetch-model")]
    assert all(seen.of(key) for _, key in links)


def test_training_is_one_bar_and_one_table_however_often_they_change(seen: Seen) -> None:
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
        "tokens/s per device": 123456,
    }


def test_the_report_is_on_the_page_of_its_recipe(seen: Seen) -> None:
    first, second = seen.of("arith-cpu-report")
    report = next(seen.folder.glob("store/runs/*/report/report.json"))
    assert first["description"] == json.loads(report.read_text())["verdict"]
    for artifact in (first, second):
        assert re.search(r"`\S+/report/report\.html`", artifact["data"])
        assert "| accuracy " in artifact["data"]
        assert "[train_policy](/artifacts/key/arith-cpu-train-policy)" in artifact["data"]


def test_the_webhook_is_told_once_of_each_run_with_its_place_on_the_page(seen: Seen) -> None:
    assert [payload["event"] for payload in seen.told] == ["report", "report", "failed", "failed"]
    for payload, flow_run in zip(seen.told, seen.flow_runs, strict=True):
        assert payload["flow_run"]["name"] == flow_run["name"]
        assert payload["flow_run"]["url"].endswith(f"/runs/flow-run/{flow_run['id']}")
    assert (seen.told[0]["before"], seen.told[0]["after"], seen.told[0]["n"]) == (0.25, 0.75, 4)
    assert seen.told[2]["reason"] == seen.flow_runs[2]["state"]["message"]
    assert (seen.told[3]["state"], seen.told[3]["recipe"]) == ("TimedOut", "arith_cpu")
