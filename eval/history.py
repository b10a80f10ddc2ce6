"""More than two evaluations: runs over time, paired with the run before and with the first, and their trend."""

from __future__ import annotations

import datetime
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eval.compare import SIGNIFICANCE, evaluation_digest, shared_settings
from eval.pages import render
from eval.report import REPORT_JSON
from eval.results import RESULTS_FILE, SETTINGS_FILE, ResultsError, differences, make_folder, write_atomically
from eval.samples import accuracy_interval, is_answered, load_evaluation, num_right
from eval.statistics import adjusted_interval, bootstrap_mean, holm, mcnemar, sign_flip_test

logger = logging.getLogger(__name__)

HISTORY_PAGE = "history.html"
_MIN_TREND_RUNS = 3


@dataclass(frozen=True)
class Point:
    """One evaluation: right responses of each item, None where a request failed."""

    label: str
    at: datetime.datetime
    settings: dict[str, Any]  # without the model
    num_samples: int
    right: dict[str, int | None]
    evaluation: str  # digest of the measurement
    num_repeats: int = 0  # later runs that took the same measurement from the store

    @property
    def answered(self) -> list[int]:
        """Right responses of the items that were answered."""
        return [count for count in self.right.values() if count is not None]

    @property
    def accuracy(self) -> float:
        """Share of right responses, over answered items."""
        return sum(self.answered) / (self.num_samples * len(self.answered))

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the accuracy."""
        return accuracy_interval(self.answered, self.num_samples)


@dataclass(frozen=True)
class Change:
    """A point against an earlier one, over the items that both answered."""

    n: int
    difference: float
    ci95: tuple[float, float]
    p: float
    is_significant: bool  # after Holm's adjustment over every change of the series


@dataclass(frozen=True)
class Trend:
    """The straight line through a series, one step per run, over the items that every run answered."""

    n: int
    slope: float  # per run
    ci95: tuple[float, float]
    first: float
    last: float


@dataclass(frozen=True)
class Series:
    """Points that can be compared, oldest first. `to_previous` and `to_first` hold None for the first point."""

    points: tuple[Point, ...]
    to_previous: tuple[Change | None, ...]
    to_first: tuple[Change | None, ...]
    trend: Trend | None
    num_tests: int
    differs: tuple[str, ...]  # from the first series, in words

    @property
    def expected_false_alarms(self) -> float:
        """How many unadjusted p below 0.05 chance gives at most, if no run differed."""
        return SIGNIFICANCE * self.num_tests


def render_markdown(history: Sequence[Series]) -> str:
    """The history for a terminal."""
    return render("history.md.j2", history=history)


def write_page(history: Sequence[Series], output_dir: str | Path) -> Path:
    """history.html, with a plot of each series, written to `output_dir`."""
    from markupsafe import Markup

    from eval.plots import history_plot

    drawings = [
        Markup(
            history_plot(
                [f"{point.at:%Y-%m-%d}" for point in series.points],
                series.points,
                None if series.trend is None else (series.trend.first, series.trend.last),
            )
        )
        for series in history
    ]
    page = make_folder(output_dir) / HISTORY_PAGE
    write_atomically(page, render("history.html.j2", history=history, drawings=drawings))
    return page


def make_history(paths: Sequence[str | Path]) -> list[Series]:
    """The evaluations at these paths, as one series for each set of settings, the largest first.

    A path is a results directory, a report.json or the folder with one (its "after" counts), or a store, whose
    runs' reports are taken. Raises ResultsError for anything else.
    """
    points = sorted((point for path in paths for point in _points(Path(path))), key=lambda point: point.at)
    if not points:
        raise ResultsError(f"no evaluation in {', '.join(map(str, paths))}: no run there has a report")
    alike: dict[str, list[Point]] = {}
    for point in _measured_once(points):
        key = json.dumps([point.settings, point.num_samples, sorted(point.right)], sort_keys=True)
        alike.setdefault(key, []).append(point)
    ordered = sorted(alike.values(), key=len, reverse=True)
    return [_series(group, ordered[0][0]) for group in ordered]


def _measured_once(points: Sequence[Point]) -> list[Point]:
    """The first point of each measurement, with the number of others that only repeat it."""
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
        return [_from_report(path)]
    if (path / SETTINGS_FILE).is_file():
        return [_from_results(path)]
    for report in (path / REPORT_JSON, path / "report" / REPORT_JSON):
        if report.is_file():
            return [_from_report(report)]
    if (path / "runs").is_dir():
        return _from_store(path)
    raise ResultsError(
        f"{path} is no results directory of `dapo eval`, no {REPORT_JSON} or folder with one, and no store of runs"
    )


def _from_store(store: Path) -> list[Point]:
    """The runs that have a report; one that cannot be read is named in the log and left out."""
    points = []
    for path in sorted(store.glob(f"runs/*/report/{REPORT_JSON}")):
        try:
            points.append(_from_report(path))
        except ResultsError as error:
            logger.warning("left out of the history: %s", error)
    return points


def _from_results(folder: Path) -> Point:
    evaluation = load_evaluation(folder)
    written = (folder / RESULTS_FILE).stat().st_mtime
    return Point(
        label=folder.resolve().name,
        at=datetime.datetime.fromtimestamp(written, datetime.timezone.utc),
        settings=shared_settings(evaluation.settings),
        num_samples=evaluation.num_samples,
        right={
            identity: num_right(samples) if is_answered(samples) else None
            for identity, samples in evaluation.items.items()
        },
        evaluation=evaluation_digest(evaluation),
    )


def _from_report(path: Path) -> Point:
    folder = path.resolve().parent
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        return Point(
            label=folder.parent.name if folder.name == "report" else folder.name,
            at=datetime.datetime.fromisoformat(report["created_at"]),
            settings=report["settings"],
            num_samples=report["num_samples"],
            right={identity: after for identity, (_, after) in report["items"].items()},
            # A report without a digest, of an earlier version, stands for itself.
            evaluation=report["after"].get("evaluation", str(path)),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ResultsError(
            f"{path} is not a report that a history can be made of ({error!r}). Write it anew from its two "
            f"results directories, with `dapo report`."
        ) from error


def _series(points: Sequence[Point], reference: Point) -> Series:
    earlier = [*zip(points[1:], points, strict=False), *((point, points[0]) for point in points[2:])]
    p_values = [_p_value(_changes(x, y), x.num_samples) for x, y in earlier]
    adjusted = holm(p_values)
    changes = [
        _change(x, y, p, q < SIGNIFICANCE) for (x, y), p, q in zip(earlier, p_values, adjusted, strict=True)
    ]
    to_previous, to_first = changes[: len(points) - 1], changes[len(points) - 1 :]
    return Series(
        points=tuple(points),
        to_previous=(None, *to_previous),
        to_first=(None, *to_previous[:1], *to_first),
        trend=_trend(points),
        num_tests=len(changes),
        differs=tuple(_differences(reference, points[0])),
    )


def _differences(reference: Point, other: Point) -> list[str]:
    found = [
        phrase.replace(" before, ", " in the first table, ").replace(" after", " here")
        for phrase in differences(reference.settings, other.settings)
    ]
    if reference.num_samples != other.num_samples:
        found.append(
            f"{reference.num_samples} responses to each item in the first table, {other.num_samples} here"
        )
    if not found and reference.right.keys() != other.right.keys():
        found.append("other items")
    return found


def _changes(point: Point, earlier: Point) -> list[int]:
    pairs = [(count, earlier.right[identity]) for identity, count in point.right.items()]
    return [y - x for y, x in pairs if y is not None and x is not None]


def _p_value(changes: Sequence[int], num_samples: int) -> float:
    if num_samples == 1:
        return mcnemar(changes.count(-1), changes.count(1)).p
    return sign_flip_test(changes).p


def _change(point: Point, earlier: Point, p: float, is_significant: bool) -> Change:
    shares = [change / point.num_samples for change in _changes(point, earlier)]
    alike = len(set(shares)) == 1
    return Change(
        n=len(shares),
        difference=sum(shares) / len(shares),
        ci95=adjusted_interval(shares) if alike else bootstrap_mean(shares),
        p=p,
        is_significant=is_significant,
    )


def _trend(points: Sequence[Point]) -> Trend | None:
    """Least squares through the accuracies: the mean over items of each item's own slope, hence its interval."""
    shared = [
        [count / point.num_samples for point in points if (count := point.right[identity]) is not None]
        for identity in points[0].right
    ]
    rows = [row for row in shared if len(row) == len(points)]
    if len(points) < _MIN_TREND_RUNS or not rows:
        return None
    middle = (len(points) - 1) / 2
    spread = sum((place - middle) ** 2 for place in range(len(points)))
    slopes = [sum((place - middle) * y for place, y in enumerate(row)) / spread for row in rows]
    slope = sum(slopes) / len(slopes)
    mean = sum(map(sum, rows)) / (len(rows) * len(points))
    return Trend(len(rows), slope, bootstrap_mean(slopes), mean - slope * middle, mean + slope * middle)
