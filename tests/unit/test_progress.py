"""Step lines of child processes become a bar; other progress is logged every 10 % or by time."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from eval.requests import run
from flows import progress
from flows.progress import STEP_LINE, StepBar, bytes_progress
from tests.evaluations import make_items, make_row


def record(message: str, level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord("tasks.execution.command", level, __file__, 1, message, (), None)


def test_step_lines_of_children_are_recognised() -> None:
    for line, parts in (
        ("training step 12/60: right 40.0%, 1.3 s", ("training", "12", "60", "right 40.0%, 1.3 s")),
        ("warm start step 60 of 600: loss 0.797", ("warm start", "60", "600", "loss 0.797")),
    ):
        match = STEP_LINE.fullmatch(line)
        assert match is not None
        assert match.group("what", "done", "total", "state") == parts


def test_step_lines_move_the_bar_and_other_lines_pass() -> None:
    bar = StepBar()
    assert not bar.filter(record("training step 1/3: right 10%"))
    assert bar.filter(record("Ray is up after 5 s"))
    assert bar.bar is not None
    assert not bar.filter(record("training step 2/3: right 20%"))
    assert bar.bar.tasks[0].completed == 2
    assert not bar.filter(record("training step 3/3: right 30%"))
    assert bar.bar is None  # complete; the next stage starts its own
    bar.filter(record("training step 1/3: right 10%"))
    assert bar.filter(record("ChildProcessFailed: train_policy ended", logging.ERROR))
    assert bar.bar is None


def test_without_a_terminal_bytes_are_logged_in_tenths_or_by_time(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.INFO, "flows.progress"), bytes_progress("export") as on_progress:
        for done in range(1, 1001):
            on_progress(done * 1_000_000, 1_000_000_000)
    assert caplog.messages == [f"export: {each}00.0 MB of 1.0 GB" for each in range(1, 10)] + [
        "export: 1.0 GB of 1.0 GB"
    ]
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    with caplog.at_level(logging.INFO, "flows.progress"), bytes_progress("merge") as on_progress:
        on_progress(1, 1000)
    assert caplog.messages[-1] == "merge: 1 byte of 1.0 kB"


def test_an_evaluation_is_logged_in_tenths_or_by_time(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter(
        [0.0, 59.0, 61.0, 70.0, 80.0, 139.0, 141.0]
    )  # the start, then each finished request
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    row = make_row(make_items(1)[0], "r")
    with caplog.at_level(logging.INFO, "eval.requests.run"), run._Progress(40, None) as shown:
        for _ in range(6):
            shown.advance([row], 0)
    assert [line.split(" items")[0] for line in caplog.messages] == [
        "2 of 40",
        "4 of 40",
        "6 of 40",
    ]
