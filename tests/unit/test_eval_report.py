"""Comparison and report: numbers by hand, refusals, escaping."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from eval.benchmark import Item
from eval.client import Endpoint, Sampling
from eval.compare import compare
from eval.errors import ComparisonError, ResultsError
from eval.grading import grade
from eval.plots import accuracy_plot
from eval.report import format_duration, write_report
from eval.results import Row, make_settings, write_rows
from eval.training import read_training_metrics, training_totals

SAMPLING = Sampling(max_tokens=64)
ITEMS = [
    Item(str(i), ({"role": "user", "content": f"{i} + 1 | <b>?"},), str(i + 1), "add", str(1 + i // 4))
    for i in range(8)
]
# One letter per item: r right, w wrong, n no answer, t truncated, f failed request.
#         id: 0123 4567
BEFORE = "rrwn wtfr"
AFTER = "rwrr wrrr"


def write_results(
    directory: Path, outcomes: str, items: list[Item] = ITEMS, sampling: Sampling = SAMPLING, model: str = "m"
) -> Path:
    directory.mkdir()
    settings = make_settings(items, Endpoint("http://localhost", model), sampling, None)
    (directory / "settings.json").write_text(json.dumps(settings))
    write_rows(
        directory, [make_row(item, letter) for item, letter in zip(items, outcomes.replace(" ", ""), strict=True)]
    )
    return directory


def make_row(item: Item, letter: str) -> Row:
    response, finish_reason = {
        "r": (f"<script>alert('x')</script>\nAnswer: {item.gold}", "stop"),
        "w": ("Answer: -1", "stop"),
        "n": ("no idea", "stop"),
        "t": (f"Answer: {item.gold} or", "length"),
        "f": (None, None),
    }[letter]
    graded = grade(response, finish_reason, item.gold)
    return Row(
        id=item.id,
        prompt=item.messages,
        response=response,
        finish_reason=finish_reason,
        response_tokens=None if response is None else 10,
        answer=graded.answer,
        gold=item.gold,
        verdict=graded.verdict,
        attempts=1,
        seconds=0.5,
        subject=item.subject,
        level=item.level,
        failure="HTTP 500: boom" if response is None else None,
    )


def write_metrics(path: Path) -> Path:
    steps: list[dict[str, Any]] = [
        {"step": step, "critic/score/mean": -0.5 + step / 10, "timing_s/gen": 1.0, "timing_s/step": 2.5,
         "perf/trained_response_tokens": 100 * step, "perf/generated_tokens": 250}
        for step in (1, 2, 3)
    ]  # fmt: skip
    lines = [json.dumps(step) for step in (steps[0], {**steps[1], "perf/generated_tokens": 9}, *steps[1:])]
    path.write_text("\n".join(lines) + '\n{"step": 4, "critic')
    return path


@pytest.fixture
def report(tmp_path: Path) -> dict[str, Any]:
    return write_report(
        write_results(tmp_path / "before", BEFORE),
        write_results(tmp_path / "after", AFTER),
        write_metrics(tmp_path / "metrics.jsonl"),
        tmp_path / "report",
        stages={"train": {"cached": False, "seconds": 125.0}, "merge": {"cached": True, "seconds": 0.02}},
        artifacts={"merged model": tmp_path / "merged"},
        title="A <test>",
    )


def test_report_numbers_by_hand(report: dict[str, Any], tmp_path: Path) -> None:
    # Item 6 failed before and is left out: 7 pairs, ids 0-5 and 7.
    # before right: 0, 1, 7 = 3/7; after right: 0, 2, 3, 5, 7 = 5/7. Lost: 1. Gained: 2, 3, 5.
    assert (report["n"], report["num_unpaired"]) == (7, 1)
    assert report["before"]["accuracy"] == 3 / 7
    assert report["after"]["accuracy"] == 5 / 7
    assert report["difference"] == 2 / 7
    assert report["mcnemar"] == {"b": 1, "c": 3, "p": 0.625}  # 2 * (1 + 4) / 2^4
    assert [flip["id"] for flip in report["flips"]["lost"]] == ["1"]
    assert [flip["id"] for flip in report["flips"]["gained"]] == ["2", "3", "5"]
    assert report["gained_by_format"] == 2  # 3 had no answer, 5 was truncated
    assert (report["before"]["no_answer_rate"], report["before"]["truncated_rate"]) == (1 / 7, 1 / 7)
    assert (report["before"]["request_failed_rate"], report["after"]["request_failed_rate"]) == (1 / 8, 0.0)
    levels = {key: (x["right"], x["n"], x["accuracy"]) for key, x in report["before"]["by_level"].items()}
    assert levels == {"1": (2, 4, 0.5), "2": (1, 3, 1 / 3)}
    assert report["transitions"]["wrong"] == {"right": 1, "wrong": 1, "no_answer": 0, "truncated": 0}
    assert report["ci95"][0] < 2 / 7 < report["ci95"][1]
    # 100 + 200 + 300 trained; step 2 was trained twice, its last line counts: 3 * 250 generated.
    assert report["train"] == {"steps": 3, "tokens_trained": 600, "tokens_generated": 750, "seconds": 7.5}
    assert report["stages"]["merge"] == {"cached": True, "seconds": 0.02}
    assert report["artifacts"] == {"merged model": str(tmp_path / "merged")}
    assert json.loads((tmp_path / "report" / "report.json").read_text()) == json.loads(json.dumps(report))


def test_flips_hold_problem_gold_and_both_texts(report: dict[str, Any]) -> None:
    flip = report["flips"]["gained"][1]
    assert (flip["problem"], flip["gold"], flip["level"], flip["subject"]) == ("3 + 1 | <b>?", "4", "1", "add")
    assert flip["before"] == {"verdict": "no_answer", "answer": None, "response": "no idea"}
    assert flip["after"]["answer"] == "4"


def test_verdict_says_not_significant(report: dict[str, Any]) -> None:
    assert report["is_significant"] is False
    assert report["verdict"].startswith(
        "Not significant: accuracy went from 42.9 % to 71.4 % on 7 paired items: +28.6 points, 95 % interval ["
    )
    assert "exact McNemar p = 0.62 (3 gained, 1 lost)" in report["verdict"]


@pytest.mark.parametrize(("first", "second", "word"), [("w", "r", "rose"), ("r", "w", "fell")])
def test_verdict_of_a_significant_change(tmp_path: Path, first: str, second: str, word: str) -> None:
    result = compare(write_results(tmp_path / "b", first * 8), write_results(tmp_path / "a", second * 8))
    assert result.p == 2 / 2**8
    assert result.verdict().startswith(f"Accuracy {word} from ")
    assert "p = 0.0078" in result.verdict()


def test_html_is_one_file_that_escapes_what_models_wrote(report: dict[str, Any], tmp_path: Path) -> None:
    page = (tmp_path / "report" / "report.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;" in page
    assert "3 + 1 | &lt;b&gt;?" in page
    assert "<title>A &lt;test&gt;</title>" in page
    assert "42.9 %" in page
    assert "71.4 %" in page
    assert page.count("<svg") == 3  # accuracy, score, seconds per step: the only curves with values
    assert not re.search(r"""(?:src|href)=["'](?:https?:|//)""", page)


def test_plots_are_well_formed_whatever_a_level_is_called(tmp_path: Path) -> None:
    items = [replace(item, level="$x^ <&>") for item in ITEMS]
    result = compare(write_results(tmp_path / "b", "w" * 8, items), write_results(tmp_path / "a", "r" * 8, items))
    drawing = ElementTree.fromstring(accuracy_plot(result.before, result.after))
    assert any("level $x^ <&>" in (text or "") for text in drawing.itertext())


def test_markdown_tables_survive_pipes_and_have_equal_widths(tmp_path: Path) -> None:
    items = [replace(item, gold="1|2") for item in ITEMS]
    before, after = write_results(tmp_path / "b", "w" * 8, items), write_results(tmp_path / "a", "r" * 8, items)
    write_report(before, after, None, tmp_path / "report", stages={}, artifacts={})
    lines = (tmp_path / "report" / "report.md").read_text().splitlines()
    start = lines.index("## Gained (8)") + 2
    table = lines[start : start + 10]
    assert {len(line) for line in table} == {len(table[0])}
    assert len(re.findall(r"(?<!\\)\|", table[2])) == 6
    assert "## Training" not in lines


def test_different_settings_are_refused_by_name(tmp_path: Path) -> None:
    before = write_results(tmp_path / "before", BEFORE)
    after = write_results(tmp_path / "after", AFTER, sampling=Sampling(max_tokens=32, temperature=0.6))
    message = r"sampling.max_tokens: 64 before, 32 after; sampling.temperature: 0.0 before, 0.6 after"
    with pytest.raises(ComparisonError, match=message):
        compare(before, after)


def test_different_items_prompts_and_golds_are_refused_with_counts(tmp_path: Path) -> None:
    before = write_results(tmp_path / "before", BEFORE)
    items = [replace(ITEMS[0], id="other"), replace(ITEMS[1], gold="9"), *ITEMS[2:]]
    items[2] = replace(items[2], messages=({"role": "user", "content": "changed"},))
    after = write_results(tmp_path / "after", AFTER, items)
    with pytest.raises(ComparisonError) as caught:
        compare(before, after)
    message = str(caught.value)
    assert "1 of 8 items are only in before (first: '0')" in message
    assert "1 of 8 items are only in after (first: 'other')" in message
    assert "prompts: 1 of 7 shared items differ (first: '2')" in message
    assert "golds: 1 of 7 shared items differ (first: '1')" in message


def test_the_model_may_differ(tmp_path: Path) -> None:
    before = write_results(tmp_path / "before", BEFORE, model="base")
    after = write_results(tmp_path / "after", AFTER, model="trained")
    result = compare(before, after)
    assert (result.before.model, result.after.model) == ("base", "trained")


def test_an_unfinished_evaluation_is_refused(tmp_path: Path) -> None:
    before = write_results(tmp_path / "before", BEFORE)
    after = write_results(tmp_path / "after", AFTER)
    lines = (after / "results.jsonl").read_text().splitlines(keepends=True)
    (after / "results.jsonl").write_text("".join(lines[:-1]) + lines[-1][:30])
    with pytest.raises(ResultsError, match=r"after holds 7 of 8 items: the evaluation did not finish"):
        compare(before, after)


def test_metrics_without_steps_are_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("\n")
    with pytest.raises(ResultsError, match="holds no training step"):
        read_training_metrics(tmp_path / "metrics.jsonl")
    with pytest.raises(ResultsError, match="does not exist"):
        read_training_metrics(tmp_path / "none.jsonl")


def test_totals_are_unknown_rather_than_zero_without_their_keys() -> None:
    totals = training_totals([{"step": 1, "timing_s/step": float("nan")}])
    assert totals == {"steps": 1, "tokens_trained": None, "tokens_generated": None, "seconds": None}


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (59.6, "1 min 00 s"), (125, "2 min 05 s"), (7800, "2 h 10 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
