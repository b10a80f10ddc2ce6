"""The Prefect UI gets few lines a minute; the terminal and the log file get all."""

import json
import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from prefect.logging.handlers import APILogHandler, set_api_log_sink

from flows.config import load_config
from flows.console import QUIET_LOGGERS
from tasks.artifacts.stage_key import StageKey
from tasks.artifacts.store import ArtifactStore
from tasks.execution import command
from tasks.execution.command import PageLines, run_dapo
from tasks.execution.page import CommandProgress
from tasks.execution.progress import Progress
from tasks.runs.run import Run, current_stage
from tests.processes import python

ROOT = Path(__file__).resolve().parents[2]
KEY = StageKey(stage="talk", config={}, inputs={}, code_digest="c", versions={})


@pytest.fixture(autouse=True)
def _no_filters(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier run in this process left its filter on every handler, including pytest's."""
    monkeypatch.setattr(caplog.handler, "filters", [])


@contextmanager
def prefect_page() -> Iterator[list[dict[str, Any]]]:
    """The lines that Prefect's handler sends inside the block."""
    sent: list[dict[str, Any]] = []
    handler, run_id = APILogHandler(), uuid.uuid4()

    def with_run(record: logging.LogRecord) -> bool:
        record.flow_run_id = run_id
        return True

    handler.addFilter(with_run)
    set_api_log_sink(sent.append)
    ours = logging.getLogger("tasks")
    # a flow that was imported has left one already
    before, ours.handlers = (ours.handlers, [handler])
    try:
        yield sent
    finally:
        ours.handlers = before
        set_api_log_sink(None)


def talk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, **options: Any) -> Run:
    """Run code as the command of a stage limited to three lines per minute."""
    config = load_config(ROOT / "configs" / "arith_cpu.yaml", ["flow.log_lines_per_minute=3"])
    run = Run(config, ArtifactStore(tmp_path / "store"), tmp_path / "run", "dapo-full")
    run.folder.mkdir(exist_ok=True)
    monkeypatch.setattr(command, "dapo_command", lambda *words: python(code))
    token = current_stage.set("talk_before")
    try:
        run_dapo([], run, KEY, **options)
    finally:
        current_stage.reset(token)
    return run


def test_lines_over_the_limit_are_omitted_only_from_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="tasks")
    code = (
        "for i in range(9): print('line', i)\nprint('WARNING: hot')\nprint('step:1 - "
        "a:2')\nprint('ValueError: x')"
    )
    with prefect_page() as page:
        run = talk(tmp_path, monkeypatch, code)
        talk(tmp_path, monkeypatch, code)  # links once
    link = run.folder / "talk_before.log"
    assert link.resolve() == run.store.log_path(KEY.stage, KEY.key).resolve()
    every = [f"line {i}" for i in range(9)] + ["WARNING: hot", "step:1 - a:2", "ValueError: x"]
    assert link.read_text().splitlines() == 2 * every
    note = (
        f"... 6 lines omitted in this minute; all are in {run.store.log_path(KEY.stage, KEY.key)}"
    )
    shown = ["line 0", "line 1", "line 2", "WARNING: hot", "ValueError: x", note]
    assert [
        log["message"] for log in page if log["name"].startswith("tasks.execution.command")
    ] == 2 * shown
    on_terminal = [
        record.getMessage() for record in caplog.records if record.name == "tasks.execution.command"
    ]
    assert on_terminal == 2 * [line for line in every if not line.startswith("step:")]
    assert {record.name for record in caplog.records if record.getMessage() == note} <= set(
        QUIET_LOGGERS
    )


def test_progress_is_logged_and_counts_as_lines_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="tasks")
    watched = tmp_path / "progress.jsonl"
    shown = [Progress("warm start step", step, 5, "loss 1.0") for step in range(1, 6)]
    rows = "".join(json.dumps(asdict(one)) + "\n" for one in shown)
    code = f"import pathlib; pathlib.Path({str(watched)!r}).write_text({rows!r})"
    config = load_config(ROOT / "configs" / "arith_cpu.yaml")
    progress = CommandProgress(Run(config, None, tmp_path, "dapo-full"), "fetch_model", watched)  # type: ignore[arg-type]
    with prefect_page() as page:
        talk(tmp_path, monkeypatch, code, watch=progress)
    lines = [f"warm start step {step}/5: loss 1.0" for step in range(1, 6)]
    ours = [record for record in caplog.records if record.name == "tasks.execution.progress"]
    assert [record.getMessage() for record in ours] == lines
    assert [log["message"] for log in page if log["name"] == ours[0].name] == lines[:3]


def test_each_minute_has_its_own_lines_and_warnings_their_own_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="tasks")
    now = [100.0]
    page = PageLines(2, Path("x.log"), clock=lambda: now[0])
    assert [page.admits("a") for _ in range(4)] == [True, True, False, False]
    assert [page.admits("WARNING: hot") for _ in range(3)] == [True, True, False]
    now[0] += 59.9
    assert not page.admits("b")
    now[0] += 0.2
    assert caplog.messages == []
    assert [page.admits("c") for _ in range(3)] == [True, True, False]
    page.close_minute()
    page.close_minute()
    assert caplog.messages == [
        f"... {n} lines omitted in this minute; all are in x.log" for n in (4, 1)
    ]
