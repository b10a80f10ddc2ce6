"""Files and locks under crashes, full disks and competing processes."""

import fcntl
import itertools
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import durable
from durable import (
    UNSET,
    LockHeld,
    append_json_line,
    differences,
    find_holder,
    is_locked,
    locked,
    publish,
    read_holder,
    read_json_lines,
    sync_tree,
    tail,
    write_atomically,
)


def _hold(path: Path, shared: bool, ready: Connection) -> None:
    """Lock the file, start a process that outlives this one, and wait for a signal."""
    with locked(path, shared=shared, note="run 7"):
        stdin, _ = os.pipe()
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=stdin, close_fds=False)
        ready.send(child.pid)
        signal.pause()


@contextmanager
def _holder(
    path: Path, shared: bool = False
) -> Iterator[tuple[multiprocessing.process.BaseProcess, int]]:
    """Another process that holds the lock, with the pid of its child."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    # fork: a spawned process would import everything again
    process = multiprocessing.get_context("fork").Process(target=_hold, args=(path, shared, sender))
    process.start()
    child = receiver.recv()
    try:
        yield process, child
    finally:
        process.kill()
        process.join()
        os.kill(child, signal.SIGKILL)


@pytest.mark.slow
def test_a_lock_ends_with_its_holder_despite_living_children(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_locked(path)
    assert not path.exists()
    with _holder(path) as (process, child):
        assert is_locked(path)
        assert str(find_holder(path)).startswith(f"run 7 (pid {process.pid} on ")
        named = rf"run 7 \(pid {process.pid} on .* since 20.*\) holds the lock {path}"
        with pytest.raises(LockHeld, match=named), locked(path):
            pytest.fail("two processes hold the lock")
        process.kill()
        process.join()
        os.kill(child, 0)  # still alive
        assert not is_locked(path)
        with locked(path, note="next"):
            assert read_holder(path).startswith(f"next (pid {os.getpid()} on ")
    assert find_holder(path) is None


@pytest.mark.slow
def test_a_shared_lock_excludes_only_exclusive_ones(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with _holder(path, shared=True):
        with locked(path, shared=True):
            assert not is_locked(path)
        with pytest.raises(LockHeld, match="another process"), locked(path):
            pytest.fail("an exclusive lock next to a shared one")


def test_a_waiter_logs_the_holder_at_growing_intervals_and_gets_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The fake clock advances ten seconds per look."""
    caplog.set_level(logging.INFO, logger="durable")
    path, clock = tmp_path / "lock", itertools.count(0, 10)
    with _holder(path) as (process, _):
        looks = iter([None] * 30 + [process.kill])

        def sleep(seconds: float) -> None:
            if (act := next(looks, None)) is not None:
                act()
                process.join()

        monkeypatch.setattr(
            durable, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=sleep)
        )
        with locked(path, waiting="which is slow"):
            lines = [record.getMessage() for record in caplog.records]
    assert all(line.startswith(f"waiting for run 7 (pid {process.pid} on ") for line in lines)
    ends = [line.partition("), ")[2] for line in lines]
    assert ends == [f"which is slow ({seconds} s so far)" for seconds in (10, 60, 120, 240)]


@pytest.mark.slow
@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.rename(path.with_name("aside"))])
def test_a_lock_file_that_lost_its_name_is_not_locked_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object]
) -> None:
    """The holder may remove or rename the file between a waiter's open and flock."""
    path, real, calls = tmp_path / "lock", fcntl.flock, list[int]()

    def flock(file: Any, operation: int) -> None:
        calls.append(operation)
        if len(calls) == 1:
            change(path)
        real(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(path):
        assert len(calls) == 2
        with pytest.raises(LockHeld), locked(path):
            pytest.fail("two processes hold the lock")


def test_is_locked_does_not_block_another_process(tmp_path: Path) -> None:
    """`is_locked` briefly holds a shared lock; `locked` waits for it."""
    path = tmp_path / "lock"
    with locked(path):
        pass
    glance = os.open(path, os.O_RDONLY)
    fcntl.flock(glance, fcntl.LOCK_SH)
    timer = threading.Timer(0.05, os.close, [glance])
    timer.start()
    with locked(path):
        assert is_locked(path)
    timer.join()


def test_a_file_system_without_locks_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(file: Any, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="not implemented"), locked(tmp_path / "lock"):
        pytest.fail("nothing is locked")
    assert len(os.listdir("/proc/self/fd")) == num_open


class _Killed(BaseException):
    """Simulates SIGKILL."""


@pytest.mark.parametrize("place", ["write_bytes", "rename"])
def test_a_kill_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")

    def kill(self: Path, *_: Any, **__: Any) -> None:
        if place == "write_bytes":
            self.touch()
        raise _Killed

    with monkeypatch.context() as patch:
        patch.setattr(Path, place, kill)
        patch.setattr(Path, "unlink", kill)  # a killed process cleans nothing up
        with pytest.raises(_Killed):
            write_atomically(path, "new")
    assert path.read_text() == "old"
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_failed_write_leaves_no_partial_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(tmp_path / "file", "new")
    assert list(tmp_path.iterdir()) == []


def test_content_is_synced_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = tmp_path / "folder.partial"
    (partial / "inner").mkdir(parents=True)
    (partial / "inner" / "file").write_text("content")
    (partial / "link").symlink_to("nowhere")
    os.mkfifo(partial / "pipe")
    events: list[str] = []
    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real_fsync(descriptor)

    def rename(self: Path, target: Path) -> Path:
        events.append("rename")
        return real_rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    publish(partial, tmp_path / "folder")
    assert sorted(events[:-3]) == ["file", "inner"]
    assert events[-3:] == ["folder.partial", "rename", tmp_path.name]
    assert (tmp_path / "folder" / "inner" / "file").read_text() == "content"
    events.clear()
    sync_tree(tmp_path / "folder")
    assert sorted(events) == ["file", "folder", "inner"]


def test_a_torn_line_loses_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    assert read_json_lines(path) == []
    append_json_line(path, {"step": 1, "text": "ü\n"})
    append_json_line(path, {"step": 2})
    content = path.read_bytes()
    for length in range(len(content) + 1):
        path.write_bytes(content[:length])
        kept = read_json_lines(path)
        assert [row["step"] for row in kept] == [1, 2][: len(kept)]
        append_json_line(path, {"step": 3})
        assert read_json_lines(path) == [*kept, {"step": 3}]
    assert json.loads(content.splitlines()[0]) == {"step": 1, "text": "ü\n"}


def test_the_tail_of_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"first\n\n  \nsecond \xff\nthird\nfourth")
    assert tail(path, 2) == ["third", "fourth"]
    assert tail(path, 9) == ["first", "second \ufffd", "third", "fourth"]
    assert tail(path, 9, offset=19) == ["third", "fourth"]
    assert tail(path, 9, offset=99) == []
    monkeypatch.setattr(durable, "TAIL_BYTES", 9)
    assert tail(path, 9) == ["rd", "fourth"]  # the last 9 bytes


def test_differences_list_every_leaf() -> None:
    before = {"a": {"b": 1, "c": {"d": 2}}, "same": [1], "gone": None, "empty": {}}
    after = {"new": 0, "a": {"b": 1.5, "c": {"d": 2}}, "same": [1], "empty": {"x": 1}}
    assert differences(before, after) == [
        ("new", UNSET, 0),
        ("a.b", 1, 1.5),
        ("empty.x", UNSET, 1),
        ("gone", None, UNSET),
        ("empty", {}, UNSET),
    ]
    assert differences(before, before) == []
