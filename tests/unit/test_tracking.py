"""Trackers with fake clients: what is sent once, how they fail, and what is never sent."""

import contextvars
import json
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from typer.testing import CliRunner

from dapo_core.checkpoint.folder import CHECKPOINTS
from dapo_core.checkpoint.resume import lock_checkpoints
from dapo_core.errors import ConfigError
from dapo_core.metrics.log import MetricsLog
from dapo_core.metrics.step_files import GENERATIONS, ROLLOUTS, StepFiles
from flows.cli import app
from flows.config import Config
from tasks.artifacts.artifact import Artifact, StoreError
from tasks.execution.command import link_log
from tasks.links import link_of
from tasks.runs.history import read_run, training_folder
from tasks.runs.report import results_of, send_report
from tasks.runs.run import Run, current_stage
from tasks.tracking import processes
from tasks.tracking.clients import CLIENTS, Client, MLflow, Record, Rows
from tasks.tracking.processes import Trackers, require_trackers, tracking
from tasks.tracking.tracker import (
    TrackerError,
    record_path,
    send_training,
    tracked_config,
    tracked_runs,
)
from tests.configs import make_config
from tests.processes import python, wait_until
from tests.recorded_runs import STEP, Outcome, produce, record_run, small_config


class Recording(Client):
    """Remembers what it gets; opening or sending may fail."""

    calls: list[tuple[Any, ...]]
    fails: str

    def open(self, record: Record, shown: Mapping[str, Any]) -> None:
        if self.fails == "open":
            raise ConnectionError("no answer")
        self.calls.append(("open", self.project, self.name, record.id, record.url))
        record.url = "https://tracker/run"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if self.fails == f"log {step}":
            raise ValueError(f"step {step} is refused")
        self.calls.append(("log", step, dict(metrics)))

    def log_texts(self, kind: str, rows: Rows, step: int) -> None:
        self.calls.append((kind, step, list(rows)))

    def log_results(self, results: Mapping[str, float], step: int) -> None:
        self.calls.append(("results", step, dict(results)))

    def finish(self) -> None:
        self.calls.append(("finish",))


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> type[Recording]:
    client = type("Recording", (Recording,), {"calls": [], "fails": ""})
    monkeypatch.setitem(CLIENTS, "wandb", (client, (), ""))
    return client


def config(**train: Any) -> Config:
    return make_config(train={"trackers": ["wandb"], **train}, run={"name": "mine"})


def send(folder: Path, **results: float) -> None:
    send_training(config(), "wandb", folder, results)


def saved(folder: Path) -> dict[str, Any]:
    return dict(json.loads(record_path(folder, "wandb").read_text()))


def test_a_resumed_training_continues_its_tracker_run_without_repeats(
    recording: type[Recording], tmp_path: Path
) -> None:
    row = {"set": "s", "prompt": "1 + 1", "response": "2", "answer": "2", "gold": "2", "score": 1}
    row |= {"verdict": "right", "truncated": False}
    StepFiles(tmp_path, GENERATIONS).write(1, [row])
    StepFiles(tmp_path, ROLLOUTS).write(2, [row, row])
    log = MetricsLog(tmp_path, None)
    log.append(0, 0, {"validation/accuracy": 0.5})
    log.append(1, 2, {"validation/accuracy": 0.75, "actor/grad_norm": float("nan")})
    log.append(2, 4, {"critic/score/mean": 1.0})
    send(tmp_path)
    log = MetricsLog(tmp_path, 1)  # a worker died, and step 2 is trained again
    log.append(2, 4, {"critic/score/mean": 2.0})
    log.append(3, 6, {"critic/score/mean": 3.0})
    for _ in range(2):  # what was sent is not sent again
        send(tmp_path, **{"eval/math500/after": 61.5, "eval/math500/p": float("nan")})
    run_id = saved(tmp_path)["id"]
    assert recording.calls == [
        ("open", "dapo-pipeline", "mine", run_id, None),
        ("log", 0, {"validation/accuracy": 0.5}),
        ("log", 1, {"validation/accuracy": 0.75}),
        ("generations", 1, [row]),
        ("log", 2, {"critic/score/mean": 1.0}),
        ("rollouts", 2, [row]),
        ("finish",),
        ("open", "dapo-pipeline", "mine", run_id, "https://tracker/run"),
        ("log", 3, {"critic/score/mean": 3.0}),
        ("results", 3, {"eval/math500/after": 61.5}),
        ("finish",),
    ]
    assert tracked_runs(tmp_path) == ["wandb https://tracker/run"]


def test_a_training_from_the_beginning_is_a_new_run(
    recording: type[Recording], tmp_path: Path
) -> None:
    for score in (1.0, 2.0):
        MetricsLog(tmp_path, None).append(1, 2, {"critic/score/mean": score})
        send(tmp_path)
    opened = [call[3] for call in recording.calls if call[0] == "open"]
    assert len(set(opened)) == 2
    assert [call[1:] for call in recording.calls if call[0] == "log"] == [
        (1, {"critic/score/mean": 1.0}),
        (1, {"critic/score/mean": 2.0}),
    ]


def test_a_training_is_followed_until_it_ends_also_across_a_restart(
    recording: type[Recording], tmp_path: Path
) -> None:
    with lock_checkpoints(tmp_path / CHECKPOINTS):
        follower = threading.Thread(target=send, args=(tmp_path,))
        follower.start()
        log = MetricsLog(tmp_path, None)
        log.append(1, 2, {"critic/score/mean": 1.0})
        wait_until(lambda: len(recording.calls) == 2, "step 1")
        log = MetricsLog(tmp_path, 1)
        log.append(2, 4, {"critic/score/mean": 2.0})
        wait_until(lambda: len(recording.calls) == 3, "step 2")
        log.append(3, 6, {"critic/score/mean": 3.0})
    follower.join()
    assert [call[0] for call in recording.calls] == ["open", "log", "log", "log", "finish"]


def test_a_refused_step_is_reported_and_later_steps_are_sent(
    recording: type[Recording], tmp_path: Path
) -> None:
    log = MetricsLog(tmp_path, None)
    for step in (1, 2, 3):
        log.append(step, step, {"critic/score/mean": 1.0})
    recording.fails = "open"
    with pytest.raises(TrackerError, match="wandb: ConnectionError: no answer"):
        send(tmp_path)
    recording.fails = "log 2"  # the next attempt has all steps to send
    with pytest.raises(
        TrackerError, match=r"1 calls to wandb failed, .* ValueError: step 2 is ref"
    ):
        send(tmp_path)
    assert [call[1] for call in recording.calls if call[0] == "log"] == [1, 3]


DIES, HANGS = "raise SystemExit('no login, key SECRET-TRACKER-KEY')", "import time; time.sleep(99)"


@pytest.mark.parametrize(
    ("code", "said"), [(DIES, "ended with exit code 1"), (HANGS, "did not end within 0 s")]
)
def test_a_tracker_that_dies_or_hangs_is_one_line_that_names_its_log(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    said: str,
) -> None:
    monkeypatch.setenv("TRACKER_API_KEY", "SECRET-TRACKER-KEY")
    monkeypatch.setattr(processes.child, "dapo_command", lambda *words: python(code))
    monkeypatch.setattr(processes, "CLOSE_SECONDS", 0.3)
    with tracking(["tensorboard"], tmp_path, []) as trackers:
        began = time.monotonic()
        trackers.check()
        assert time.monotonic() - began < 0.2, "training waits for no tracker"
        if code == DIES:
            wait_until(lambda: trackers.check() or "ended with" in caplog.text, "its end")
    (line,) = (record.message for record in caplog.records if record.levelname == "WARNING")
    assert f"tracker tensorboard {said}" in line
    assert f"its log is {record_path(tmp_path, 'tensorboard').with_suffix('.log')}" in line
    assert "SECRET-TRACKER-KEY" not in caplog.text


def test_a_missing_client_is_refused_with_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        processes.importlib.util, "find_spec", lambda name: None if name == "alembic" else name
    )
    require_trackers(["tensorboard", "wandb", "swanlab"])
    with pytest.raises(
        ConfigError, match=r"includes mlflow, but .*pip install mlflow-skinny sqlalchemy alembic \("
    ):
        require_trackers(["tensorboard", "mlflow"])


def test_trackers_receive_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_address_of_a_tracker_is_recorded_without_its_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:hunter22@mlflow.example.org")
    monkeypatch.setitem(sys.modules, "mlflow", mock.MagicMock())
    record = Record("mlflow")
    MLflow(record, config(), {})
    assert str(record.url).startswith("https://me:[redacted]@mlflow.example.org/#/experiments/")


def test_results_of_one_benchmark_and_of_a_suite() -> None:
    one = {"before": {"accuracy": 0.5}, "after": {"accuracy": 0.75}, "difference": 0.25, "p": 0.03}
    assert results_of(one, make_config()) == {
        "eval/arithmetic/before": 0.5,
        "eval/arithmetic/after": 0.75,
        "eval/arithmetic/difference": 0.25,
        "eval/arithmetic/p": 0.03,
    }
    row = {"before": 0.5, "after": 0.25, "difference": -0.25, "p": 0.01}
    suite = {"benchmarks": [{"name": "gsm8k", **row, "p_holm": 0.02, "n": 9}], "pooled": row}
    results = results_of({**one, **suite}, make_config())
    assert results["eval/gsm8k/p_holm"] == 0.02
    assert results["eval/pooled/after"] == 0.25
    assert {name.split("/")[1] for name in results} == {"gsm8k", "pooled"}


def test_a_run_is_sent_with_its_results_and_its_output_does_not_change(
    recording: type[Recording], tmp_path: Path
) -> None:
    run = record_run(small_config(tmp_path / "store", "train.trackers=[wandb]"))
    training = run.stages["train_policy"]
    for _ in range(2):
        words = ["track", str(run.folder), "--tracker", "wandb"]
        assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    assert [call[0] for call in recording.calls] == ["open", "log", "results", "finish"]
    assert recording.calls[1] == ("log", 1, STEP)
    assert recording.calls[2][2]["eval/arithmetic/after"] == 0.75
    assert run.store.check("train_policy", training.key), "still as its manifest says"
    assert tracked_runs(Path(training.artifact)) == ["wandb https://tracker/run"]


def test_the_training_of_a_run_in_progress_is_found(tmp_path: Path) -> None:
    run = Run.start(small_config(tmp_path / "store"))
    with pytest.raises(StoreError, match="has no training yet"):
        training_folder(read_run(run.folder))
    key = link_of(run.config, "train_policy").key(
        *produce(run, Outcome(), ("prepare_data", "fetch_model")).values()
    )

    def build(folder: Path) -> dict[str, Any]:
        current_stage.set("train_policy")
        link_log(run, run.store.log_path(key.stage, key.key))
        assert training_folder(read_run(run.folder)) == folder
        return {}

    contextvars.copy_context().run(run.store.produce, key, build)


def test_a_run_sends_results_unless_everything_is_cached(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(Trackers, "start", lambda _, names, words: sent.append((names, words)))
    settings = small_config(tmp_path / "store", "train.trackers=[wandb]")
    run = record_run(settings)
    training = Artifact("train_policy", "key", str(tmp_path), "digest")
    send_report(run, training)
    send_report(record_run(settings), training)
    assert sent == [(("wandb",), [str(run.folder)])]
