"""Logs of other programs: recorded ones are read, and what is written reads back as it was.

tests/logs holds what lm-eval 0.4.13 and inspect_ai 0.3.285 wrote beside a server that adds one (gold answers of
item 5 are wrong), without inspect's events; AISBench's predictions are in the form of its 3.1.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval.compare import ComparisonError, compare
from eval.exported_logs import export_inspect, export_lm_eval
from eval.foreign_logs import import_log, read_log
from eval.results import Evaluation, ResultsError, load_evaluation, read_rows, read_settings, write_rows
from tests.evaluations import write_results

LOGS = Path(__file__).resolve().parents[1] / "logs"


def test_a_log_of_lm_eval(tmp_path: Path) -> None:
    summary = import_log(LOGS / "lm-eval", tmp_path)
    assert (summary.n, summary.accuracy) == (6, pytest.approx(5 / 6))  # exact_match in its own results
    settings = read_settings(tmp_path) or {}
    assert (settings["benchmark"], settings["model"], settings["imported_from"]) == ("sums", "m", "lm-eval")
    assert (settings["sampling"]["max_tokens"], settings["sampling"]["temperature"]) == (64, 0.0)
    row = read_rows(tmp_path)["5", 0]
    assert row.prompt == ({"role": "user", "content": "5 + 1 = ?"},)
    assert (row.response, row.gold, row.verdict) == ("Answer: \\boxed{6}", "7", "wrong")


def test_a_log_of_inspect_with_two_epochs(tmp_path: Path) -> None:
    summary = import_log(LOGS / "inspect.json", tmp_path)
    assert (summary.num_items, summary.num_samples, summary.accuracy) == (3, 2, pytest.approx(2 / 3))
    row = read_rows(tmp_path)["row-4", 1]
    assert (row.gold, row.level, row.finish_reason, row.response_tokens) == ("5", "1", "stop", 5)
    assert row.seconds > 0


def test_predictions_of_aisbench_are_graded_by_both_rules(tmp_path: Path) -> None:
    summary = import_log(LOGS / "aisbench", tmp_path)
    assert (summary.settings["model"], summary.settings["benchmark"]) == ("vllm-api", "math_prm800k_500")
    rows = list(read_rows(tmp_path).values())
    assert [row.id for row in rows] == ["0", "1", "2"]
    # 0.5 is \frac12 by value, and not by AISBench's strings; thinking is kept apart.
    assert [(row.verdict, row.aisbench_right) for row in rows] == [
        ("right", True),
        ("right", False),
        ("wrong", False),
    ]
    assert (rows[2].reasoning, rows[1].prompt) == (
        "<think>four</think>",
        ({"role": "user", "content": "1/2 = ?"},),
    )


def evaluation(folder: Path) -> Evaluation:
    """Right, wrong, none, cut and failed; the first row thinks."""
    write_results(folder, "rwntf", settings={"benchmark": "sums"})
    rows = list(read_rows(folder).values())
    write_rows(folder, [replace(rows[0], reasoning="hm", ended_at=1.5e9), *rows[1:]])
    return load_evaluation(folder)


def fields_of(folder: Path, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(getattr(row, name) for name in names) for row in read_rows(folder).values()]


def test_an_inspect_log_reads_back(tmp_path: Path) -> None:
    [log] = export_inspect(evaluation(tmp_path / "own"), tmp_path / "log.json")
    import_log(log, tmp_path / "back")
    names = ("id", "prompt", "response", "gold", "verdict", "level", "response_tokens", "reasoning", "failure")
    assert fields_of(tmp_path / "back", *names) == fields_of(tmp_path / "own", *names)
    scores = [sample.get("scores") for sample in json.loads(log.read_text())["samples"]]
    assert [one and one["exact"]["value"] for one in scores] == ["C", "I", "N", "I", None]


def test_a_log_of_lm_eval_reads_back(tmp_path: Path) -> None:
    samples, results = export_lm_eval(evaluation(tmp_path / "own"), tmp_path / "logs")
    assert samples.name == "samples_sums_2017-07-14T02-40-00.jsonl"
    assert json.loads(results.read_text())["results"]["sums"]["exact_match,none"] == 0.2
    import_log(tmp_path / "logs", tmp_path / "back")
    answered = fields_of(tmp_path / "own", "id", "prompt", "response", "gold")[:4]
    assert fields_of(tmp_path / "back", "id", "prompt", "response", "gold")[:4] == answered
    assert fields_of(tmp_path / "back", "response")[4] == ("",)
    with pytest.raises(ComparisonError, match="imported_from"):
        compare(tmp_path / "own", tmp_path / "back")


@pytest.mark.parametrize(
    ("text", "reason"),
    [("", "is no log"), ("{}", "is no log"), ('{"resps": 1}\n', "is no log"), ('{"id": 1, "pred', "is no log")],
)
def test_what_is_no_log_is_refused_with_what_can_be_named(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "samples_x_1.jsonl").write_text(text)
    with pytest.raises(ResultsError, match=f"{reason}.*AISBench's predictions folder"):
        read_log(tmp_path)


def test_an_unclear_folder_and_a_used_output_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="has no log"):
        read_log(tmp_path)
    for name in ("a", "b"):
        (tmp_path / f"samples_{name}_1.jsonl").write_text("{}")
    with pytest.raises(ResultsError, match="has 2 logs: name one of"):
        read_log(tmp_path)
    write_results(tmp_path / "used", "r")
    with pytest.raises(ResultsError, match="choose another --output"):
        import_log(LOGS / "lm-eval", tmp_path / "used")
