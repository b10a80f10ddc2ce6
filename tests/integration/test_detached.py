"""A detached command outlives its parent, is found again, and is stopped gracefully."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dapo_core.machine.stopping import ECHO_SECONDS
from durable import is_locked
from tasks.execution.retries import is_lasting, shortened
from tasks.processes import detached, supervisor
from tasks.processes.child import ChildProcessFailed
from tasks.processes.detached import DetachOptions, Record, attach_or_start, read_record
from tests.processes import DEADLINE_SECONDS, python, start_time_of, wait_until
from tests.sources import Clock

OPTIONS = DetachOptions(unwatched_seconds=300.0, stop_seconds=300.0, grace_seconds=0.5)

# Says "tick" until the file exists, then ends.
TICKER = """
    import pathlib, sys, time
    while not pathlib.Path(sys.argv[1]).exists():
        print("tick", flush=True)
        time.sleep(0.05)
    print("last words")
    sys.exit(int(sys.argv[2]))
"""
# On SIGTERM reports whether its helper in the same process group is alive, and exits a little
# later, or once the file exists.
SAVER = """
    import os, signal, sys, time
    if (helper := os.fork()) == 0:
        signal.pause()
    def save(*_):
        time.sleep(0.3)
        while len(sys.argv) > 1 and not os.path.exists(sys.argv[1]):
            time.sleep(0.02)
        print("helper", "gone" if os.waitpid(helper, os.WNOHANG)[0] else "there", flush=True)
        os._exit(143)
    signal.signal(signal.SIGTERM, save)
    while True:
        print("up", flush=True)
        time.sleep(0.1)
"""
STUBBORN = """
    import signal, time
    signal.signal(signal.SIGTERM, lambda *_: print("SIGTERM", flush=True))
    print("up", flush=True)
    while True:
        time.sleep(60)
"""
# Leaves its command running on SIGTERM, and stops it on an interrupt.
PARENT = """
    import json, signal, sys
    from pathlib import Path
    import durable
    from tasks.processes.detached import DetachOptions, attach_or_start
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("a worker restarts"))
    stem, options, command = sys.argv[1:]
    options = DetachOptions(**json.loads(options), survives=lambda error: isinstance(error, SystemExit),
                            lock=lambda: durable.locked(Path(stem + ".cluster")))
    attach_or_start(json.loads(command), log_path=stem + ".log", label="train", options=options)
"""
STARTED_AGAIN = python("print('started again')")


class Cancelled(BaseException):
    pass


def cancel(line: str) -> None:
    raise Cancelled(line)


@pytest.fixture
def stem(tmp_path: Path) -> Iterator[Path]:
    """The path stem of a command's files; fails if the command is still running afterwards."""
    stem = tmp_path / "train-0123"
    yield stem
    if is_locked(stem.with_suffix(".log")):
        os.kill(record_of(stem).pid, signal.SIGKILL)
        pytest.fail(f"{record_of(stem)} still runs")


def start_parent(stem: Path, command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process that runs the command, and wait for its first line."""
    options = {"unwatched_seconds": 300.0, "stop_seconds": 300.0, "grace_seconds": 0.5, **options}
    words = [str(stem), json.dumps(options), json.dumps(command)]
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT), *words], stderr=subprocess.PIPE
    )
    wait_until(
        lambda: stem.with_suffix(".log").exists() and log_of(stem) != "", "the command's first line"
    )
    return parent


def end(parent: subprocess.Popen[bytes], ending: signal.Signals) -> str:
    parent.send_signal(ending)
    return parent.communicate(timeout=DEADLINE_SECONDS)[1].decode()


def log_of(stem: Path) -> str:
    return stem.with_suffix(".log").read_text()


def record_of(stem: Path) -> Record:
    record = read_record(stem.with_suffix(".log"))
    assert record is not None
    return record


def outcome_of(stem: Path) -> tuple[str | None, int | None]:
    wait_until(lambda: not is_locked(stem.with_suffix(".log")), "the command to end")
    return record_of(stem).stopping, record_of(stem).exit_code


def run(stem: Path, command: list[str], options: DetachOptions = OPTIONS, **more: Any) -> list[str]:
    """Run or attach to the command; returns its lines."""
    lines: list[str] = []
    on_line = more.get("on_line", lines.append)
    attach_or_start(
        command, log_path=stem.with_suffix(".log"), label="train", options=options, on_line=on_line
    )
    return lines


@pytest.mark.parametrize(
    ("ending", "exit_code"),
    [(signal.SIGKILL, 0), (signal.SIGTERM, 3)],
    ids=["killed parent", "restarted worker"],
)
def test_the_next_run_attaches_to_a_command_that_outlived_its_parent(
    stem: Path, caplog: pytest.LogCaptureFixture, ending: signal.Signals, exit_code: int
) -> None:
    caplog.set_level(logging.INFO, logger="tasks.processes.detached")
    go = stem.with_suffix(".go")
    end(start_parent(stem, python(TICKER, go, str(exit_code))), ending)
    assert is_locked(stem.with_suffix(".cluster"))  # by the supervisor of the command
    first = record_of(stem)
    options = dataclasses.replace(
        OPTIONS, lock=lambda: pytest.fail("the supervisor holds the lock")
    )
    lines: list[str] = []

    def on_line(line: str) -> None:
        lines.append(line)
        go.touch()

    if exit_code:
        with pytest.raises(
            ChildProcessFailed, match=r"train ended with exit code 3(.|\n)*last words"
        ) as caught:
            run(stem, STARTED_AGAIN, options, on_line=on_line)
        assert caught.value.exit_code == exit_code
    else:
        run(stem, STARTED_AGAIN, options, on_line=on_line)
    assert lines[0] == "tick"
    assert lines[-1] == "last words"
    assert f"attached to pid {first.pid} on {os.uname().nodename}, started 20" in caplog.text
    assert record_of(stem) == dataclasses.replace(first, exit_code=exit_code)
    assert not is_locked(stem.with_suffix(".cluster"))
    assert start_time_of(first.pid) is None
    assert run(stem, STARTED_AGAIN) == ["started again"]  # a finished command is not attached to


def test_an_unwatched_command_is_stopped_gracefully(stem: Path) -> None:
    end(start_parent(stem, python(SAVER), unwatched_seconds=1.5), signal.SIGKILL)
    assert outcome_of(stem) == (supervisor.UNWATCHED, 143)
    assert "not watched for 1.5 s: stopping the command" in log_of(stem)
    assert "helper there" in log_of(stem)


def test_a_suspended_run_retries_its_stopped_command(stem: Path) -> None:
    """As after Ctrl-Z and fg."""

    def sleep(line: str) -> None:
        wait_until(lambda: not is_locked(stem.with_suffix(".log")), "the command to end")

    with pytest.raises(ChildProcessFailed) as caught:
        run(stem, python(SAVER), dataclasses.replace(OPTIONS, unwatched_seconds=1.5), on_line=sleep)
    assert outcome_of(stem) == (supervisor.UNWATCHED, 143)
    assert not is_lasting(caught.value)


def test_a_watched_command_keeps_running(stem: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detached, "TOUCH_SECONDS", 0.1)
    record = stem.with_suffix(supervisor.RECORD_SUFFIX)
    code = """
        import os, sys, time
        touched = set()
        while len(touched) < 4:
            touched.add(os.stat(sys.argv[1]).st_mtime_ns)
            time.sleep(0.02)
        print("watched")
    """
    assert run(stem, python(code, record)) == ["watched"]
    clock = Clock()
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", clock)
        detached_by = {"stem": str(stem), "unwatched_seconds": 1.5}
        watching = supervisor.Supervisor([], os.getpid(), 0.5, 10.0, None, detached_by)
        for touch in range(5):
            os.utime(record, ns=(touch, touch))
            watching._check_watchers(stem)
            clock.now += 1.4
            watching._check_watchers(stem)
            assert watching.stopping == ""
        clock.now += 0.2
        watching._check_watchers(stem)
    assert watching.stopping == supervisor.UNWATCHED


def test_without_unwatched_time_a_command_ends_with_its_parent(stem: Path) -> None:
    end(start_parent(stem, python(SAVER), unwatched_seconds=0.0), signal.SIGKILL)
    assert outcome_of(stem) == (supervisor.ORPHANED, 143)


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """No byte can be written to any file inside the block."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("is_attached", [False, True])
def test_cancellation_stops_a_command_gracefully_even_on_a_full_disk(
    stem: Path, is_attached: bool
) -> None:
    if is_attached:
        end(start_parent(stem, python(SAVER)), signal.SIGKILL)
    stack = contextlib.ExitStack()

    def cancel_on_full_disk(line: str) -> None:
        stack.enter_context(full_disk())
        raise Cancelled(line)

    with stack, pytest.raises(Cancelled, match="up"):
        run(stem, STARTED_AGAIN if is_attached else python(SAVER), on_line=cancel_on_full_disk)
    assert outcome_of(stem) == (supervisor.REQUESTED, 143)
    assert "helper there" in log_of(stem)  # descendants get SIGTERM later than the command


@pytest.mark.parametrize("target", ["the command", "its supervisor"])
def test_a_foreign_signal_stops_a_command_without_a_retry(stem: Path, target: str) -> None:
    end(start_parent(stem, python(SAVER)), signal.SIGKILL)
    supervisor_pid = record_of(stem).pid
    pids = [supervisor_pid, *supervisor.descendants(supervisor_pid)]  # parents before children
    signals = [pids[target == "the command"]]

    def stop_once(line: str) -> None:
        while signals:
            os.kill(signals.pop(), signal.SIGTERM)

    with pytest.raises(ChildProcessFailed) as caught:
        run(stem, STARTED_AGAIN, on_line=stop_once)
    assert str(shortened(caught.value)).startswith(
        "train ended with exit code 143: stopped by SIGTERM, not by us; its log is"
    )
    assert is_lasting(caught.value)
    said = f"[supervisor] stop requested by SIGTERM of {os.getpid()}\n"
    assert (said in log_of(stem)) == (target == "its supervisor")


def test_a_command_that_does_not_stop_in_time_is_killed(stem: Path) -> None:
    with pytest.raises(Cancelled):
        run(
            stem,
            python(STUBBORN),
            DetachOptions(300.0, stop_seconds=2.0, grace_seconds=2.0),
            on_line=cancel,
        )
    assert outcome_of(stem)[1] == -signal.SIGKILL
    assert log_of(stem).count("SIGTERM") >= 2  # alone, then with its process group


def test_a_second_interrupt_kills_a_command(stem: Path) -> None:
    parent = start_parent(stem, python(STUBBORN), stop_seconds=300.0, grace_seconds=300.0)
    parent.send_signal(signal.SIGINT)
    wait_until(lambda: "SIGTERM" in log_of(stem), "the request to arrive")
    later = time.monotonic() + ECHO_SECONDS + 0.2
    wait_until(lambda: time.monotonic() > later, "a second interrupt to be one")
    assert "KeyboardInterrupt" in end(parent, signal.SIGINT)
    assert outcome_of(stem)[1] == -signal.SIGKILL


def test_a_slow_stop_is_left_to_the_supervisor_and_the_next_run_waits(
    stem: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detached, "STOP_WAIT_SECONDS", 0.1)
    may_end = stem.with_suffix(".end")
    end(start_parent(stem, python(SAVER, may_end)), signal.SIGKILL)
    with pytest.raises(Cancelled):
        run(stem, STARTED_AGAIN, on_line=cancel)
    assert f"train ({record_of(stem)}) ends within flow.stop_seconds=300" in caplog.text
    threading.Timer(0.5, may_end.touch).start()
    assert run(stem, STARTED_AGAIN) == ["started again"]  # does not attach to a stopping command
    assert 0 < log_of(stem).index("helper there") < log_of(stem).index("started again")


def test_a_command_dies_with_its_supervisor_and_is_retried(stem: Path) -> None:
    end(start_parent(stem, python(TICKER, stem.with_suffix(".never"), "0")), signal.SIGKILL)
    pids = [record_of(stem).pid]

    def kill_supervisor(line: str) -> None:
        while pids:
            os.kill(pids.pop(), signal.SIGKILL)

    with pytest.raises(ChildProcessFailed, match="was killed by SIGKILL") as caught:
        run(stem, STARTED_AGAIN, on_line=kill_supervisor)
    assert not is_lasting(caught.value)
    assert run(stem, STARTED_AGAIN) == ["started again"]
