"""A writer that is killed or out of disk space at any file operation leaves a usable checkpoint."""

import builtins
import errno
import gc
import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from dapo_core.checkpoint import writer
from dapo_core.checkpoint.folder import LATEST_FILE, checkpoint_folders, latest_checkpoint
from dapo_core.errors import CheckpointError
from tests.checkpoints import (
    assert_complete,
    end,
    find_start,
    make_model_folder,
    make_state,
    make_writer,
    names_in,
    write,
)

STATES = {
    5: make_state(5, accuracy=0.9),
    10: make_state(10, accuracy=0.2),
    15: make_state(15),
    20: make_state(20, accuracy=0.3),
    25: make_state(25, accuracy=0.3),
}
KEEP = {"keep_last": 2, "keep_best": 1, "keep_steps": (20,)}
CHANGES = ("rename", "fsync", "mkdir", "unlink", "rmdir")


class Killed(BaseException):
    """Simulates SIGKILL in a test that continues."""


class Disk:
    """Counts file system changes; number `fatal` fails before it is made.

    `is_torn`: instead, file number `fatal` opened for writing stays empty.
    """

    def __init__(self, fatal: int, is_torn: bool, error: BaseException) -> None:
        self.fatal, self.is_torn, self.error = fatal, is_torn, error
        self.names: list[str] = []
        self.has_failed = False

    def change(self, name: str, make: Callable[[], Any]) -> Any:
        if isinstance(self.error, Killed) and self.has_failed:
            raise self.error  # a killed process cleans nothing up
        number = self.names.count("open") if self.is_torn else len(self.names)
        self.names.append(name)
        if number != self.fatal or self.has_failed or (self.is_torn and name != "open"):
            return make()
        self.has_failed = True
        if self.is_torn:
            make().close()
        raise self.error

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            mode = args[1] if len(args) > 1 else kwargs.get("mode", "r")
            if name == "open" and not set(mode) & set("wax+"):
                return function(*args, **kwargs)
            return self.change(name, lambda: function(*args, **kwargs))

        return wrapped


@contextmanager
def _disk(fatal: int, is_torn: bool, error: BaseException) -> Iterator[Disk]:
    disk = Disk(fatal, is_torn, error)
    # a collection could remove temporary files of others, which would count
    gc.disable()
    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGES:
            if name == "fsync" and isinstance(error, Killed):
                continue  # a kill there leaves the same state as at the next change
            patch.setattr(os, name, disk.wrap(name, getattr(os, name)))
        wrapped = disk.wrap("open", io.open)
        patch.setattr(io, "open", wrapped)
        patch.setattr(builtins, "open", wrapped)
        try:
            yield disk
        finally:
            gc.enable()


@pytest.fixture(autouse=True)
def _fast_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(writer, "dump_config", lambda config: "run: {}\n")


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    return make_model_folder(tmp_path / "model")


def _publish_20(folder: Path, model_path: Path) -> None:
    write(make_writer(folder, model_path, **KEEP), STATES[20])


def _keep_final(folder: Path, model_path: Path) -> None:
    end(make_writer(folder, model_path, **KEEP))


def _failures(
    before: Path, model_path: Path, act: Callable[[Path, Path], None], error: BaseException
) -> Iterator[tuple[Path, Disk, str]]:
    """Yield the folder after `act` on a copy, once for every way in which a change can fail."""
    for is_torn in (False, True) if isinstance(error, Killed) else (False,):
        fatal = 0
        while True:
            folder = before.with_name(f"{'torn' if is_torn else 'at'}_{fatal}")
            # files are never changed in place
            shutil.copytree(before, folder, copy_function=os.link)
            message = ""
            with _disk(fatal, is_torn, error) as disk:
                try:
                    act(folder, model_path)
                except (Killed, CheckpointError) as raised:
                    message = str(raised)
            if not disk.has_failed:
                break
            yield folder, disk, message
            shutil.rmtree(folder)
            fatal += 1


def _assert_all_complete(folder: Path) -> list[int]:
    """Check every complete checkpoint and `latest`; returns their steps."""
    steps = [int(path.name.removeprefix("step_")) for path in checkpoint_folders(folder)]
    for path, step in zip(checkpoint_folders(folder), steps, strict=True):
        assert_complete(path, STATES[step])
    if (folder / LATEST_FILE).exists():
        assert (folder / LATEST_FILE).read_text(encoding="utf-8") == f"step_{steps[-1]:06d}\n"
    return steps


def _continue(folder: Path, model_path: Path) -> None:
    """Write the next attempt's checkpoint: what is on disk afterwards depends only on the steps."""
    latest = latest_checkpoint(folder)
    next_step = 20 if latest is None else int(latest.name.removeprefix("step_")) + 5
    older = {path.name for path in checkpoint_folders(folder)} - {"step_000010"}
    write(make_writer(folder, model_path, **KEEP), STATES[next_step])
    removed = {"step_000015"} if next_step == 25 else set()
    assert set(names_in(folder)) == {"latest", f"step_{next_step:06d}"} | older - removed
    _assert_all_complete(folder)


@pytest.mark.slow
@pytest.mark.parametrize("is_first", [True, False])
def test_a_kill_at_any_change_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, model_path: Path, is_first: bool
) -> None:
    before = tmp_path / "before"
    before.mkdir()
    if not is_first:
        write(make_writer(before, model_path, **KEEP), STATES[5], STATES[10], STATES[15])
        # An earlier attempt was killed between the two renames.
        write(make_writer(before, model_path, keep_last=9), make_state(20, accuracy=0.99))
        (before / LATEST_FILE).write_text("step_000015\n", encoding="utf-8")
    old, new = ([], [20]) if is_first else ([5, 10, 15], [5, 15, 20])
    seen = set()
    for folder, disk, _ in _failures(before, model_path, _publish_20, Killed()):
        assert set(disk.names) <= {*CHANGES, "open"}
        steps = _assert_all_complete(folder)
        assert steps in (old, sorted({*old, 20}), new)
        seen.add(tuple(steps))
        _continue(folder, model_path)
    assert {tuple(old), tuple(new)} <= seen


@pytest.mark.slow
def test_a_kill_while_old_checkpoints_are_removed_keeps_the_last_and_the_best(
    tmp_path: Path, model_path: Path
) -> None:
    before = tmp_path / "before"
    write(make_writer(before, model_path, keep_last=9), *(STATES[step] for step in (5, 10, 15, 20)))
    seen = set()
    for folder, _, _ in _failures(before, model_path, _keep_final, Killed()):
        steps = _assert_all_complete(folder)
        assert {5, 20} <= set(steps)
        seen.add(tuple(steps))
        _keep_final(folder, model_path)
        assert names_in(folder) == ["latest", "step_000005", "step_000020"]
    assert seen == {(5, 10, 15, 20), (5, 15, 20), (5, 20)}


@pytest.mark.slow
def test_a_full_disk_at_any_change_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, model_path: Path
) -> None:
    before = tmp_path / "before"
    write(make_writer(before, model_path, **KEEP), STATES[5], STATES[10], STATES[15])
    seen = set()
    full = OSError(errno.ENOSPC, "No space left on device")
    for folder, _, message in _failures(before, model_path, _publish_20, full):
        steps = _assert_all_complete(folder)
        if message:
            assert "No space left on device" in message
            assert f"training can continue from step_{steps[-1]:06d}. Free some space" in message
            assert list(folder.glob("step_*.partial")) == []
        else:  # only the removal of step 10 failed
            assert steps[-1] == 20
        seen.add((bool(message), steps[-1]))
    # (True, 20): failed after `latest` was written
    assert seen == {(True, 15), (True, 20), (False, 20)}


def test_a_kill_while_checkpoints_are_moved_aside_loses_nothing(
    tmp_path: Path, model_path: Path
) -> None:
    before = tmp_path / "before"
    write(make_writer(before / "checkpoints", model_path, **KEEP), STATES[10], STATES[15])
    (before / "metrics.jsonl").write_text("{}\n", encoding="utf-8")

    def move_aside(folder: Path, _: Path) -> None:
        assert find_start(folder / "checkpoints", "never") is None

    num_kills = 0
    for folder, _, _ in _failures(before, model_path, move_aside, Killed()):
        move_aside(folder, model_path)
        assert names_in(folder / "checkpoints") == []
        kept = ("metrics.jsonl", "latest", "step_000010")
        assert len([path for path in folder.rglob("*") if path.name in kept]) == 3
        (latest,) = folder.rglob("step_000015")
        assert_complete(latest, STATES[15])
        num_kills += 1
    assert num_kills >= 2 + 4  # two folders made; two checkpoints, latest and metrics moved
