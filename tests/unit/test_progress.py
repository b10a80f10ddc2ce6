"""Progress becomes a bar on a terminal; other progress is logged every 10 % or by time."""

import logging
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import heartbeat
from dapo_core.machine.timers import PhaseTimer
from downloads import Progress as Download
from durable import JsonLinesFollower, append_json_line, read_json_lines, write_atomically
from eval.endpoint import Endpoint
from eval.requests import run
from eval.requests.dispatch import Dispatcher, Limits
from flows import progress
from flows.console import StandardOutput
from flows.progress import StepBar, bytes_progress, download_progress, reporter
from tasks.execution.progress import Progress, StepProgress, following
from tests.evaluations import make_items, make_row
from tests.processes import wait_until
from tests.sources import Clock


def record(message: str, level: int = logging.INFO, shown: Progress | None = None) -> Any:
    entry = logging.LogRecord("tasks.execution", level, __file__, 1, message, (), None)
    entry.progress = shown
    return entry


def at(step: int) -> Any:
    return record("", shown=Progress("training step", step, 3, f"right {step}0%"))


def test_progress_moves_the_bar_and_other_lines_pass() -> None:
    bar = StepBar()
    assert not bar.filter(at(1))
    assert bar.filter(record("training step 2/3: only text"))
    assert bar.bar is not None
    assert not bar.filter(at(2))
    assert (bar.bar.tasks[0].completed, bar.bar.tasks[0].fields["state"]) == (2, "right 20%")
    assert not bar.filter(at(3))
    assert bar.bar is None  # complete; the next stage starts its own
    bar.filter(at(1))
    assert bar.filter(record("ChildProcessFailed: train_policy ended", logging.ERROR))
    assert bar.bar is None


def test_a_step_is_told_by_its_accuracy_and_the_time_left() -> None:
    steps = StepProgress(60)
    assert str(steps.after(0, {"validation/accuracy": 0.25})) == (
        "training step 0/60: accuracy 25.0% on held-out problems before training"
    )
    ours = {"sampler/accuracy": 0.4, "critic/score/mean": None, "sampler/kept_groups": 7.0}
    assert str(steps.after(11, {**ours, "wall_time": 100.0})) == (
        "training step 11/60: right 40.0%, kept 7 groups"
    )
    later = {"timing_s/step": 1.26, "wall_time": 102.0}
    assert str(steps.after(12, later)) == "training step 12/60: 1.3 s, about 96 s left"
    assert "left" not in str(steps.after(3, ours)), "resumed: the pace is measured anew"


def test_a_follower_reads_each_line_once_and_a_file_that_begins_anew_from_its_start(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log.jsonl"
    follower = JsonLinesFollower(log)
    assert follower.read() == []
    append_json_line(log, {"step": 1})
    with log.open("a") as file:
        file.write('{"step": 2')
    assert follower.read() == [{"step": 1}]
    with log.open("a") as file:
        file.write("}\n")
    assert follower.read() == [{"step": 2}]
    with log.open("a") as file:
        file.write('{"torn')
    append_json_line(log, {"step": 3})
    assert follower.read() == [{"step": 3}]
    write_atomically(log, '{"step": 1}\n')  # truncated on resume
    assert follower.read() == [{"step": 1}]
    append_json_line(log, {"step": 2})
    log.rename(tmp_path / "finished")
    assert follower.read() == [{"step": 2}]


def test_lines_written_until_the_end_of_the_block_are_seen(tmp_path: Path) -> None:
    seen: list[Any] = []
    with following(tmp_path / "log.jsonl", seen.extend):
        for step in range(3):
            append_json_line(tmp_path / "log.jsonl", {"step": step})
    assert [row["step"] for row in seen] == [0, 1, 2]


def test_a_download_is_reported_to_the_caller_in_percent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(progress.time, "monotonic", clock)
    on_progress = download_progress(reporter(tmp_path / "progress.jsonl"))
    for done, num_done in ((0, 0), (100, 1), (250, 1), (1000, 2)):
        on_progress(Download(num_done=num_done, num_files=2, bytes_done=done, total_bytes=1000))
        clock.now += 1.5
    rows = [Progress(**row) for row in read_json_lines(tmp_path / "progress.jsonl")]
    assert [(row.done, row.total) for row in rows] == [(0, 100), (25, 100), (100, 100)]
    assert rows[1].state == "1 of 2 files, 250 bytes of 1.0 kB, 83 bytes/s, about 9 s left"


def test_without_a_terminal_long_work_is_logged_by_time_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "heartbeat")
    with bytes_progress("export") as on_progress:
        for done in range(1, 1001):
            on_progress(done * 1_000_000, 1_000_000_000)
    assert caplog.messages == []  # it took less than 10 s
    monkeypatch.setattr(heartbeat, "SECONDS", 0.01)
    with bytes_progress("merge") as on_progress:
        wait_until(lambda: "merge: preparing (0 s so far)" in caplog.messages, "a line")
        on_progress(1, 1000)
        wait_until(lambda: "merge: 1 byte of 1.0 kB (0 s so far)" in caplog.messages, "a line")
    with heartbeat.heartbeat(lambda: "a line of a server " * 300):
        wait_until(lambda: caplog.messages[-1].startswith("a line of"), "a line")
    assert len(caplog.messages[-1]) < 250
    with heartbeat.heartbeat(lambda: "serve: loading vLLM (7 s so far)"):  # a heartbeat's own line
        wait_until(lambda: "serve: loading vLLM (0 s so far)" in caplog.messages, "a line")
    timer = PhaseTimer("training step 3")
    with timer.phase("weight_sync"):
        wait_until(lambda: "training step 3: weight_sync (0 s so far)" in caplog.messages, "a line")
    caplog.clear()
    with timer.phase("gen"):  # has its own lines
        time.sleep(0.05)
    assert caplog.messages == []


@pytest.mark.parametrize(("has_lines", "num_beats"), [(False, range(6, 9)), (True, range(1))])
def test_short_operations_in_a_row_are_not_silent_and_other_lines_count(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    has_lines: bool,
    num_beats: range,
) -> None:
    """A minute of operations of 3 s, each shorter than the silence that is allowed."""
    clock, operations = Clock(), [(lambda: "", 0.0)]

    class Minute(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            clock.now += timeout or 0.0
            number, seconds = divmod(clock.now, 3.0)
            operations[:] = [(lambda: f"operation {number:.0f}", 3.0 * number)]
            if has_lines and seconds < 0.5:
                StandardOutput().handle(logging.makeLogRecord({"msg": "step 1"}))
            return clock.now >= end

    caplog.set_level(logging.INFO)
    monkeypatch.setattr(heartbeat.time, "monotonic", clock)
    heartbeat.line_shown()
    end = clock.now + 60.0
    heartbeat._beat(operations, Minute())
    assert len(caplog.messages) in num_beats


def test_an_evaluation_says_how_far_it_is_while_no_answer_arrives(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "SECONDS", 0.01)
    row = make_row(make_items(1)[0], "r")
    dispatcher = Dispatcher(Endpoint("http://localhost", "m"), Limits())
    progress = run._Progress(40, dispatcher, None)
    progress.advance([row] * 4)
    with caplog.at_level(logging.INFO, "heartbeat"), progress.shown():
        wait_until(lambda: len(caplog.messages) > 1, "two lines")
    line = r"4 of 40 items done, \d+ tokens/s, about \d+ s left \(0 s so far\)"
    assert all(re.fullmatch(line, message) for message in caplog.messages)
    count = len(caplog.messages)
    time.sleep(0.05)
    assert len(caplog.messages) == count  # it ends with the block
