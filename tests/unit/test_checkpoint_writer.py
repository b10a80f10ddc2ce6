"""Writing checkpoints: when they appear, which are kept, and what happens on a full disk."""

import errno
import logging
import os
import shutil
from pathlib import Path

import pytest

from dapo_core.checkpoint import writer as writer_module
from dapo_core.checkpoint.folder import (
    CONFIG_FILE,
    LATEST_FILE,
    checkpoint_folders,
    latest_checkpoint,
)
from dapo_core.checkpoint.manifest import MANIFEST_FILE
from dapo_core.checkpoint.metadata import METADATA_FILE
from dapo_core.checkpoint.state import TrainerState
from dapo_core.errors import CheckpointError, WorkerDied
from flows.config import load_config
from tests.checkpoints import (
    FileShards,
    assert_complete,
    end,
    make_model_folder,
    make_state,
    make_writer,
    names_in,
    write,
)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(writer_module, "POLL_SECONDS", 0.0)


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    return make_model_folder(tmp_path / "model")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "output" / "checkpoints"


class BrokenShards(FileShards):
    """Fails in one of its calls after writing some shards."""

    def __init__(self, place: str, error: Exception) -> None:
        super().__init__()
        self.place = place
        self.error = error

    def save(self, folder: str, asynchronous: bool) -> None:
        super().save(folder, asynchronous)
        if self.place == "save":
            raise self.error

    def is_saved(self) -> bool:
        if self.place == "is_saved":
            raise self.error
        return super().is_saved()


def _steps(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step_")) for path in checkpoint_folders(folder)]


def test_an_asynchronous_checkpoint_appears_when_its_shards_are_written(
    folder: Path, model_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    writer = make_writer(folder, model_path)
    writer.poll()  # nothing is in flight
    writer.begin(make_state(20))
    writer.poll()
    assert latest_checkpoint(folder) is None
    writer.poll()
    assert latest_checkpoint(folder) == folder / "step_000020"
    assert_complete(folder / "step_000020", make_state(20))
    assert names_in(folder) == ["latest", "step_000020"]
    assert (folder / LATEST_FILE).read_text(encoding="utf-8") == "step_000020\n"
    assert load_config(folder / "step_000020" / CONFIG_FILE) == writer.config
    num_bytes = sum(
        path.stat().st_size for path in (folder / "step_000020").rglob("*") if path.is_file()
    )
    (text,) = [text for text in caplog.messages if "training waited" in text]
    assert text.startswith(f"checkpoint step_000020: {num_bytes:,} bytes in ")
    assert writer.take_polled_seconds() > 0
    assert writer.take_polled_seconds() == 0


def test_ranks_are_polled_at_most_once_a_second(
    folder: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "POLL_SECONDS", 1e6)
    writer = make_writer(folder, model_path)
    writer.begin(make_state(20))
    for _ in range(3):
        writer.poll()
    # polled once: the shards are written at the second poll
    assert latest_checkpoint(folder) is None
    writer.keep(make_state(21), is_due=False)  # the end of a step always polls
    assert latest_checkpoint(folder) == folder / "step_000020"


def test_the_newest_and_the_best_are_kept_across_restarts(folder: Path, model_path: Path) -> None:
    """keep_last=2, keep_best=2: checkpoints on disk after each step of a new writer."""
    expected = {
        5: (0.3, [5]),
        10: (0.9, [5, 10]),
        15: (0.3, [5, 10, 15]),  # ties go to 5
        20: (None, [5, 10, 15, 20]),  # newest: 15, 20; best: 10, 5
        25: (0.5, [10, 20, 25]),  # best: 10, 25
        30: (0.1, [10, 25, 30]),
        35: (0.5, [10, 25, 30, 35]),  # best: 10, 25
        40: (0.2, [10, 25, 35, 40]),
    }
    for step, (accuracy, kept) in expected.items():
        write(make_writer(folder, model_path, keep_last=2, keep_best=2), make_state(step, accuracy))
        assert _steps(folder) == kept
    end(make_writer(folder, model_path, keep_last=2, keep_best=1))
    assert names_in(folder) == ["latest", "step_000010", "step_000040"]


def test_a_lower_keep_last_frees_space_before_the_next_checkpoint(
    folder: Path, model_path: Path
) -> None:
    writer = make_writer(folder, model_path, keep_last=3)
    write(writer, make_state(5, 0.9), make_state(10, 0.1), make_state(15))
    # and keep_best=0, so step 5 is removed as well
    writer = make_writer(folder, model_path, keep_last=1)
    writer.begin(make_state(20))
    assert _steps(folder) == [15]
    writer.begin(make_state(25))  # finishes step 20
    assert _steps(folder) == [20]
    make_writer(folder, model_path, keep_last=1, asynchronous=False).begin(make_state(30))
    assert latest_checkpoint(folder) == folder / "step_000030"  # at once
    assert_complete(folder / "step_000030", make_state(30))


@pytest.mark.slow
@pytest.mark.parametrize("is_on_disk", [False, True])
def test_a_step_among_the_best_is_saved_even_if_not_due(
    folder: Path, model_path: Path, is_on_disk: bool
) -> None:
    """keep_best=2: compares with those on disk and in flight; ties go to the earlier."""

    def is_saved(accuracy: float | None, keep_best: int = 2) -> bool:
        shutil.rmtree(folder, ignore_errors=True)
        writer = make_writer(folder, model_path, keep_last=9, keep_best=keep_best)
        write(writer, make_state(5, 0.3), make_state(10))
        writer.begin(make_state(15, 0.5))
        if is_on_disk:
            writer.finish()
        writer.keep(make_state(20, accuracy), is_due=False)
        writer.finish()
        return 20 in _steps(folder)

    assert [is_saved(accuracy) for accuracy in (None, 0.1, 0.3, 0.4)] == [False, False, False, True]
    assert not is_saved(1.0, keep_best=0)


def test_an_interrupt_while_publishing_leaves_a_writer_that_can_finish(
    folder: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = make_writer(folder, model_path)
    write(writer, make_state(5))
    writer.begin(make_state(10))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        # after the rename, before `latest`
        patch.setattr(writer_module, "write_atomically", interrupt)
        with pytest.raises(KeyboardInterrupt):
            writer.finish()
    writer.finish()
    assert latest_checkpoint(folder) == folder / "step_000005"


def test_leftovers_of_killed_attempts_are_removed(folder: Path, model_path: Path) -> None:
    write(make_writer(folder, model_path), make_state(5))
    for name in ("step_000010.partial", "step_000010.1a2b3c4d.partial"):
        (folder / name / "huggingface").mkdir(parents=True)
    (folder / "latest.1a2b3c4d.partial").write_text("step", encoding="utf-8")
    (folder / "notes.txt").write_text("a user's file", encoding="utf-8")
    make_writer(folder, model_path).begin(make_state(10))
    (partial,) = folder.glob("*.partial")
    assert partial.name.startswith("step_000010.")
    assert partial.name not in ("step_000010.partial", "step_000010.1a2b3c4d.partial")
    assert names_in(folder) == ["latest", "notes.txt", "step_000005", partial.name]


def test_a_step_is_not_written_twice(folder: Path, model_path: Path) -> None:
    writer = make_writer(folder, model_path)
    write(writer, make_state(5))
    with pytest.raises(CheckpointError, match=r"step_000005 could not be written .* it already"):
        writer.begin(make_state(5, accuracy=0.5))
    assert_complete(folder / "step_000005", make_state(5))


def test_disk_space_is_checked_before_anything_is_written(
    folder: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = make_writer(folder, model_path, keep_last=3, keep_best=1)
    write(writer, make_state(20, 0.5))
    lists = (METADATA_FILE, MANIFEST_FILE)  # small, and their size is known only at the end
    files = [
        path
        for path in (folder / "step_000020").rglob("*")
        if path.is_file() and path.name not in lists
    ]
    # The same for step 30, whose numbers have as many digits.
    num_bytes = sum(path.stat().st_size for path in files)
    free = num_bytes - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 0, free))
    message = rf"step_000030 needs {num_bytes:,} bytes, but only {free:,} .* from step_000020\."
    with pytest.raises(CheckpointError, match=message):
        writer.begin(make_state(30, 0.5))
    assert names_in(folder) == ["latest", "step_000020"]
    with pytest.raises(CheckpointError, match="there is no earlier checkpoint"):
        make_writer(folder.parent / "other", model_path).begin(make_state(30, 0.5))
    free = num_bytes
    write(writer, make_state(30, 0.5))
    assert names_in(folder) == ["latest", "step_000020", "step_000030"]


def _caused(error: CheckpointError, cause: OSError) -> CheckpointError:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("place", ["save", "is_saved"])
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "needs .* No space left .* Free some"),
        (OSError(errno.EFBIG, "File too large"), "needs .* File too large.* Free some space"),
        (
            _caused(CheckpointError("rank 3 failed"), OSError(errno.EDQUOT, "quota")),
            "needs .*rank 3 failed.* Free some space",
        ),
        (OSError(errno.EIO, "Input/output error"), "step_000010 could not be written"),
        (CheckpointError("rank 3 failed"), "step_000010 could not be written .* rank 3 failed"),
    ],
)
def test_a_failed_save_keeps_the_previous_checkpoint(
    folder: Path, model_path: Path, place: str, error: Exception, message: str
) -> None:
    write(make_writer(folder, model_path, keep_last=1), make_state(5))
    writer = make_writer(folder, model_path, BrokenShards(place, error), keep_last=1)
    with pytest.raises(CheckpointError, match=message) as caught:
        write(writer, make_state(10))
    assert "training can continue from step_000005" in str(caught.value)
    assert names_in(folder) == ["latest", "step_000005"]
    assert latest_checkpoint(folder) == folder / "step_000005"
    assert_complete(folder / "step_000005", make_state(5))
    writer.finish()  # nothing is in flight
    writer.shards = FileShards()
    write(writer, make_state(11))
    assert names_in(folder) == ["latest", "step_000011"]


def test_a_dead_rank_is_not_reported_as_a_failed_checkpoint(folder: Path, model_path: Path) -> None:
    """The trainer then starts new ranks with a new writer."""
    write(make_writer(folder, model_path), make_state(5))
    writer = make_writer(folder, model_path, BrokenShards("is_saved", WorkerDied("rank 1")))
    writer.begin(make_state(10))
    with pytest.raises(WorkerDied, match="rank 1"):
        writer.poll()
    assert latest_checkpoint(folder) == folder / "step_000005"
    state: TrainerState = make_state(10, accuracy=0.5)
    write(make_writer(folder, model_path), state)
    assert names_in(folder) == ["latest", "step_000005", "step_000010"]
    assert_complete(folder / "step_000010", state)
