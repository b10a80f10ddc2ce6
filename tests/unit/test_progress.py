"""Step lines of child processes become a bar; everything else stays a line."""

from __future__ import annotations

import logging

import pytest

from flows.progress import STEP_LINE, StepBar


def record(message: str, level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord("tasks.processes.dapo_command", level, __file__, 1, message, (), None)


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("training step 12/60: right 40.0%, 1.3 s", ("training", "12", "60", "right 40.0%, 1.3 s")),
        ("warm start step 60 of 600: loss 0.797", ("warm start", "60", "600", "loss 0.797")),
    ],
)
def test_what_the_children_write_is_recognised(line: str, parts: tuple[str, ...]) -> None:
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
    assert bar.bar is None  # complete, so that the next stage begins its own


def test_a_failure_closes_the_bar() -> None:
    bar = StepBar()
    bar.filter(record("training step 1/3: right 10%"))
    assert bar.filter(record("ChildProcessFailed: train_policy ended", logging.ERROR))
    assert bar.bar is None
