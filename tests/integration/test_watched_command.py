"""A watched command outlives those who started it, is found again, and ends in order when nobody wants it."""

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

from dapo_core.errors import ChildProcessFailed
from dapo_core.stopping import ECHO_SECONDS
from durable import is_locked
from tasks.processes import supervisor, watched_command
from tasks.processes.watched_command import (
    Outlive,
    Record,
    WatchedCommand,
    find_running,
    read_record,
    watch_command,
)
from tasks.retries import is_lasting, shortened
from tests.processes import DEADLINE_SECONDS, python, start_time_of, wait_until

SOON = Outlive(unwatched_seconds=60.0, stop_seconds=10.0, grace_seconds=0.5)

# Says "tick" until the file exists, then ends.
TICKER = """
    import pathlib, sys, time
    while not pathlib.Path(sys.argv[1]).exists():
        print("tick", flush=True)
        time.sleep(0.05)
    print("last words")
    sys.exit(int(sys.argv[2]))
"""
# At SIGTERM tells whether its helper, of the same process group, was left alone, and ends a little later.
SAVER = """
    import os, signal, sys, time
    if (helper := os.fork()) == 0:
        signal.pause()
    def save(*_):
        time.sleep(0.3)
        print("helper", "gone" if os.waitpid(helper, os.WNOHANG)[0] else "there", flush=True)
        os._exit(143)
    signal.signal(signal.SIGTERM, save)
    while True:
        print("up", flush=True)
        time.sleep(0.1)
"""
STUBBORN = """
    import signal, time
    signal.signal(signal.SIGTERM, lambda *_: print("told to end", flush=True))
    print("up", flush=True)
    while True:
        time.sleep(60)
"""
# Leaves its command running when told to end by SIGTERM, and stops it at an interrupt.
PARENT = """
    import json, signal, sys
    from tasks.processes.watched_command import Outlive, watch_command
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))
    lock = open(sys.argv[1] + ".cluster", "a")
    import fcntl
    fcntl.flock(lock, fcntl.LOCK_EX)
    outlive = Outlive(**json.loads(sys.argv[2]), is_left=lambda error: isinstance(error, SystemExit),
                      held=lambda: [lock.fileno()])
    watch_command(json.loads(sys.argv[3]), log_path=sys.argv[1] + ".log", label="train", outlive=outlive)
"""


STARTED_AGAIN = python("print('started again')")


class Cancelled(BaseException):
    pass


def cancel(line: str) -> None:
    raise Cancelled(line)


@pytest.fixture
def stem(tmp_path: Path) -> Iterator[Path]:
    """Where the files of a command are; afterwards it is gone."""
    stem = tmp_path / "train-0123"
    yield stem
    record = read_record(stem.with_suffix(".log"))
    if record is not None and is_locked(stem.with_suffix(".watch")):
        os.kill(record.pid, signal.SIGKILL)
        pytest.fail(f"{record} still runs")


def start_parent(stem: Path, command: list[str], **limits: Any) -> subprocess.Popen[bytes]:
    """Starts a process that watches the command, and waits for its first line."""
    limits = {"unwatched_seconds": 60.0, "stop_seconds": 10.0, "grace_seconds": 0.5, **limits}
    arguments = [str(stem), json.dumps(limits), json.dumps(command)]
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(PARENT), *arguments], stderr=subprocess.PIPE)
    log = stem.with_suffix(".log")
    wait_until(lambda: log.exists() and log.read_text() != "", "the command's first line")
    return parent


def end(parent: subprocess.Popen[bytes], ending: signal.Signals) -> str:
    parent.send_signal(ending)
    return parent.communicate(timeout=DEADLINE_SECONDS)[1].decode()


def record_of(stem: Path) -> Record:
    record = read_record(stem.with_suffix(".log"))
    assert record is not None
    return record


def outcome_of(stem: Path) -> Record:
    wait_until(lambda: not is_locked(stem.with_suffix(".log")), "the command to end")
    return record_of(stem)


def watch(stem: Path, command: list[str], outlive: Outlive = SOON, **options: Any) -> None:
    watch_command(command, log_path=stem.with_suffix(".log"), label="train", outlive=outlive, **options)


@pytest.mark.parametrize(
    ("ending", "exit_code"), [(signal.SIGKILL, 0), (signal.SIGTERM, 3)], ids=["killed parent", "restarted worker"]
)
def test_the_next_attaches_to_what_outlived_its_parent(
    stem: Path, caplog: pytest.LogCaptureFixture, ending: signal.Signals, exit_code: int
) -> None:
    caplog.set_level(logging.INFO, logger="tasks.processes.watched_command")
    go = stem.with_suffix(".go")
    end(start_parent(stem, python(TICKER, go, str(exit_code))), ending)
    assert is_locked(stem.with_suffix(".log"))
    assert is_locked(stem.with_suffix(".cluster"))  # which the parent held, and its command still does
    first = record_of(stem)
    attach = dataclasses.replace(SOON, held=lambda: pytest.fail("the running command holds the lock itself"))
    lines: list[str] = []

    def on_line(line: str) -> None:
        lines.append(line)
        go.touch()

    if exit_code:
        with pytest.raises(ChildProcessFailed, match=r"train ended with exit code 3(.|\n)*last words") as caught:
            watch(stem, STARTED_AGAIN, attach, on_line=on_line)
        assert caught.value.exit_code == exit_code
    else:
        watch(stem, STARTED_AGAIN, attach, on_line=on_line)
    assert lines[0] == "tick"
    assert lines[-1] == "last words"
    assert f"attached to pid {first.pid} on {os.uname().nodename}, started 20" in caplog.text
    assert record_of(stem) == Record(**{**vars(first), "exit_code": exit_code})
    assert not is_locked(stem.with_suffix(".log"))
    assert not is_locked(stem.with_suffix(".cluster"))
    assert start_time_of(first.pid) is None


def test_one_that_works_on_something_else_is_waited_for(stem: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tasks.processes.watched_command")
    go = stem.with_suffix(".go")
    end(start_parent(stem, python(TICKER, go, "0"), work="0123"), signal.SIGKILL)
    first = record_of(stem)
    assert first.work == "0123"
    timer = threading.Timer(1.0, go.touch)
    timer.start()
    lines: list[str] = []
    watch(stem, STARTED_AGAIN, dataclasses.replace(SOON, work="0123.forced"), on_line=lines.append)
    timer.join()
    assert lines == ["started again"]
    assert f"train waits for {first}, which works on 0123, not on 0123.forced" in caplog.text
    log = stem.with_suffix(".log").read_text()
    assert log.index("last words") < log.index("started again")


def test_one_that_ended_before_is_not_attached_to(stem: Path) -> None:
    lines: list[str] = []
    for _ in range(2):
        watch(stem, STARTED_AGAIN, on_line=lines.append)
    assert lines == ["started again", "started again"]


def test_unwatched_it_stops_in_order_and_is_started_again_by_the_next(stem: Path) -> None:
    end(start_parent(stem, python(SAVER), unwatched_seconds=1.0), signal.SIGKILL)
    outcome = outcome_of(stem)
    assert (outcome.stopping, outcome.exit_code) == (supervisor.UNWATCHED, 143)
    log = stem.with_suffix(".log").read_text()
    assert "nobody has watched for 1 s: stopping the command" in log
    assert "helper there" in log
    lines: list[str] = []
    watch(stem, STARTED_AGAIN, on_line=lines.append)
    assert lines == ["started again"]


def test_watched_it_goes_on(stem: Path) -> None:
    lines: list[str] = []
    outlive = Outlive(unwatched_seconds=0.5, stop_seconds=1.0)
    watch(stem, python("import time; time.sleep(1.5); print('end')"), outlive, on_line=lines.append)
    assert lines == ["end"]


def test_with_no_time_unwatched_it_ends_with_its_parent(stem: Path) -> None:
    end(start_parent(stem, python(SAVER), unwatched_seconds=0.0), signal.SIGKILL)
    outcome = outcome_of(stem)
    assert (outcome.stopping, outcome.exit_code) == (supervisor.ORPHANED, 143)


@pytest.mark.parametrize("is_attached", [False, True])
def test_stopped_it_ends_in_order_before_those_below_it_are_told(stem: Path, is_attached: bool) -> None:
    if is_attached:
        end(start_parent(stem, python(SAVER)), signal.SIGKILL)
    with pytest.raises(Cancelled, match="up"):
        watch(stem, STARTED_AGAIN if is_attached else python(SAVER), on_line=cancel)
    outcome = outcome_of(stem)
    assert (outcome.stopping, outcome.exit_code) == (supervisor.ASKED, 143)
    assert "helper there" in stem.with_suffix(".log").read_text()


@pytest.mark.parametrize(
    ("stopped_by", "said"),
    [
        ("a signal to the command", ""),
        ("a signal to its supervisor", "[supervisor] asked to stop by SIGTERM of process {pid}\n"),
        (
            "another run",
            "[supervisor] asked to stop by a run that watched it and was stopped itself, in",
        ),
    ],
)
def test_stopped_by_others_it_has_failed_and_says_so(stem: Path, stopped_by: str, said: str) -> None:
    parent = start_parent(stem, python(SAVER))
    if stopped_by != "another run":
        end(parent, signal.SIGKILL)
    supervisor_pid, told = record_of(stem).pid, []

    def stop_once(line: str) -> None:
        if told:
            return
        told.append(line)
        if stopped_by == "another run":
            parent.send_signal(signal.SIGINT)
        else:
            pids = [supervisor_pid, *supervisor.descendants(supervisor_pid)]  # parents before children
            os.kill(pids[stopped_by == "a signal to the command"], signal.SIGTERM)

    with pytest.raises(ChildProcessFailed) as caught:
        watch(stem, STARTED_AGAIN, on_line=stop_once)
    parent.communicate(timeout=DEADLINE_SECONDS)
    assert str(shortened(caught.value)).startswith(
        "train ended with exit code 143: told to stop by SIGTERM, not by us; its log is"
    )
    assert is_lasting(caught.value)  # no attempt of ours undoes it
    log = stem.with_suffix(".log").read_text()
    assert said.format(pid=os.getpid(), stem=stem) in log
    assert ("asked to stop" in log) == bool(said)


def test_one_that_does_not_stop_in_time_is_killed(stem: Path) -> None:
    with pytest.raises(Cancelled):
        watch(stem, python(STUBBORN), Outlive(60.0, stop_seconds=0.3, grace_seconds=0.3), on_line=cancel)
    assert record_of(stem).exit_code == -signal.SIGKILL
    assert stem.with_suffix(".log").read_text().count("told to end") >= 2  # alone, then with its process group


def test_a_second_interrupt_does_not_wait(stem: Path) -> None:
    parent = start_parent(stem, python(STUBBORN), stop_seconds=300.0, grace_seconds=300.0)
    parent.send_signal(signal.SIGINT)
    later = time.monotonic() + ECHO_SECONDS + 0.2
    wait_until(lambda: "told to end" in stem.with_suffix(".log").read_text(), "the request to arrive")
    wait_until(lambda: time.monotonic() > later, "a second interrupt to be one")
    assert "KeyboardInterrupt" in end(parent, signal.SIGINT)
    assert outcome_of(stem).exit_code == -signal.SIGKILL


def test_an_interrupt_that_comes_twice_at_once_is_one(stem: Path) -> None:
    parent = start_parent(stem, python(SAVER))
    parent.send_signal(signal.SIGINT)
    watch_file = stem.with_suffix(".watch")
    wait_until(lambda: watch_file.read_text().startswith(supervisor.STOP), "the request")
    assert "KeyboardInterrupt" in end(parent, signal.SIGINT)
    assert outcome_of(stem).exit_code == 143
    assert "helper there" in stem.with_suffix(".log").read_text()


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """We cannot write a byte to any file inside."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("is_attached", [False, True])
def test_on_a_full_disk_a_signal_stops_it(stem: Path, is_attached: bool, caplog: pytest.LogCaptureFixture) -> None:
    if is_attached:
        end(start_parent(stem, python(SAVER)), signal.SIGKILL)
    stack = contextlib.ExitStack()

    def cancel_on_full_disk(line: str) -> None:
        stack.enter_context(full_disk())
        cancel(line)

    with stack, pytest.raises(Cancelled):
        watch(stem, STARTED_AGAIN if is_attached else python(SAVER), on_line=cancel_on_full_disk)
    outcome = outcome_of(stem)
    assert (outcome.stopping, outcome.exit_code) == (supervisor.ASKED, 143)
    assert "helper there" in stem.with_suffix(".log").read_text()
    assert "is told to stop by a signal: [Errno 27]" in caplog.text


def test_on_a_full_disk_a_signal_kills_it(stem: Path) -> None:
    end(start_parent(stem, python(STUBBORN), stop_seconds=300.0, grace_seconds=300.0), signal.SIGKILL)
    with full_disk():
        WatchedCommand("train", stem.with_suffix(".log"), SOON, record_of(stem))._request(supervisor.KILL)
    assert outcome_of(stem).exit_code == -signal.SIGKILL


@pytest.mark.parametrize("other", [{"host": "another"}, {"pid": os.getpid()}], ids=["host", "process"])
def test_on_a_full_disk_only_its_own_supervisor_is_signalled(
    stem: Path, other: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    end(start_parent(stem, python(SAVER)), signal.SIGKILL)
    elsewhere = dataclasses.replace(record_of(stem), **other)
    with full_disk():
        WatchedCommand("train", stem.with_suffix(".log"), SOON, elsewhere).stop()
    assert f"train ({elsewhere}) cannot be told to stop: [Errno 27]" in caplog.text
    assert find_running(stem.with_suffix(".log")) == record_of(stem)
    WatchedCommand("train", stem.with_suffix(".log"), SOON, record_of(stem)).stop()
    assert outcome_of(stem).stopping == supervisor.ASKED


def test_one_that_takes_long_to_stop_is_left_to_its_supervisor(
    stem: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_command, "STOP_WAIT_SECONDS", 0.1)
    end(start_parent(stem, python(SAVER.replace("sleep(0.3)", "sleep(1.5)"))), signal.SIGKILL)
    with pytest.raises(Cancelled):
        watch(stem, STARTED_AGAIN, on_line=cancel)
    assert f"train (pid {record_of(stem).pid} on" in caplog.text
    assert "is still ending, for at most flow.stop_seconds=10" in caplog.text
    assert is_locked(stem.with_suffix(".log"))
    lines: list[str] = []
    watch(stem, STARTED_AGAIN, on_line=lines.append)  # waits, and does not attach to what is being stopped
    assert lines == ["started again"]
    log = stem.with_suffix(".log").read_text()
    assert 0 < log.index("helper there") < log.index("started again")


def test_a_supervisor_that_is_killed_leaves_no_outcome_and_the_next_starts_again(stem: Path) -> None:
    end(start_parent(stem, python(TICKER, stem.with_suffix(".never"), "0")), signal.SIGKILL)
    lines: list[str] = []

    def kill_supervisor(line: str) -> None:
        if not lines:
            os.kill(record_of(stem).pid, signal.SIGKILL)
        lines.append(line)

    watch(stem, STARTED_AGAIN, on_line=kill_supervisor)
    assert lines[-1] == "started again"
    assert set(lines[:-1]) == {"tick"}
