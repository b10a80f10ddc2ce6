"""A stage over its time limit is stopped with its processes, and the error names the key."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

import durable
from tasks.execution.training_lock import hold
from tasks.processes.child import run_command
from tasks.processes.time_limit import StageTimedOut, time_limit
from tests.processes import once_the_limit_is_paused

SECOND = 1 / 3600
FAR = 300.0  # seconds
KEY = "flow.time_limits.train_policy_hours"


def test_a_timed_out_child_is_stopped_gracefully(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('kept a checkpoint')))\n"
        "print(os.getpid()); time.sleep(60)"
    )
    lines: list[str] = []

    def expire(line: str) -> None:
        lines.append(line)
        signal.setitimer(signal.ITIMER_REAL, 0.01)

    words = r"^flow\.time_limits\.train_policy_hours=0\.083\d*: stopped after 5 min; .*go on"
    with pytest.raises(StageTimedOut, match=words), time_limit(FAR * SECOND, KEY, "go on"):
        run_command(
            [sys.executable, "-S", "-c", code],
            log_path=tmp_path / "log",
            label="train",
            on_line=expire,
        )
    assert not psutil.pid_exists(int(lines[0]))
    assert "kept a checkpoint" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("hours", [FAR * SECOND, None])
def test_a_stage_within_its_limit_is_not_interrupted_later(hours: float | None) -> None:
    handler, timer = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    with time_limit(hours, KEY, ""):
        assert hours is None or 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= FAR
    assert signal.getitimer(signal.ITIMER_REAL) == pytest.approx(
        timer, abs=60.0
    )  # of pytest-timeout, if it is on
    assert signal.getsignal(signal.SIGALRM) is handler


def test_waiting_for_a_lock_does_not_count_towards_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    with contextlib.ExitStack() as other:
        other.enter_context(durable.locked(path))
        release = threading.Thread(target=once_the_limit_is_paused, args=(other.pop_all().close,))
        with time_limit(FAR * SECOND, KEY, ""):
            release.start()
            with hold(path, "ours"):
                assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= FAR
        release.join()


def test_a_busy_coroutine_cannot_swallow_the_timeout() -> None:
    async def be_busy() -> None:
        while True:
            time.sleep(0.01)

    async def work() -> None:
        await asyncio.gather(be_busy(), return_exceptions=True)

    with pytest.raises(StageTimedOut), time_limit(SECOND / 4, KEY, ""):
        asyncio.run(work())


def test_a_limit_outside_the_main_thread_is_reported_as_not_enforced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def stage() -> None:
        with caplog.at_level(logging.WARNING), time_limit(1.0, KEY, ""):
            pass

    thread = threading.Thread(target=stage)
    thread.start()
    thread.join()
    assert f"{KEY}=1 is not enforced" in caplog.text


def test_an_alarm_swallowed_by_a_finalizer_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    class SlowToDelete:
        def __del__(self) -> None:
            time.sleep(0.5)  # Python drops what is raised here

    def work() -> None:
        SlowToDelete()
        time.sleep(FAR)

    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    monkeypatch.setattr("tasks.processes.time_limit.REPEAT_SECONDS", 0.2)
    started = time.monotonic()
    with pytest.raises(StageTimedOut), time_limit(SECOND / 10, KEY, ""):
        work()
    assert time.monotonic() - started < FAR / 2


def test_a_repeated_alarm_does_not_interrupt_cleanup() -> None:
    finished = False

    def work() -> None:
        nonlocal finished
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.01, 0.05)
            time.sleep(FAR)
        finally:
            with contextlib.suppress(ValueError):
                time.sleep(0.3)
                raise ValueError
            finished = True

    with pytest.raises(StageTimedOut), time_limit(FAR * SECOND, KEY, ""):
        work()
    assert finished
