"""Restarts after a process dies, and the message of a stopped training."""

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from dapo_core import training
from dapo_core.cluster.restarts import Restarts, continued_from
from dapo_core.errors import CheckpointError, ConfigError, WorkerDied
from dapo_core.machine.stopping import StopRequest, StopRequested, TrainingStopped, raising_stopped
from tests.checkpoints import (
    make_model_folder,
    make_state,
    make_writer,
    names_in,
    write,
    write_state,
)
from tests.configs import make_config

DEATH = WorkerDied("policy rank 1 of 2 (pid 7 on 10.0.0.1) died: its node is lost")
FIRST, SECOND = Path("run/step_000010"), Path("run/step_000020")


@pytest.mark.parametrize(
    ("delay_seconds", "expected"),
    [
        (5.0, [5, 10, 20, 40, 60, 60]),  # 5 * 2**n, of which 80 and 160 are more than a minute
        (0.0, [0, 0, 0, 0, 0, 0]),
        (90.0, [90, 90, 90, 90, 90, 90]),  # configured, so not limited to a minute
    ],
)
def test_restart_delays_double_up_to_a_minute(delay_seconds: float, expected: list[float]) -> None:
    pauses: list[float] = []
    restarts = Restarts(6, delay_seconds, pauses.append)
    for _ in expected:
        restarts.pause(DEATH, None)
    assert pauses == expected


def test_only_a_new_checkpoint_resets_the_restart_count() -> None:
    pauses: list[float] = []
    restarts = Restarts(2, 1.0, pauses.append)
    for latest in (None, None, FIRST, FIRST, SECOND, SECOND):
        restarts.pause(DEATH, latest)
    assert pauses == [1, 2, 1, 2, 1, 2]
    with pytest.raises(WorkerDied) as caught:
        restarts.pause(DEATH, SECOND)
    assert str(caught.value).startswith(
        f"{DEATH}; giving up after 2 restarts without a new checkpoint: "
    )
    assert "raise train.max_restarts" in str(caught.value)
    assert caught.value.__cause__ is DEATH
    assert len(pauses) == 6  # no wait before giving up
    with pytest.raises(WorkerDied, match="giving up after 0 restarts"):
        Restarts(0, 1.0, pytest.fail).pause(DEATH, FIRST)


def _die_first(starts: list[Path | None]) -> int:
    if len(starts) == 1:
        raise DEATH
    return len(starts)


def test_a_restart_begins_at_the_latest_checkpoint(tmp_path: Path) -> None:
    starts: list[Path | None] = []

    def attempt(start: Path | None) -> int:
        starts.append(start)
        return _die_first(starts)

    own = [tmp_path / "step_000010", None]
    for _ in range(2):
        starts.clear()
        assert Restarts(1, 0.0).until_done(attempt, FIRST, lambda: own[0], StopRequest()) == 2
        assert starts == [FIRST, own.pop(0) or FIRST]


def test_workers_that_die_after_a_stop_request_are_not_restarted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A shutdown signals all processes of a machine, including ranks."""
    stop, starts = StopRequest(), list[Path | None]()

    def attempt(start: Path | None) -> int:
        starts.append(start)
        stop.signal = signal.SIGTERM
        return _die_first(starts)

    with pytest.raises(StopRequested):
        Restarts(5, 0.0).until_done(attempt, None, lambda: None, stop)
    assert starts == [None]
    assert caplog.messages == [str(DEATH)]


@pytest.mark.parametrize(
    ("resume", "step", "said"),
    [
        (
            "auto",
            7,
            "after step 7 of 40; its checkpoint is {folder}/step_000007; the same command resumes "
            "it",
        ),
        ("never", 7, "the same command with --set checkpoint.resume=auto resumes it"),
        ("auto", None, "before its first checkpoint; the same command starts from the beginning"),
    ],
)
@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_training_names_the_checkpoint_to_resume(
    tmp_path: Path, resume: str, step: int | None, said: str, number: signal.Signals, exit_code: int
) -> None:
    config = make_config(tmp_path, checkpoint={"resume": resume}, train={"total_steps": 40})
    if step is not None:
        write_state(tmp_path, make_state(step))
    stop = StopRequest()
    stop.signal = number
    with (
        pytest.raises(TrainingStopped) as caught,
        raising_stopped(stop, lambda: continued_from(config, tmp_path)),
    ):
        raise StopRequested
    assert said.format(folder=tmp_path) in str(caught.value)
    assert caught.value.exit_code == exit_code
    stop.is_urgent = True
    with (
        pytest.raises(KeyboardInterrupt),
        raising_stopped(stop, lambda: continued_from(config, tmp_path)),
    ):
        raise KeyboardInterrupt


@pytest.mark.parametrize("on_damage", ["stop", "previous"])
def test_an_incomplete_checkpoint_is_found_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_damage: str
) -> None:
    model_path, folder = make_model_folder(tmp_path / "model"), tmp_path / "checkpoints"
    (model_path / "config.json").write_text('{"model_type": "qwen3"}', encoding="utf-8")
    write(make_writer(folder, model_path), make_state(5), make_state(10))
    (folder / "step_000010" / "__0_0.distcp").write_text("torn\n")
    monkeypatch.setattr(training, "_read_prompts", lambda *_: (SimpleNamespace(digest="ab"), [], 0))
    monkeypatch.setattr(training, "training_identity", lambda *_: make_state(5).identity)

    def start_cluster(*_: object) -> None:
        assert on_damage == "previous"
        raise ConfigError("Ray starts")

    monkeypatch.setattr("dapo_core.cluster.start.start_cluster", start_cluster)
    config = make_config(model_path, checkpoint={"on_damage": on_damage}, train={"total_steps": 40})
    damaged = r"step_000010/__0_0\.distcp has 5 bytes instead of 21"
    with pytest.raises(
        (CheckpointError, ConfigError), match=damaged if on_damage == "stop" else "Ray starts"
    ):
        training.train(config, tmp_path, model_path, tmp_path)
    left = (
        ["latest", "step_000005", "step_000010"]
        if on_damage == "stop"
        else ["latest", "step_000005"]
    )
    assert [name for name in names_in(folder) if not name.endswith(".damaged")] == left


def test_a_restart_skips_damaged_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk failure that killed a worker may have damaged the checkpoint that the run started
    from.
    """
    model_path, folder = make_model_folder(tmp_path / "model"), tmp_path / "checkpoints"
    (model_path / "config.json").write_text('{"model_type": "qwen3"}', encoding="utf-8")
    write(make_writer(folder, model_path), make_state(5), make_state(10))
    latest: list[str] = []
    is_restart: list[object] = []

    def start_cluster(*arguments: object) -> None:
        is_restart.append(arguments[-1])
        latest.append((folder / "latest").read_text().strip())
        if len(latest) == 2:
            raise ConfigError("Ray starts again")
        (folder / "step_000010" / "__0_0.distcp").write_text("torn\n")
        raise DEATH

    monkeypatch.setattr(training, "_read_prompts", lambda *_: (SimpleNamespace(digest="ab"), [], 0))
    monkeypatch.setattr(training, "training_identity", lambda *_: make_state(5).identity)
    monkeypatch.setattr("dapo_core.cluster.start.start_cluster", start_cluster)
    config = make_config(model_path, train={"total_steps": 40, "restart_delay_seconds": 0.0})
    with pytest.raises(ConfigError, match="Ray starts again"):
        training.train(config, tmp_path, model_path, tmp_path)
    assert latest == ["step_000010", "step_000005"]
    assert is_restart == [False, True]
