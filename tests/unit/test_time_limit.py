"""A stage that takes too long is left with everything it started, and says which key to change."""

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

from dapo_core.errors import StageTimedOut
from tasks import training_lock
from tasks.processes import time_limit as time_limit_module
from tasks.processes.child import run_command
from tasks.processes.time_limit import time_limit

SECOND = 1 / 3600
KEY = "flow.time_limits.train_policy_hours"


def test_a_child_is_asked_to_end_and_does(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('kept a checkpoint')))\n"
        "print(os.getpid()); time.sleep(60)"
    )
    lines: list[str] = []
    started = time.monotonic()
    with (
        pytest.raises(
            StageTimedOut, match=r"^flow\.time_limits\.train_policy_hours=0\.0005\d*: ended after 2 s; .*go on"
        ),
        time_limit(2 * SECOND, KEY, "go on"),
    ):
        run_command([sys.executable, "-c", code], log_path=tmp_path / "log", label="train", on_line=lines.append)
    assert 2.0 <= time.monotonic() - started < 15.0
    assert not psutil.pid_exists(int(lines[0]))
    assert "kept a checkpoint" in (tmp_path / "log").read_text()


def test_what_was_in_time_is_not_interrupted_later() -> None:
    handler, timer = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    with time_limit(SECOND / 2, KEY, ""):
        assert signal.getitimer(signal.ITIMER_REAL)[0] <= 0.5
    assert signal.getitimer(signal.ITIMER_REAL) == pytest.approx(timer, abs=1.0)  # of pytest-timeout, if it is on
    assert signal.getsignal(signal.SIGALRM) is handler


def test_waiting_for_a_lock_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    with contextlib.ExitStack() as other:
        other.enter_context(training_lock.hold(path, "other"))
        timer = threading.Timer(1.0, other.pop_all().close)
        timer.start()
        with time_limit(SECOND / 2, KEY, ""), training_lock.hold(path, "ours"):
            assert 0.1 < signal.getitimer(signal.ITIMER_REAL)[0] <= 0.5
        timer.join()


def test_a_coroutine_that_never_waits_cannot_swallow_it() -> None:
    async def be_busy() -> None:
        while True:
            time.sleep(0.01)

    async def work() -> None:
        await asyncio.gather(be_busy(), return_exceptions=True)

    with pytest.raises(StageTimedOut), time_limit(SECOND / 4, KEY, ""):
        asyncio.run(work())


def test_without_a_limit_nothing_is_armed() -> None:
    timer = signal.getitimer(signal.ITIMER_REAL)
    with time_limit(None, KEY, ""):
        assert signal.getitimer(signal.ITIMER_REAL) == pytest.approx(timer, abs=1.0)


def test_beside_the_main_thread_the_limit_is_said_not_to_be_kept(caplog: pytest.LogCaptureFixture) -> None:
    def stage() -> None:
        with caplog.at_level(logging.WARNING), time_limit(1.0, KEY, ""):
            pass

    thread = threading.Thread(target=stage)
    thread.start()
    thread.join()
    assert f"{KEY}=1 is not kept" in caplog.text


def test_it_comes_again_where_it_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class Careless:
        def __del__(self) -> None:
            time.sleep(0.5)  # what is raised in a finalizer, Python drops

    def work() -> None:
        Careless()
        time.sleep(30)

    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    monkeypatch.setattr(time_limit_module, "AGAIN_SECONDS", 0.2)
    started = time.monotonic()
    with pytest.raises(StageTimedOut), time_limit(SECOND / 10, KEY, ""):
        work()
    assert time.monotonic() - started < 15.0


def test_it_does_not_come_again_into_the_clearing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []

    def work() -> None:
        try:
            time.sleep(30)
        finally:
            steps.append("begun")
            with contextlib.suppress(ValueError):
                time.sleep(0.3)
                raise ValueError
            try:
                raise ValueError
            except ValueError:
                time.sleep(0.3)
            steps.append("done")

    monkeypatch.setattr(time_limit_module, "AGAIN_SECONDS", 0.05)
    with pytest.raises(StageTimedOut), time_limit(SECOND / 10, KEY, ""):
        work()
    assert steps == ["begun", "done"]
