"""Evaluations over time: reading, pairing by hand, separate series."""

import json
import os
from pathlib import Path

import pytest

from eval.endpoint import Sampling
from eval.report.history import make_history, render_markdown, write_page
from eval.report.suite_report import Models
from eval.results.rows import ResultsError
from eval.results.suite import Member, write_suite
from tests.evaluations import make_items, write_report, write_results

ITEMS = make_items(8)


def write_night(folder: Path, day: int, outcomes: str, **settings: object) -> Path:
    directory = write_results(folder / f"night{day}", outcomes, ITEMS, f"model {day}", settings)
    os.utime(directory / "results.jsonl", (86400.0 * day, 86400.0 * day))
    return directory


def test_a_history_by_hand(tmp_path: Path) -> None:
    outcomes = {3: "rrrrrrrw", 1: "rrrrwwww", 2: "wrrrrrww"}
    (series,) = make_history(
        [write_night(tmp_path, day, letters) for day, letters in outcomes.items()]
    )
    assert [point.label for point in series.points] == ["night1", "night2", "night3"]  # by date
    assert [point.accuracy for point in series.points] == [4 / 8, 5 / 8, 7 / 8]
    assert series.to_previous[0] is None
    # night2 against night1: one lost, two gained, 2 * (1 + 3) / 2^3. night3 against night2: two
    # gained, 2 / 2^2.
    previous = [change for change in series.to_previous if change]
    assert [(x.difference, x.p) for x in previous] == [(1 / 8, 1.0), (2 / 8, 0.5)]
    # night3 against night1: three gained, 2 / 2^3; night2 against night1 is the comparison above.
    first = [change for change in series.to_first if change]
    assert [(x.difference, x.p) for x in first] == [(1 / 8, 1.0), (3 / 8, 0.25)]
    assert series.num_tests == 3  # counted once
    assert series.expected_false_alarms == pytest.approx(0.15)


def test_runs_with_other_settings_form_a_separate_series(tmp_path: Path) -> None:
    nights = [write_night(tmp_path, day, "rrrrwwww") for day in (1, 3)]
    other = write_night(
        tmp_path, 2, "rrrrrrrr", sampling={**vars(Sampling(max_tokens=64)), "temperature": 0.6}
    )
    history = make_history([*nights, other])
    first, second = history
    assert [len(series.points) for series in (first, second)] == [2, 1]
    assert first.differs == ()
    assert second.differs == ("sampling.temperature: 0.0 in the first table, 0.6 here",)
    text = " ".join(render_markdown(history).split())
    assert "not comparable with the first table: sampling.temperature: 0.0" in text
    page = write_page(history, tmp_path / "out").read_text()
    assert page.count("<svg") == 2
    assert "<script" not in page


def test_reports_folders_and_stores_read_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = write_night(tmp_path, 1, "wwwwwwww")
    after = write_night(tmp_path, 2, "rrrrwwwf")
    folder = tmp_path / "store" / "runs" / "20260101T000000.000Z-123456" / "report"
    write_report(Models(before, after), None, folder)
    for path in (folder / "report.json", folder, folder.parent, tmp_path / "store"):
        ((point,),) = [series.points for series in make_history([path])]
        assert point.label == "20260101T000000.000Z-123456"
        assert point.accuracy == 4 / 7  # of the answered items, after
    # still identifies the run
    assert "T000000.000Z-123456` |" in render_markdown(make_history([folder]))
    other = folder.parent.with_name("20250101T000000Z-1") / "report" / "report.json"
    other.parent.mkdir(parents=True)
    other.write_text("{}")  # of another version
    assert len(make_history([tmp_path / "store"])[0].points) == 1
    assert f"skipped in the history: {other}" in caplog.text
    (series,) = make_history([before, after, write_night(tmp_path, 3, "wwwwwwwr")])
    assert [change.n for change in series.to_first if change] == [7, 8]  # item 7 failed on day 2


def test_an_evaluation_reused_by_later_runs_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval.report.plots.history_plot", lambda *words, **options: "")
    nights = [
        write_night(tmp_path, day, letters) for day, letters in ((1, "rwwwwwww"), (2, "rrwwwwww"))
    ]
    runs = tmp_path / "store" / "runs"
    for run, after in (("1", nights[0]), ("2", nights[1]), ("3", nights[1]), ("4", nights[1])):
        report = write_report(Models(nights[0], after), None, runs / run / "report")
        report["created_at"] = f"2026-01-0{run}T00:00:00Z"
        (runs / run / "report" / "report.json").write_text(json.dumps(report))
    history = make_history([tmp_path / "store", runs / "4"])
    (series,) = history
    assert [(point.label, point.num_repeats) for point in series.points] == [("1", 0), ("2", 2)]
    assert series.num_tests == 1
    assert "2 later runs reused this evaluation from the store" in render_markdown(history)
    assert "reused from the store by 2 later runs" in write_page(history, tmp_path).read_text()


def write_suite_night(folder: Path, day: int, **outcomes: str) -> Path:
    """A night's suite: {benchmark: outcomes}."""
    night = folder / f"night{day}"
    for name, letters in outcomes.items():
        settings = {"benchmark": name}
        results = write_results(
            night / name, letters, make_items(len(letters)), f"model {day}", settings
        )
        os.utime(results / "results.jsonl", (86400.0 * day, 86400.0 * day))
    write_suite(night, [Member(name) for name in outcomes], next(iter(outcomes)))
    return night


def test_each_benchmark_of_a_suite_is_a_series(tmp_path: Path) -> None:
    levels = [2, 3, 2, 3, 2, 3, 14, 15, 14, 15, 14, 15]
    nights = [
        write_suite_night(tmp_path, day, words="r" * level + "w" * (16 - level), sums="rrww")
        for day, level in enumerate(levels, start=1)
    ]
    words, sums = make_history(nights)
    assert [series.benchmark for series in (words, sums)] == ["words", "sums"]
    assert words.newest.startswith(
        "night12 is not significantly different from the previous run (+6.2 points, 95 % interval "
    )
    assert "and better than the first run (+81.2 points" in words.newest
    assert [series.benchmark for series in make_history(nights, "sums")] == ["sums"]
    with pytest.raises(ResultsError, match=r"is of word \(did you mean words\?\)"):
        make_history(nights, "word")
    text = render_markdown([words, sums])
    assert "## words" in text
    page = write_page([words, sums], tmp_path / "out").read_text()
    assert page.count("<svg") == 2


def test_a_suite_report_provides_all_its_benchmarks(tmp_path: Path) -> None:
    sides = [
        write_suite_night(tmp_path, 1, words="rwww", sums="rrww"),
        write_suite_night(tmp_path, 2, words="rrrw", sums="rrwr"),
    ]
    folder = tmp_path / "store" / "runs" / "1" / "report"
    write_report(Models(*sides), None, folder)
    history = make_history([tmp_path / "store"])
    accuracies = {series.benchmark: series.points[0].accuracy for series in history}
    assert accuracies == {"words": 0.75, "sums": 0.75}
    assert history[0].newest == ""
    (folder / "sums" / "report.json").unlink()
    with pytest.raises(ResultsError, match=r"not a report that the history can read"):
        make_history([folder])


def test_paths_without_evaluations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="is not a results directory of `dapo eval`"):
        make_history([tmp_path])
    (tmp_path / "runs").mkdir()
    with pytest.raises(ResultsError, match="no run there has a report"):
        make_history([tmp_path])
    (tmp_path / "report.json").write_text(json.dumps({"created_at": "2026-01-01T00:00:00+00:00"}))
    with pytest.raises(ResultsError, match="not a report that the history can read"):
        make_history([tmp_path / "report.json"])
