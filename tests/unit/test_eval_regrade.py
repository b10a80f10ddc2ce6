"""Regrading a results folder: new verdicts, the same responses, no requests."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eval.answers.grading import AISBench, MathGrader
from eval.endpoint import Endpoint, Sampling
from eval.logs.regrade import describe, regrade
from eval.problems.items import Item
from eval.requests.recorder import regrade_row
from eval.results.rows import (
    ResultsError,
    Row,
    make_folder,
    make_settings,
    read_rows,
    write_rows,
)
from flows.cli import app

ROW = Row(
    id="a",
    sample=0,
    prompt=({"role": "user", "content": "1/2?"},),
    response=r"\boxed{0.5}",
    finish_reason="stop",
    response_tokens=4,
    answer="0.5",
    gold=r"\frac12",
    verdict="wrong",
    attempts=1,
    seconds=0.1,
    subject=None,
    level=None,
    failure=None,
    aisbench=AISBench("0.5", True, False),
)

NOT_EQUAL = AISBench("0.5", False, False)


def write_results(directory: Path, rows: list[Row]) -> Path:
    directory.mkdir()
    rows = [replace(row, prompt=({"role": "user", "content": f"{row.id}: 1/2?"},)) for row in rows]
    items = [Item(row.id, ({"role": "user", "content": row.problem},), row.gold) for row in rows]
    settings = make_settings(items, Endpoint("http://localhost", "m"), Sampling(max_tokens=8), None)
    (directory / "settings.json").write_text(json.dumps({**settings, "grader": "old/1"}))
    write_rows(directory, rows)
    return directory


def test_aisbench_ignores_the_thinking_of_a_chat_but_not_of_a_completion() -> None:
    row = replace(ROW, response=r"<think>so \boxed{1}</think>The answer is 2", gold="2")
    chat, completion = (
        regrade_row(replace(row, prompt=prompt), MathGrader()) for prompt in (ROW.prompt, "1/2?")
    )
    assert chat.aisbench == AISBench("2", True, False)
    assert completion.aisbench == AISBench("1", False, False)
    assert chat.verdict == completion.verdict == "right"


def test_regrade_rewrites_verdicts_and_lists_what_changed(tmp_path: Path) -> None:
    rows = [
        ROW,  # stored verdicts contradict the rules: exact wrong -> right, aisbench right -> wrong
        replace(ROW, id="b", finish_reason="length", verdict="right", aisbench=NOT_EQUAL),
        replace(ROW, id="c", response=None, verdict="request_failed", aisbench=None),
        replace(ROW, id="d", gold="0.5", verdict="right"),
    ]
    directory = write_results(tmp_path / "before", rows)
    regraded = regrade(directory / "results.jsonl")
    assert regraded.verdicts == {("wrong", "right"): 1, ("right", "truncated"): 1}
    assert regraded.aisbench == {("right", "wrong"): 1}
    after = read_rows(directory)
    verdicts = ["right", "truncated", "request_failed", "right"]
    assert [row.verdict for row in after.values()] == verdicts
    assert [row.response for row in after.values()] == [row.response for row in rows]
    assert json.loads((directory / "settings.json").read_text())["grader"] == MathGrader.rule
    summary = json.loads((directory / "summary.json").read_text())
    assert (summary["accuracy"], summary["n"]) == (2 / 3, 3)  # a and d, of three answered rows
    assert "old/1" in describe(regraded)
    assert "exact: 1 right -> truncated, 1 wrong -> right" in describe(regraded)
    again = CliRunner().invoke(app, ["grade", str(directory)])
    assert again.exit_code == 0
    assert again.output.count("no verdict changed") == 2  # under either rule
    assert "accuracy 66.7% of 3" in again.output
    (directory / "manifest.json").write_text("{}")
    refused = CliRunner().invoke(app, ["grade", str(directory / "results.jsonl")])
    assert "is an artifact in the store" in str(refused.exception)


@pytest.mark.slow
def test_a_file_instead_of_a_folder_is_refused(tmp_path: Path) -> None:
    directory, file = write_results(tmp_path / "before", [ROW]), tmp_path / "text"
    file.write_text("a text")
    with pytest.raises(ResultsError, match="text is not a folder: it is not a results folder"):
        regrade(file)
    for words in (["compare"], ["compare", "--history"]):
        words += [str(directory), str(directory), "--output", str(file)]
        refused = CliRunner().invoke(app, words)
        assert isinstance(refused.exception, ResultsError)
    with pytest.raises(ResultsError, match="cannot be created"):
        make_folder(file / "below")


def test_folders_without_a_finished_evaluation_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match=r"has no readable settings\.json"):
        regrade(tmp_path)
    (tmp_path / "settings.json").write_text('{"num_items": 3}')  # from another program
    with pytest.raises(ResultsError, match="not a results folder"):
        regrade(tmp_path)
    directory = write_results(tmp_path / "short", [ROW, replace(ROW, id="b")])
    write_rows(directory, [ROW])
    before = (directory / "results.jsonl").read_bytes()
    with pytest.raises(ResultsError, match="holds 1 of 2 responses"):
        regrade(directory)
    assert (directory / "results.jsonl").read_bytes() == before
