"""The training task and the cluster's lock: its first attempt gives way, those after it wait for their turn."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from prefect.states import State

from tasks import stage_command
from tasks.artifacts.artifact import Artifact
from tasks.chain import train_policy
from tasks.runs.run import Run, RunSkipped
from tasks.training_lock import hold, training_lock_path
from tests.recorded_runs import Outcome, produce, small_config

TRAIN = """
import pathlib, sys
metrics = pathlib.Path(sys.argv[sys.argv.index("--output") + 1]) / "metrics.jsonl"
metrics.write_text('{"step": 1}\\n')
"""
WAIT_SECONDS = 0.6  # longer than one that gives way is patient


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr("tasks.page.PageArtifact.show", lambda *_: None)  # there is no server
    monkeypatch.setattr("tasks.training_lock.PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr(
        stage_command, "dapo_command", lambda *words: [sys.executable, "-c", TRAIN, *map(str, words)]
    )
    return Run.start(small_config(tmp_path / "store"))


def train(run: Run, monkeypatch: pytest.MonkeyPatch, attempt: int) -> State[Artifact]:
    """The state in which this attempt of a night ends."""
    monkeypatch.setenv("PREFECT__RUNTIME__TASK_RUN__RUN_COUNT", str(attempt))
    inputs = produce(run, Outcome(), ("prepare_data", "fetch_model"))
    function: Any = train_policy.fn
    return function(run, inputs["prepare_data"], inputs["fetch_model"], skips_if_locked=True)


def test_a_night_skips_if_locked_at_its_first_attempt(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with hold(training_lock_path(run.config), "other"):
        state = train(run, monkeypatch, attempt=1)
    assert (state.type.value, state.name) == ("COMPLETED", "Skipped")
    assert "The run was skipped because run other (pid " in str(state.message)
    with pytest.raises(RunSkipped, match="run other "):  # as what the flow sees of it
        raise state.result()


def test_a_later_attempt_waits_for_who_took_the_lock_since(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="tasks.training_lock")
    with contextlib.ExitStack() as other:
        other.enter_context(hold(training_lock_path(run.config), "other"))
        timer = threading.Timer(WAIT_SECONDS, other.pop_all().close)
        timer.start()
        state = train(run, monkeypatch, attempt=2)
        timer.join()
    assert state.name == "Completed"
    assert "training.lock, held by run other (pid " in caplog.text
