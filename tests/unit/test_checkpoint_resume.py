"""Which checkpoint a training starts from, and the lock on its checkpoints."""

import fcntl
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from dapo_core.checkpoint.resume import lock_checkpoints, require_resume
from dapo_core.errors import CheckpointError, ConfigError
from dapo_core.training import train
from tests.checkpoints import (
    assert_complete,
    find_start,
    make_model_folder,
    make_state,
    make_writer,
    names_in,
    write,
)
from tests.configs import make_config


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """A training output with checkpoints of steps 5 and 10, and metrics."""
    model_path = make_model_folder(tmp_path / "model")
    write(
        make_writer(tmp_path / "output" / "checkpoints", model_path), make_state(5), make_state(10)
    )
    files = ("metrics.jsonl", "generations/step_5.jsonl", "draws/step_000005/carried_groups.json")
    for name in files:
        (tmp_path / "output" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "output" / name).write_text("{}\n", encoding="utf-8")
    return tmp_path / "output"


def test_auto_continues_from_the_latest_checkpoint(output: Path, tmp_path: Path) -> None:
    assert find_start(output / "checkpoints", "auto") == output / "checkpoints" / "step_000010"
    assert find_start(tmp_path / "new" / "checkpoints", "auto") is None


def test_never_moves_the_whole_training_aside(
    output: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with lock_checkpoints(output / "checkpoints"):
        assert find_start(output / "checkpoints", "never") is None
        assert names_in(output / "checkpoints") == ["lock"]  # still held
    (aside,) = output.glob("superseded-*")
    assert names_in(output) == ["checkpoints", aside.name]
    assert names_in(aside) == ["checkpoints", "draws", "generations", "metrics.jsonl"]
    assert names_in(aside / "checkpoints") == ["latest", "step_000005", "step_000010"]
    assert_complete(aside / "checkpoints" / "step_000010", make_state(10))
    assert aside.name in caplog.text
    assert find_start(output / "checkpoints", "never") is None  # nothing is left to move
    assert list(output.glob("superseded-*")) == [aside]
    assert find_start(aside / "checkpoints", "auto") == aside / "checkpoints" / "step_000010"


@pytest.mark.parametrize(
    ("path", "step"), [("", 10), ("checkpoints", 10), ("checkpoints/step_000005", 5)]
)
def test_a_path_may_be_a_checkpoint_or_a_training_output(
    output: Path, tmp_path: Path, path: str, step: int
) -> None:
    start = find_start(tmp_path / "new" / "checkpoints", str(output / path))
    assert start == output / "checkpoints" / f"step_{step:06d}"


def test_a_training_started_from_a_path_continues_from_its_own_checkpoints(
    output: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    resume = str(output / "checkpoints" / "step_000005")
    folder = tmp_path / "new" / "checkpoints"
    assert find_start(folder, resume) == Path(resume)
    write(make_writer(folder, tmp_path / "model"), make_state(7))
    assert find_start(folder, resume) == folder / "step_000007"
    assert "continuing from step_000007 in this output instead of" in caplog.text


def test_a_path_without_a_checkpoint_is_refused(output: Path, tmp_path: Path) -> None:
    partial = (output / "checkpoints" / "step_000005").rename(output / "step_000005.1a2b.partial")
    for path in (tmp_path / "model", tmp_path / "absent", partial):
        with pytest.raises(
            CheckpointError, match=rf"checkpoint\.resume={path} has no complete checkpoint"
        ):
            find_start(tmp_path / "new" / "checkpoints", str(path))


def test_a_missing_path_is_reported_before_anything_starts(output: Path) -> None:
    for resume in ("auto", "never", str(output)):
        require_resume(resume)
    for resume in ("Auto", str(output / "step_000099"), str(output / "metrics.jsonl")):
        with pytest.raises(ConfigError, match=rf"checkpoint\.resume={resume} is not a folder"):
            require_resume(resume)


@pytest.mark.slow
def test_a_second_training_in_the_same_output_is_refused_before_it_reads(tmp_path: Path) -> None:
    """Else both would write the tokenized prompts."""
    folder = tmp_path / "checkpoints"
    with lock_checkpoints(folder):
        message = rf"{folder} is in use by pid {os.getpid()} on .*"
        with pytest.raises(CheckpointError, match=message):
            train(make_config(), tmp_path / "absent", tmp_path / "absent", tmp_path)
    assert names_in(folder) == []  # the output's digest must not depend on pids


def test_a_file_system_without_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(file: Any, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    with (
        pytest.raises(CheckpointError, match=r"cannot be locked .* not implemented.* choose"),
        lock_checkpoints(tmp_path),
    ):
        pytest.fail("nothing is locked")
