"""The training lock, with real processes: who waits, who is skipped, when it is released."""

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.states import State

import durable
from tasks.artifacts.artifact import Artifact
from tasks.chain import train_policy
from tasks.execution import command
from tasks.execution.training_lock import check_free, hold, nightly_lock_path, training_lock_path
from tasks.links import link_of
from tasks.runs.run import Run, RunSkipped
from tests.configs import make_config
from tests.processes import DEADLINE_SECONDS, wait_until
from tests.recorded_runs import Outcome, produce, small_config

# Like a flow: a command that ignores SIGTERM holds the lock.
TRAIN = """
import sys
from pathlib import Path
from tasks.execution.training_lock import hold
from tasks.processes.child import run_command
path, key, log = sys.argv[1:]
stubborn = ["sh", "-c", "trap '' TERM; echo deaf: $$.; while :; do sleep 0.1; done"]
with hold(Path(path), "run-7", key) as lock:
    run_command(stubborn, log_path=log, label="train", grace_seconds=300.0, locks=[lock])
"""
KEY = "0123456789abcdef" * 4
WAIT_SECONDS = 0.6  # longer than a run that does not wait would try


@contextlib.contextmanager
def training(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another flow whose training command is running."""
    log = path.with_name("train.log")
    flow = subprocess.Popen([sys.executable, "-c", TRAIN, str(path), KEY, str(log)])
    try:
        wait_until(lambda: log.exists() and "." in log.read_text(), "the training")
        yield flow
    finally:
        flow.kill()
        flow.wait(DEADLINE_SECONDS)
        os.kill(int(re.findall(r"deaf: (\d+)\.", log.read_text())[0]), signal.SIGKILL)
        wait_until(lambda: durable.find_holder(path) is None, "the end of the training")


def release_after_word(
    held: contextlib.ExitStack, caplog: pytest.LogCaptureFixture
) -> threading.Thread:
    """A thread that releases a lock some time after a waiter logged a message."""

    def release() -> None:
        wait_until(lambda: "waiting for" in caplog.text, "a word about the wait")
        time.sleep(WAIT_SECONDS)
        held.close()

    thread = threading.Thread(target=release)
    thread.start()
    return thread


def test_locks_are_in_the_store_or_at_the_configured_path(tmp_path: Path) -> None:
    own = make_config(store={"path": str(tmp_path / "store")})
    assert training_lock_path(own) == tmp_path / "store" / ".locks" / "training.lock"
    shared = make_config(flow={"lock_path": str(tmp_path / "shared" / "npu.lock")})
    assert training_lock_path(shared) == tmp_path / "shared" / "npu.lock"
    assert nightly_lock_path(shared) == tmp_path / "shared" / "nightly-npu.lock"


@pytest.mark.slow
@pytest.mark.parametrize("skips_if_locked", [False, True])
def test_a_run_waits_for_the_lock_or_for_its_own_stopping_training_and_names_it_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, skips_if_locked: bool
) -> None:
    path = tmp_path / "training.lock"
    caplog.set_level(logging.INFO, logger="durable")
    with contextlib.ExitStack() as other:
        other.enter_context(hold(path, "run-7", KEY))
        release = release_after_word(other.pop_all(), caplog)
        with hold(path, "run-8", KEY, skips_if_locked):
            assert str(durable.find_holder(path)).startswith("run run-8, stage key ")
        release.join()
    [message] = [
        record.getMessage() for record in caplog.records if "waiting for" in record.getMessage()
    ]
    assert message.startswith("waiting for run run-7, stage key ")
    assert f"), which holds the lock {path} (" in message


@pytest.mark.slow
def test_the_lock_outlives_a_killed_flow_and_skips_other_runs(tmp_path: Path) -> None:
    path = tmp_path / "training.lock"
    with training(path) as flow:
        named = r"^The run was skipped because run run-7, stage key 0123456789abcdef \(pid "
        with pytest.raises(RunSkipped, match=named), hold(path, "run-8", skips_if_locked=True):
            raise AssertionError("two trainings at once")
        flow.kill()
        flow.wait(DEADLINE_SECONDS)
        # its command ignores SIGTERM
        assert f"pid {flow.pid} on " in str(durable.find_holder(path))
    with hold(path, "run-8", skips_if_locked=True):
        pass


def test_a_nightly_run_starts_only_beside_its_own_training(tmp_path: Path) -> None:
    run = Run.start(small_config(tmp_path / "store"))
    path = training_lock_path(run.config)
    check_free(path, run.config)
    inputs: dict[str, Artifact] = produce(run, Outcome(), ("prepare_data", "fetch_model"))
    with hold(path, "run-7", link_of(run.config, "train_policy").key(*inputs.values()).key):
        check_free(path, run.config)  # left by a flow that died: goes on in the next
    words = "The run was skipped because another training holds the lock .*: run run-7"
    with hold(path, "run-7", KEY), pytest.raises(RunSkipped, match=words):
        check_free(path, run.config)


WRITE_METRICS = """
import pathlib, sys
metrics = pathlib.Path(sys.argv[sys.argv.index("--output") + 1]) / "metrics.jsonl"
metrics.write_text('{"step": 1}\\n')
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    # there is no server
    monkeypatch.setattr("tasks.execution.page.PageArtifact.show", lambda *_: None)
    monkeypatch.setattr(durable, "GRACE_SECONDS", 0.3)
    monkeypatch.setattr(
        command,
        "dapo_command",
        lambda *words: [sys.executable, "-c", WRITE_METRICS, *map(str, words)],
    )
    return Run.start(small_config(tmp_path / "store"))


def train(run: Run, monkeypatch: pytest.MonkeyPatch, attempt: int) -> State[Artifact]:
    """The final state of this attempt of a nightly run."""
    monkeypatch.setenv("PREFECT__RUNTIME__TASK_RUN__RUN_COUNT", str(attempt))
    inputs = produce(run, Outcome(), ("prepare_data", "fetch_model"))
    function: Any = train_policy.fn
    return function(run, inputs["prepare_data"], inputs["fetch_model"], skips_if_locked=True)


@pytest.mark.slow
def test_a_nightly_run_is_skipped_at_its_first_attempt(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hold(training_lock_path(run.config), "other"):
        state = train(run, monkeypatch, attempt=1)
    assert (state.type.value, state.name) == ("COMPLETED", "Skipped")
    assert "was skipped because run other (pid " in str(state.message)
    with pytest.raises(RunSkipped, match="run other "):  # as what the flow sees of it
        raise state.result()


@pytest.mark.slow
def test_a_later_attempt_waits_for_the_lock(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="durable")
    with contextlib.ExitStack() as other:
        other.enter_context(hold(training_lock_path(run.config), "other"))
        release = release_after_word(other.pop_all(), caplog)
        state = train(run, monkeypatch, attempt=2)
        release.join()
    assert state.name == "Completed"
    assert "waiting for run other (pid " in caplog.text
