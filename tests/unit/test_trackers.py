"""Trackers with fake clients: what is sent once, how failures are handled, and what is never sent."""

from __future__ import annotations

import errno
import json
import math
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dapo_core import trackers
from dapo_core.checkpoint.folder import TRACKERS_FILE, generations_file
from dapo_core.errors import ConfigError
from dapo_core.tracker_clients import CLIENTS, Client, Place, Record, Rows
from dapo_core.trackers import (
    require_trackers,
    send_results,
    tracked_config,
    tracked_runs,
    tracking,
)
from flows.config import Config
from tasks.artifacts.artifact import Artifact
from tasks.runs.report import results_of, send_report
from tests.configs import make_config
from tests.processes import wait_until
from tests.recorded_runs import record_run, small_config


class Recording(Client):
    """Remembers what it gets; opening or sending may fail or wait."""

    calls: list[tuple[Any, ...]]
    fails: str
    waits: threading.Event

    def __init__(self, place: Place, record: Record, config: Mapping[str, Any]) -> None:
        if self.fails == "open":
            raise ConnectionError("no answer, key SECRET-TRACKER-KEY refused")
        self.calls.append(("open", place.project, place.run, record.id, record.url))
        record.url = "https://tracker/run"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.waits.wait(60)
        if self.fails == f"log {step}":
            raise ValueError(f"step {step} is refused")
        self.calls.append(("log", step, dict(metrics)))

    def log_generations(self, rows: Rows, step: int) -> None:
        self.calls.append(("rows", step, list(rows)))

    def log_results(self, results: Mapping[str, float], step: int) -> None:
        self.calls.append(("results", step, dict(results)))

    def finish(self) -> None:
        self.calls.append(("finish",))


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Recording]]:
    waits = threading.Event()
    waits.set()
    client = type("Recording", (Recording,), {"calls": [], "fails": "", "waits": waits})
    monkeypatch.setitem(CLIENTS, "wandb", (client, (), ""))
    yield client
    waits.set()


def config(**train: Any) -> Config:
    return make_config(train={"trackers": ["wandb"], **train}, run={"name": "mine"})


def test_a_resumed_training_continues_its_tracker_run_without_repeats(
    recording: type[Recording], tmp_path: Path
) -> None:
    row = {"prompt": "1 + 1", "response": "2"}
    generations_file(tmp_path, 1).parent.mkdir()
    generations_file(tmp_path, 1).write_text(json.dumps(row) + "\n")
    with tracking(config(), tmp_path, False) as tracked:
        tracked.on_step(0, {"validation/accuracy": 0.5})
        tracked.on_step(1, {"validation/accuracy": 0.75, "actor/grad_norm": math.nan})
        tracked.on_step(2, {"critic/score/mean": 1.0})
        tracked.on_step(
            1, {"validation/accuracy": 0.8}
        )  # a worker died, and the step is trained again
    saved = json.loads((tmp_path / TRACKERS_FILE).read_text())
    (record,) = saved["trackers"]
    assert record == {
        "name": "wandb",
        "id": record["id"],
        "url": "https://tracker/run",
        "path": None,
        "last_step": 2,
        "num_failed": 0,
    }
    assert tracked_runs(tmp_path) == ["wandb https://tracker/run"]
    with tracking(config(), tmp_path, True) as tracked:
        for step in (2, 3):
            tracked.on_step(step, {"critic/score/mean": float(step)})
    send_results(tmp_path, {"eval/math500/after": 61.5, "eval/math500/p": math.nan}, 3)
    assert recording.calls == [
        ("open", "dapo-pipeline", "mine", record["id"], None),
        ("log", 0, {"validation/accuracy": 0.5}),
        ("log", 1, {"validation/accuracy": 0.75}),
        ("rows", 1, [row]),
        ("log", 2, {"critic/score/mean": 1.0}),
        ("finish",),
        ("open", "dapo-pipeline", "mine", record["id"], "https://tracker/run"),
        ("log", 3, {"critic/score/mean": 3.0}),
        ("finish",),
        ("open", "dapo-pipeline", "mine", record["id"], "https://tracker/run"),
        ("results", 3, {"eval/math500/after": 61.5}),
        ("finish",),
    ]
    with tracking(config(tracker_run="other"), tmp_path, False) as tracked:
        tracked.on_step(1, {"critic/score/mean": 1.0})
    assert recording.calls[-3][:3] == ("open", "dapo-pipeline", "other")
    assert recording.calls[-3][3] != record["id"], "a training from the beginning is a new run"
    with tracking(make_config(), tmp_path, False):
        pass
    assert not (tmp_path / TRACKERS_FILE).exists()
    send_results(tmp_path, {"eval/x/after": 1.0}, 1)  # of a training that was not tracked
    assert recording.calls[-1] == ("finish",)


@pytest.mark.parametrize(
    ("fails", "num_failed", "said"),
    [
        (
            "open",
            4,
            "tracker wandb failed (ConnectionError: no answer, key [redacted] refused); training "
            "cont",
        ),
        ("log 1", 1, "tracker wandb failed (ValueError: step 1 is refused); training continues"),
    ],
)
def test_failures_are_logged_once_and_counted(
    recording: type[Recording],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    fails: str,
    num_failed: int,
    said: str,
) -> None:
    monkeypatch.setenv("TRACKER_API_KEY", "SECRET-TRACKER-KEY")
    recording.fails = fails
    with tracking(config(), tmp_path, False) as tracked:
        for step in (1, 2, 3):
            tracked.on_step(step, {"critic/score/mean": 1.0})
    assert caplog.text.count("failed (") == 1
    assert said in caplog.text
    assert f"wandb: {num_failed} calls failed" in caplog.text
    assert (
        json.loads((tmp_path / TRACKERS_FILE).read_text())["trackers"][0]["num_failed"]
        == num_failed
    )
    assert "SECRET-TRACKER-KEY" not in caplog.text + (tmp_path / TRACKERS_FILE).read_text()


def test_a_hanging_tracker_delays_neither_steps_nor_the_end(
    recording: type[Recording],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(trackers, "MAX_WAITING", 5)
    recording.waits.clear()
    with tracking(config(), tmp_path, False) as tracked:
        for step in range(20):
            tracked.on_step(step, {"critic/score/mean": 1.0})
        wait_until(lambda: bool(recording.calls), "the tracker to be opened")
    assert "5 calls are queued" in caplog.text
    assert json.loads((tmp_path / TRACKERS_FILE).read_text())["trackers"][0]["num_failed"] >= 10
    assert recording.calls == [("open", "dapo-pipeline", "mine", recording.calls[0][3], None)]


def test_a_full_disk_does_not_fail_the_trackers(
    recording: type[Recording],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with tracking(config(), tmp_path, False) as tracked:
        monkeypatch.setattr(trackers, "write_atomically", full)
        tracked.on_step(1, {"critic/score/mean": 1.0})
    assert ("log", 1, {"critic/score/mean": 1.0}) in recording.calls
    assert "trackers.json cannot be written: [Errno 28] No space left" in caplog.text


def test_a_missing_client_is_refused_with_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        trackers.importlib.util, "find_spec", lambda name: None if name == "alembic" else name
    )
    require_trackers(["tensorboard", "wandb", "swanlab"])
    with pytest.raises(
        ConfigError, match=r"includes mlflow, but .*pip install mlflow-skinny sqlalchemy alembic \("
    ):
        require_trackers(["tensorboard", "mlflow"])


def test_trackers_receive_no_secrets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HUB_TOKEN", "hub-token-of-mine")
    settings = make_config(
        "models/hub-token-of-mine",
        custom_reward={"path": "scorer.py"},
        flow={"webhook": {"url": "http://x/abc"}},
    )
    seen = tracked_config(settings)
    assert seen["custom_reward"]["path"] == "scorer.py"
    assert seen["model"]["path"] == "models/[redacted]"
    assert "flow" not in seen
    damaged = tmp_path / TRACKERS_FILE
    damaged.write_text("{")
    send_results(tmp_path, {"eval/x/after": 1.0}, 1)
    assert damaged.read_text() == "{"


def test_results_of_one_benchmark_and_of_a_suite() -> None:
    one = {
        "before": {"accuracy": 0.5},
        "after": {"accuracy": 0.625},
        "difference": 0.125,
        "p": 0.03,
    }
    assert results_of(one, "math500") == {
        "eval/math500/before": 0.5,
        "eval/math500/after": 0.625,
        "eval/math500/difference": 0.125,
        "eval/math500/p": 0.03,
    }
    row = {
        "name": "gsm8k",
        "before": 0.5,
        "after": 0.25,
        "difference": -0.25,
        "p": 0.01,
        "p_holm": 0.02,
        "n": 9,
    }
    suite = {
        **one,
        "benchmarks": [row],
        "pooled": {"before": 0.5, "after": 0.75, "difference": 0.25, "p": 0.5},
    }
    results = results_of(suite, "math500+gsm8k")
    assert results["eval/gsm8k/p_holm"] == 0.02
    assert results["eval/pooled/after"] == 0.75
    assert {name.split("/")[1] for name in results} == {"gsm8k", "pooled"}


def test_a_run_sends_results_unless_everything_is_cached(
    recording: type[Recording], tmp_path: Path
) -> None:
    run = record_run(small_config(tmp_path / "store"))
    (tmp_path / TRACKERS_FILE).write_text(
        json.dumps(
            {
                "project": "p",
                "run": "r",
                "folder": str(tmp_path),
                "trackers": [{"name": "wandb", "id": "7"}],
            }
        )
    )
    report = {
        "before": {"accuracy": 0.5},
        "after": {"accuracy": 0.75},
        "difference": 0.25,
        "p": 0.25,
    }
    artifact = Artifact("train_policy", "key", str(tmp_path), "digest")
    send_report(run, report, artifact)
    figures = {"before": 0.5, "after": 0.75, "difference": 0.25, "p": 0.25}
    sent = {f"eval/arithmetic/{name}": value for name, value in figures.items()}
    step = run.config.train.total_steps
    assert recording.calls == [("open", "p", "r", "7", None), ("results", step, sent), ("finish",)]
    again = record_run(small_config(tmp_path / "store"))
    assert all(stage.cached for stage in again.stages.values())
    send_report(again, report, artifact)
    assert len(recording.calls) == 3
