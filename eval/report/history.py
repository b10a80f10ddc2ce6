"""Evaluations over time: each paired with the previous and the first one."""

from __future__ import annotations

import datetime
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from downloads.nearest import nearest
from durable import write_atomically
from eval.report.pages import format_p, plain_p, points, points_interval, render
from eval.report.report import REPORT_JSON
from eval.results.rows import (
    RESULTS_FILE,
    SETTINGS_FILE,
    ResultsError,
    describe_differences,
    load_evaluation,
    make_folder,
)
from eval.results.statistics import (
    SIGNIFICANCE,
    PairedChange,
    holm,
    measure_change,
    share_interval,
)
from eval.results.suite import OWN, SUITE_FILE, read_suite

logger = logging.getLogger(__name__)

HISTORY_PAGE = "history.html"


@dataclass(frozen=True)
class Point:
    """One evaluation: right responses per item, None if a request failed."""

    benchmark: str
    label: str
    at: datetime.datetime
    settings: dict[str, Any]  # without the model
    num_samples: int
    right: dict[str, int | None]
    evaluation: str  # digest of the measurement
    num_repeats: int = 0  # later runs that reused this measurement

    @property
    def answered(self) -> list[int]:
        """Right responses of the answered items."""
        return [count for count in self.right.values() if count is not None]

    @property
    def accuracy(self) -> float:
        """Share of right responses over answered items."""
        return sum(self.answered) / (self.num_samples * len(self.answered))

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the accuracy."""
        return share_interval(
            [count / self.num_samples for count in self.answered], 1 / self.num_samples
        )


@dataclass(frozen=True)
class Change(PairedChange):
    """Change of a point from an earlier one, over the items that both answered."""

    is_significant: bool  # after Holm's adjustment over all changes of the series


@dataclass(frozen=True)
class Series:
    """Comparable points, oldest first. `to_previous` and `to_first` begin with None."""

    benchmark: str
    points: tuple[Point, ...]
    to_previous: tuple[Change | None, ...]
    to_first: tuple[Change | None, ...]
    num_tests: int
    differs: tuple[str, ...]  # differences from the first series of the benchmark

    @property
    def expected_false_alarms(self) -> float:
        """Upper bound on the expected number of p below 0.05 if all runs were equal."""
        return SIGNIFICANCE * self.num_tests

    @property
    def newest(self) -> str:
        """A sentence comparing the newest run with the previous and first; "" for a single run."""
        changes = {"the previous run": self.to_previous[-1], "the first run": self.to_first[-1]}
        if len(self.points) == 2:
            changes.pop("the first run")
        parts = [
            f"{_better_or_worse(change)} {name}{_figures(change)}"
            for name, change in changes.items()
            if change
        ]
        return f"{self.points[-1].label} is {', and '.join(parts)}." if parts else ""


def _better_or_worse(change: Change) -> str:
    if not change.is_significant:
        return "not significantly different from"
    return "better than" if change.difference > 0 else "WORSE than"


def _figures(change: Change) -> str:
    interval = points_interval(change.ci95)
    return (
        f" ({points(change.difference)} points, 95 % interval {interval}, p {format_p(change.p)})"
    )


def render_markdown(history: Sequence[Series]) -> str:
    """The history as Markdown for a terminal."""
    return render("history.md.j2", history=history, change_cell=_change_cell, p_cell=_p_cell)


def write_page(history: Sequence[Series], output_dir: str | Path) -> Path:
    """Write history.html, with a plot per series, to `output_dir`; returns its path."""
    from eval.report.plots import history_plot

    drawings = [
        Markup(
            history_plot(
                [f"{point.at:%Y-%m-%d}" for point in series.points],
                [(point.accuracy, point.interval) for point in series.points],
            )
        )
        for series in history
    ]
    page = make_folder(output_dir) / HISTORY_PAGE
    write_atomically(
        page, render("history.html.j2", history=history, drawings=drawings, p_cell=_p_cell)
    )
    return page


def _change_cell(change: Change | None) -> str:
    return "" if change is None else f"{points(change.difference)} [{points_interval(change.ci95)}]"


def _p_cell(change: Change | None) -> str:
    """The p-value, starred if significant after adjustment."""
    if change is None:
        return ""
    return plain_p(change.p) + (" *" if change.is_significant else "")


def make_history(paths: Sequence[str | Path], benchmark: str | None = None) -> list[Series]:
    """Series of comparable evaluations at these paths, per benchmark and settings, longest first.

    A path is a results directory, a suite of them, a report.json or its folder (the "after" side is
    used), or a store (the reports of its runs are used). `benchmark` selects one. Raises
    ResultsError for anything else.
    """
    found = sorted(
        (point for path in paths for point in _points(Path(path))), key=lambda point: point.at
    )
    if not found:
        raise ResultsError(
            f"no evaluation in {', '.join(map(str, paths))}: no run there has a report"
        )
    names = list(dict.fromkeys(point.benchmark for point in found))
    if benchmark is not None and benchmark not in names:
        raise ResultsError(
            f"none of these evaluations is of {benchmark}{nearest(benchmark, names)}"
        )
    history = []
    for name in names if benchmark is None else [benchmark]:
        alike: dict[str, list[Point]] = {}
        for point in _without_repeats([point for point in found if point.benchmark == name]):
            key = json.dumps(
                [point.settings, point.num_samples, sorted(point.right)], sort_keys=True
            )
            alike.setdefault(key, []).append(point)
        ordered = sorted(alike.values(), key=len, reverse=True)
        history += [_series(group, ordered[0][0]) for group in ordered]
    return history


def _without_repeats(points: Sequence[Point]) -> list[Point]:
    """The first point of each measurement, with the number of later runs that reused it."""
    labels: dict[str, set[str]] = {}
    for point in points:
        labels.setdefault(point.evaluation, set()).add(point.label)
    first = {point.evaluation: point for point in reversed(points)}
    return [
        replace(point, num_repeats=len(labels[point.evaluation]) - 1)
        for point in points
        if first[point.evaluation] is point
    ]


def _points(path: Path) -> list[Point]:
    if path.suffix == ".json" and path.is_file():
        return _from_report(path)
    if (path / SETTINGS_FILE).is_file() or (path / SUITE_FILE).is_file():
        return [_from_results(name, folder, path) for name, folder in read_suite(path).items()]
    for report in (path / REPORT_JSON, path / "report" / REPORT_JSON):
        if report.is_file():
            return _from_report(report)
    if (path / "runs").is_dir():
        return _from_store(path)
    raise ResultsError(
        f"{path} is not a results directory of `dapo eval`, a {REPORT_JSON}, a folder with one, or "
        "a store of runs"
    )


def _from_store(store: Path) -> list[Point]:
    """Points of the runs that have a report; unreadable reports are logged and skipped."""
    points = []
    for path in sorted(store.glob(f"runs/*/report/{REPORT_JSON}")):
        try:
            points += _from_report(path)
        except ResultsError as error:
            logger.warning("skipped in the history: %s", error)
    return points


def _from_results(name: str, folder: Path, suite: Path) -> Point:
    evaluation = load_evaluation(folder, max_chars=0)
    written = (folder / RESULTS_FILE).stat().st_mtime
    return Point(
        benchmark=name,
        label=suite.resolve().name,
        at=datetime.datetime.fromtimestamp(written, datetime.timezone.utc),
        settings=evaluation.shared_settings,
        num_samples=evaluation.num_samples,
        right=evaluation.right,
        evaluation=evaluation.digest,
    )


def _from_report(path: Path) -> list[Point]:
    folder = path.resolve().parent
    label = folder.parent.name if folder.name == "report" else folder.name
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        if "benchmarks" not in report:
            return [_from_content(report, str(report["settings"].get("benchmark") or OWN), label)]
        names = [row["name"] for row in report["benchmarks"]]
        files = {name: folder / name / REPORT_JSON for name in names}
        read = {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items()}
        return [_from_content(read[name], name, label) for name in names]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ResultsError(
            f"{path} is not a report that the history can read ({error!r}). Write it again from "
            "its two results directories with `dapo compare --output`."
        ) from error


def _from_content(report: Mapping[str, Any], name: str, label: str) -> Point:
    return Point(
        benchmark=name,
        label=label,
        at=datetime.datetime.fromisoformat(report["created_at"]),
        settings=report["settings"],
        num_samples=report["num_samples"],
        right={identity: after for identity, (_, after) in report["items"].items()},
        evaluation=report["after"]["evaluation"],
    )


def _series(points: Sequence[Point], reference: Point) -> Series:
    to_previous = list(zip(points[1:], points, strict=False))
    # the second point's is in `to_previous`
    to_first = [(point, points[0]) for point in points[2:]]
    changes = _compare_all([*to_previous, *to_first])
    num_previous = len(to_previous)
    return Series(
        benchmark=points[0].benchmark,
        points=tuple(points),
        to_previous=(None, *changes[:num_previous]),
        to_first=(None, *changes[:1], *changes[num_previous:]),
        num_tests=len(changes),
        differs=tuple(_differences(reference, points[0])),
    )


def _differences(reference: Point, other: Point) -> list[str]:
    found = describe_differences(reference.settings, other.settings, "in the first table", "here")
    if reference.num_samples != other.num_samples:
        found.append(
            f"{reference.num_samples} responses per item in the first table, {other.num_samples} "
            "here"
        )
    if not found and reference.right.keys() != other.right.keys():
        found.append("different items")
    return found


def _compare_all(pairs: Sequence[tuple[Point, Point]]) -> list[Change]:
    """The change for each (point, earlier point) over the items both answered; p is adjusted."""
    found = []
    for point, earlier in pairs:
        right = [(earlier.right[identity], count) for identity, count in point.right.items()]
        changes = [y - x for x, y in right if x is not None and y is not None]
        found.append(measure_change(changes, point.num_samples))
    adjusted = holm([change.p for change in found])
    return [
        Change(**vars(change), is_significant=q < SIGNIFICANCE)
        for change, q in zip(found, adjusted, strict=True)
    ]
