"""The lock of a cluster's one training, with real processes: who waits, who gives way, when it is free again."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dapo_core.errors import RunSkipped
from flows.config import Config
from tasks import training_lock
from tasks.artifacts import Artifact, ArtifactStore, StageKey
from tasks.runs.run import Run
from tasks.stages import LINKS
from tasks.training_lock import (
    check_free,
    hold,
    hold_for_training,
    night_lock_path,
    read_holder,
    training_lock_path,
)
from tests.configs import make_config

DEADLINE_SECONDS = 30.0
# As a flow does: holds the lock for a key, and has a command that SIGTERM does not end hold it too.
TRAIN = """
import sys
from pathlib import Path
from tasks.training_lock import hold
from tasks.processes.watched_command import Outlive, watch_command
path, key, log = sys.argv[1:]
stubborn = ["sh", "-c", "trap '' TERM; echo deaf; while :; do sleep 0.1; done"]
with hold(Path(path), "run-7", key) as descriptor:
    outlive = Outlive(unwatched_seconds=0, stop_seconds=0, grace_seconds=1.5, held=lambda: [descriptor])
    watch_command(stubborn, log_path=log, label="train", outlive=outlive)
"""
HOLD = """
import sys, time
from pathlib import Path
from tasks.training_lock import hold
with hold(Path(sys.argv[1]), "run-7"):
    time.sleep(float(sys.argv[2]))
"""
KEY = StageKey("train_policy", {}, {}, "", {})
OTHER_KEY = StageKey("train_policy", {"run.seed": 2}, {}, "", {})


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return make_config(store={"path": str(tmp_path / "store")}, model={"source": "recipe"})


@pytest.fixture
def run(config: Config, tmp_path: Path) -> Run:
    return Run(config, ArtifactStore(config.store.path), tmp_path / "run-8", "dapo-full")


def wait_until(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextlib.contextmanager
def process(path: Path, script: str, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs the script and has the lock at `path` when the block begins."""
    popen = subprocess.Popen([sys.executable, "-c", script, str(path), *words])
    try:
        wait_until(lambda: read_holder(path) is not None)
        yield popen
    finally:
        popen.terminate()
        popen.wait(DEADLINE_SECONDS)


@contextlib.contextmanager
def training(run: Run, key: str) -> Iterator[subprocess.Popen[bytes]]:
    """Another flow that trains for a key, its command running."""
    log = run.store.log_path("train_policy", key)
    with process(training_lock_path(run.config), TRAIN, key, str(log)) as flow:
        wait_until(lambda: log.exists() and "deaf" in log.read_text())
        yield flow


def test_the_locks_are_in_the_store_or_where_the_configuration_says(config: Config, tmp_path: Path) -> None:
    assert training_lock_path(config) == tmp_path / "store" / ".locks" / "training.lock"
    shared = make_config(flow={"lock_path": str(tmp_path / "shared" / "npu.lock")})
    assert training_lock_path(shared) == tmp_path / "shared" / "npu.lock"
    assert night_lock_path(shared) == tmp_path / "shared" / "nightly-npu.lock"
    other = make_config(flow={"lock_path": str(tmp_path / "shared" / "gpu.lock")})
    assert night_lock_path(other) != night_lock_path(shared)  # nights of two clusters run side by side


def test_only_a_lock_that_is_held_has_a_holder(tmp_path: Path) -> None:
    path = tmp_path / "locks" / "training.lock"
    assert read_holder(path) is None
    with hold(path, "run-1", "abc"):
        holder = read_holder(path)
        assert holder is not None
        assert (holder.run, holder.key) == ("run-1", "abc")
    assert path.read_text()  # what it says no longer counts
    assert read_holder(path) is None
    with hold(path, "run-2"):
        assert "run run-2 on " in str(read_holder(path))


def test_one_waits_and_is_told_for_whom(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "training.lock"
    caplog.set_level(logging.INFO, logger="tasks.training_lock")
    monkeypatch.setattr(training_lock, "POLL_SECONDS", 0.05)
    with process(path, HOLD, "1.5") as other, hold(path, "run-8"):
        assert other.wait(DEADLINE_SECONDS) == 0
        assert str(read_holder(path)).startswith("run run-8 on ")
    told = [record.getMessage() for record in caplog.records if "waiting for the lock" in record.getMessage()]
    assert len(told) == 1  # the next is due after ten minutes
    assert f"{path}, held by run run-7 on " in told[0]
    assert f"(pid {other.pid}) since 20" in told[0]


def test_one_that_gives_way_is_skipped_and_names_the_holder(tmp_path: Path) -> None:
    path = tmp_path / "nightly.lock"
    with process(path, HOLD, "60") as other:
        named = rf"nightly is under way already: run run-7 on .*pid {other.pid}"
        with pytest.raises(RunSkipped, match=named), hold(path, "run-8", gives_way=True):
            raise AssertionError("two hold one lock")
        other.kill()
        other.wait(DEADLINE_SECONDS)
        with hold(path, "run-8", gives_way=True):  # the kernel has freed it
            pass


def test_a_look_at_the_lock_does_not_send_away_who_takes_it(tmp_path: Path) -> None:
    path = tmp_path / "training.lock"
    path.touch()
    with open(path, "rb") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)  # as read_holder does for an instant
        timer = threading.Timer(0.3, looking.close)
        timer.start()
        with hold(path, "run-8", gives_way=True):
            assert looking.closed
        timer.join()


def test_the_lock_lasts_as_long_as_the_training_whose_flow_was_killed(run: Run) -> None:
    with training(run, KEY.key) as flow:
        flow.kill()
        flow.wait(DEADLINE_SECONDS)
        path = training_lock_path(run.config)
        holder = read_holder(path)  # the command has not ended yet: it ignores SIGTERM
        assert holder is not None
        assert (holder.pid, holder.key) == (flow.pid, KEY.key)
        wait_until(lambda: read_holder(path) is None)


def test_a_training_gives_way_to_another(run: Run) -> None:
    with training(run, KEY.key):
        named = "training is under way already: run run-7"
        with pytest.raises(RunSkipped, match=named), hold_for_training(run, OTHER_KEY, gives_way=True):
            raise AssertionError("two trainings at once")
    wait_until(lambda: read_holder(training_lock_path(run.config)) is None)
    with hold_for_training(run, OTHER_KEY, gives_way=True):
        holder = read_holder(training_lock_path(run.config))
        assert holder is not None
        assert holder.key == OTHER_KEY.key


def build_inputs(run: Run) -> str:
    """Puts what a training begins from into the store; returns the training's key."""
    artifacts: dict[str, Artifact] = {}

    def build(folder: Path) -> dict[str, int]:
        for name in ("train.parquet", "eval.parquet"):
            (folder / name).write_text(name)
        return {}

    for label in ("prepare_data", "fetch_model"):
        artifacts[label], _ = run.store.produce(LINKS[label].key(run.config, artifacts), build)
    return LINKS["train_policy"].key(run.config, artifacts).key


def test_a_night_begins_beside_its_own_training_only(run: Run) -> None:
    path = training_lock_path(run.config)
    check_free(path, run.config)
    own = build_inputs(run)
    with hold(path, "run-7", own):
        check_free(path, run.config)  # left by a flow that died: goes on in the next
    with (
        hold(path, "run-7", OTHER_KEY.key),
        pytest.raises(RunSkipped, match="another training is under way: run run-7"),
    ):
        check_free(path, run.config)
