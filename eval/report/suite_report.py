"""Report of a suite: a front page, one page per benchmark, baselines, checkpoints and gates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from durable import write_atomically
from eval.problems.registry import POOLED
from eval.report.checkpoint_curve import checkpoint_curve
from eval.report.compare import MAX_RESPONSE_CHARS, ComparisonError, compare_evaluations
from eval.report.gates import (
    AFTER,
    BEFORE,
    LAST_NIGHT,
    GateResult,
    check_gate,
    describe_gates,
    parse_gate,
)
from eval.report.item_pages import pack_items
from eval.report.pages import field_of, format_p, percent, plain_p, points, points_interval, render
from eval.report.plots import (
    Plots,
    checkpoint_plot,
    draw_plots,
    prompt_length_plot,
    suite_plots,
    training_plots,
)
from eval.report.report import (
    REPORT_PAGE,
    SAME_MODEL,
    THESE_MODELS,
    UNKNOWN,
    Provenance,
    make_report,
    model_words,
    render_html,
    run_fields,
    write_pages,
)
from eval.report.suite_comparison import BenchmarkChange, Paired, SuiteComparison, compare_suite
from eval.report.training import Steps, read_training_metrics, skipped_steps_notes
from eval.results.rows import SERVED, Evaluation, load_evaluation, make_folder
from eval.results.statistics import SIGNIFICANCE
from eval.results.suite import Member, Suite, describe_suite, read_suite

CHECKPOINT_PAGE = "checkpoints.html"
# Fields of the headline's report that a suite's report.json omits: they are in the benchmark's own
# report.
_OWN_PAGE = (
    "flips",
    "items",
    "transitions",
    "groups",
    "num_groups",
    "expected_false_alarms",
    "lengths",
    "gain",
)


@dataclass(frozen=True)
class Models:
    """Results folders of the models to compare: all suites, or all of one benchmark."""

    before: str | Path
    after: str | Path
    baselines: Mapping[str, str | Path] = field(default_factory=dict)  # by name
    checkpoints: Mapping[int, str | Path] = field(default_factory=dict)  # by training step
    last_step: int | None = None  # the step of `after`, for the checkpoint curve
    # a baseline or "step N" -> why it was not evaluated
    absent: Mapping[str, str] = field(default_factory=dict)


def write_suite_report(
    models: Models,
    train_metrics: str | Path | None,
    output_dir: str | Path | None,
    provenance: Provenance = UNKNOWN,
    gates: Sequence[str] = (),
) -> dict[str, Any]:
    """Write the report's files to `output_dir`, if given; return the content of report.json.

    With several benchmarks these describe the suite, and each benchmark has its own report in a
    subfolder. If a baseline lacks a benchmark or used other settings, that benchmark is left out
    there, with the reason. A benchmark that only one side has is named and not compared. Raises
    what `compare_evaluations` and `parse_gate` raise, and ComparisonError if the two sides have no
    common benchmark.
    """
    folders = {BEFORE: read_suite(models.before), "after": read_suite(models.after)}
    suite = _common_suite(models)
    names = [member.name for member in suite.members] if len(suite.members) > 1 else []
    parsed_gates = [
        parse_gate(gate, names, [BEFORE, *models.baselines, *models.absent, LAST_NIGHT])
        for gate in gates
    ]
    steps = read_training_metrics(train_metrics) if train_metrics is not None else []
    work = _SuiteWriter(suite, provenance, steps, output_dir)
    baselines = {
        name: _Column(name, read_suite(folder)) for name, folder in models.baselines.items()
    }
    checkpoints = {
        step: _Column(f"step {step}", read_suite(folder))
        for step, folder in models.checkpoints.items()
    }
    for member in suite.members:
        max_chars = 0 if output_dir is None else MAX_RESPONSE_CHARS  # only the pages show texts
        before, after = (
            load_evaluation(folders[side][member.name], max_chars) for side in (BEFORE, "after")
        )
        work.add(member.name, member.weight, before, after)
        for baseline in baselines.values():
            baseline.add(member, {BEFORE: before, "after": after})
        for checkpoint in checkpoints.values():
            checkpoint.add(member, {BEFORE: before}, is_later=True)
    compared = compare_suite(work.pairs)
    measured: dict[str, Any] = dict.fromkeys((BEFORE, AFTER), _measured(compared))
    for name, baseline in baselines.items():
        measured[name] = _measured(baseline.comparison("after")) if baseline.pairs else {}
    results = [check_gate(gate, measured, models.absent) for gate in parsed_gates]
    missing = {
        column.name: "; ".join(column.missing.values())
        for column in checkpoints.values()
        if column.missing
    }
    whole = {
        step: column.pairs[BEFORE] for step, column in checkpoints.items() if not column.missing
    }
    curve = checkpoint_curve(
        whole | ({models.last_step: work.pairs} if models.last_step and whole else {})
    )
    extras = {
        "more": [*_left_out_sentences(folders), *_night_sentences(baselines, provenance)],
        "not_compared": {side: _only_in(folders, side) for side in folders},
        "gates": [asdict(result) for result in results],
        "baselines": [baseline.content() for baseline in baselines.values()],
        "absent": {**models.absent, **missing},
        "checkpoints": curve and asdict(curve),
    }
    return work.finish(compared, results, extras)


def _common_suite(models: Models) -> Suite:
    """The benchmarks of both sides, in the order of `after`, with its headline if both have it.

    Raises ComparisonError if there are none.
    """
    before, after = describe_suite(models.before), describe_suite(models.after)
    names = {member.name for member in before.members}
    common = tuple(member for member in after.members if member.name in names)
    if not common:
        listed = (
            ", ".join(one.name for one in before.members),
            ", ".join(one.name for one in after.members),
        )
        raise ComparisonError(
            f"the two sides have no common benchmark: {listed[0]} before; {listed[1]} after. "
            "Evaluate both on the same ones."
        )
    headlines = [
        side.headline for side in (after, before) if side.headline in [one.name for one in common]
    ]
    return Suite(common, headlines[0] if headlines else common[0].name)


def _only_in(folders: Mapping[str, Mapping[str, Path]], side: str) -> list[str]:
    others = [found for name, found in folders.items() if name != side]
    return [name for name in folders[side] if not any(name in found for found in others)]


def _left_out_sentences(folders: Mapping[str, Mapping[str, Path]]) -> list[str]:
    """Name the benchmarks that only one side has."""
    found = {side: only for side in folders if (only := _only_in(folders, side))}
    listed = "; ".join(f"{', '.join(only)} (only {side})" for side, only in found.items())
    return [f"Not compared: {listed}."] if listed else []


def check_own_gates(
    folder: str | Path, gates: Sequence[str], columns: Sequence[str]
) -> list[GateResult]:
    """Check gates on one evaluation; those that compare it with one of `columns` are not checked.

    Raises what `parse_gate` raises.
    """
    suite, folders, pairs = describe_suite(folder), read_suite(folder), []
    for member in suite.members:
        evaluation = load_evaluation(folders[member.name], max_chars=0)
        comparison = compare_evaluations(evaluation, evaluation)
        pairs.append(Paired.of(member.name, member.weight, comparison, evaluation))
    names = [member.name for member in suite.members] if len(suite.members) > 1 else []
    measured, reason = (
        {AFTER: _measured(compare_suite(pairs))},
        "dapo compare --gate checks it against {}",
    )
    absent = {column: reason.format(column) for column in columns}
    return [check_gate(parse_gate(gate, names, columns), measured, absent) for gate in gates]


def _night_sentences(baselines: Mapping[str, _Column], provenance: Provenance) -> list[str]:
    """How a nightly run compares with the last and the first night, if there are any."""
    last_night = baselines.get(LAST_NIGHT)
    sentences = (
        [last_night_verdict(last_night.comparison("after"))]
        if last_night and last_night.pairs
        else []
    )
    since = provenance.facts.get("since the first night")
    return [*sentences, f"The trained model is {since}."] if since else sentences


class _Column:
    """A baseline or checkpoint, paired with other models benchmark by benchmark."""

    def __init__(self, name: str, folders: Mapping[str, Path]) -> None:
        self.name = name
        self.missing: dict[str, str] = {}
        self.pairs: dict[str, list[Paired]] = {}  # by the side it is paired with
        self._folders = folders
        self._model = ""

    def add(self, member: Member, sides: Mapping[str, Evaluation], is_later: bool = False) -> None:
        """Pair one benchmark, this model first (second if `is_later`), or record why not."""
        if member.name not in self._folders:
            self.missing[member.name] = "it was not evaluated"
            return
        evaluation = load_evaluation(self._folders[member.name], max_chars=0)
        served = evaluation.settings.get(SERVED) or {}
        self._model = model_words(served.get("name"), str(evaluation.settings["model"]))
        try:
            found = {
                side: compare_evaluations(
                    *((other, evaluation) if is_later else (evaluation, other))
                )
                for side, other in sides.items()
            }
        except ComparisonError as error:
            self.missing[member.name] = str(error)
            return
        for side, comparison in found.items():
            self.pairs.setdefault(side, []).append(
                Paired.of(member.name, member.weight, comparison, evaluation)
            )

    def comparison(self, side: str) -> SuiteComparison:
        """The change from this model to the given side."""
        return compare_suite(self.pairs[side])

    def content(self) -> dict[str, Any]:
        """Entry in report.json: `before` and `after` hold the change from this model to that side."""
        sides = {side: _content(self.comparison(side)) for side in self.pairs}
        return {"name": self.name, "model": self._model, "missing": self.missing, **sides}


class _SuiteWriter:
    """Compares and writes a suite, one benchmark in memory at a time."""

    def __init__(
        self, suite: Suite, provenance: Provenance, steps: Steps, output_dir: str | Path | None
    ) -> None:
        self.pairs: list[Paired] = []
        self._suite, self._provenance, self._steps = suite, provenance, steps
        self._output_dir = None if output_dir is None else Path(output_dir)
        self._is_suite = len(suite.members) > 1
        self._headline: dict[str, Any] = {}
        self._asked: dict[str, dict[str, str]] = {}
        self._left_out: dict[str, int] = {}
        self._render_own: Callable[[Mapping[str, Any]], str] = lambda _: ""

    def add(self, name: str, weight: float, before: Evaluation, after: Evaluation) -> None:
        """Compare one benchmark; in a suite, also write its own page."""
        comparison = compare_evaluations(before, after)
        self.pairs.append(Paired.of(name, weight, comparison, before))
        steps, provenance = self._steps, self._provenance
        if self._is_suite:  # the front page shows what concerns the whole run
            title = f"{provenance.title}: {name}"
            provenance = replace(
                provenance, title=title, problems=name, data="", stages={}, traces={}, card=None
            )
            steps = []
        report = make_report(comparison, steps, provenance)
        if name == self._suite.headline:
            self._headline = report
        self._asked[name] = report["measured"]
        self._left_out[name] = comparison.unpaired.num_items
        if self._output_dir is None:
            return
        items = pack_items(before, after)
        plots = {**draw_plots(comparison, steps), **_prompt_plots(provenance)}
        if self._is_suite:
            write_pages(report, render_html(report, plots, items), self._output_dir / name)
        else:
            self._render_own = lambda content: render_html(content, plots, items)

    def finish(
        self, compared: SuiteComparison, results: Sequence[GateResult], extras: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Write the front page (or the only page) and return its content."""
        report = {**self._headline, **extras}
        if self._is_suite:
            report = {key: value for key, value in report.items() if key not in _OWN_PAGE}
            report |= self._front(compared)
        sentences = (
            report.get("sentences", [report["verdict"]])
            + report.pop("more")
            + describe_gates(results)
        )
        report |= {"verdict": " ".join(sentences), "sentences": sentences}
        report["is_one_evaluation"] = compared.is_one_evaluation
        report["is_failed"] = any(result.is_passed is False for result in results)
        if self._output_dir is not None:
            if report["checkpoints"]:
                write_checkpoint_page(report, self._output_dir)
            page = self._render_front(report) if self._is_suite else self._render_own(report)
            write_pages(report, page, self._output_dir)
        return report

    def _front(self, compared: SuiteComparison) -> dict[str, Any]:
        """Fields of the suite's report that replace or extend the headline's."""
        headline, shared = self._headline, ("model before", "model after", "engine")
        return {
            **run_fields(self._steps, self._provenance),
            "sentences": suite_verdict(compared, self._suite.headline),
            "notes": [*skipped_steps_notes(self._steps), *self._notes(compared)],
            "measured": {
                label: words for label, words in headline["measured"].items() if label in shared
            },
            "graders": headline["graders"] and {**headline["graders"], "disagreements": []},
            "headline": self._suite.headline,
            **_content(compared),
            "asked": self._asked,
        }

    def _notes(self, compared: SuiteComparison) -> list[str]:
        if compared.is_one_evaluation:
            return []
        found = [SAME_MODEL] if compared.is_same_model else []
        found += [
            f"{row.num_elsewhere} problems of {row.name} also occur in an earlier benchmark; the "
            "pool counts them only there."
            for row in compared.benchmarks
            if row.num_elsewhere
        ]
        found += [
            f"{number} items of {name} are left out because a request failed; its page shows the "
            "bounds."
            for name, number in self._left_out.items()
            if number
        ]
        return [*found, THESE_MODELS]

    def _render_front(self, report: Mapping[str, Any]) -> str:
        from markupsafe import Markup

        training = {"training": training_plots(self._steps), **_prompt_plots(self._provenance)}
        plots = {**training, "suite": suite_plots(report)}
        return render(
            "suite.html.j2",
            report=report,
            field=field_of(report),
            page=REPORT_PAGE,
            plots={name: [Markup(plot) for plot in drawn] for name, drawn in plots.items()},
        )


def _prompt_plots(provenance: Provenance) -> Plots:
    lengths = (provenance.card or {}).get("prompt_lengths")
    return {"prompts": [prompt_length_plot(lengths)] if lengths else []}


def write_checkpoint_page(report: Mapping[str, Any], output_dir: Path) -> None:
    """Write checkpoints.html: accuracy over training steps."""
    from markupsafe import Markup

    drawing = Markup(checkpoint_plot(report["checkpoints"]))
    page = render(
        "checkpoints.html.j2", report=report, curve=report["checkpoints"], drawing=drawing
    )
    write_atomically(make_folder(output_dir) / CHECKPOINT_PAGE, page)


def suite_verdict(compared: SuiteComparison, headline: str) -> list[str]:
    """Sentences on the pooled change, the headline, and each benchmark that fell or rose."""
    rows, pooled = compared.benchmarks, compared.pooled
    if compared.is_one_evaluation:
        return [
            f"Both sides are the same stored evaluations of {len(rows)} benchmarks: with a single "
            "measurement of each, nothing can be said about a change."
        ]
    change = f"changed by {points(pooled.difference)} points, not significantly"
    if pooled.p < SIGNIFICANCE:
        change = (
            f"{'rose' if pooled.difference > 0 else 'fell'} by {100 * abs(pooled.difference):.1f} "
            "points"
        )
    chosen = next(row for row in rows if row.name == headline)
    sentences = [
        f"Pooled over {len(rows)} benchmarks ({pooled.n:,} problems), accuracy {change} (95 % "
        f"interval {points_interval(pooled.ci95)}, p {format_p(pooled.p)}), from "
        f"{percent(pooled.before)} to {percent(pooled.after)}.",
        f"Headline {headline}: {percent(chosen.before)} to {percent(chosen.after)}, "
        f"{_change_words(chosen)}.",
    ]
    for word, direction in (("FELL", "down"), ("Rose", "up")):
        found = [f"{row.name} {_change_words(row)}" for row in rows if row.direction == direction]
        sentences += [f"{word}: {'; '.join(found)}."] if found else []
    lower = [
        f"{row.name} {points(row.difference)}"
        for row in rows
        if row.difference < 0 and not row.direction
    ]
    return (
        [*sentences, f"Lower, but not significantly: {', '.join(lower)}."] if lower else sentences
    )


def last_night_verdict(compared: SuiteComparison) -> str:
    """Whether the trained model is better or worse than last night's, naming benchmarks that fell."""
    pooled = compared.pooled
    words = "better" if pooled.difference > 0 else "WORSE"
    words = f"{words} than" if pooled.p < SIGNIFICANCE else "not significantly different from"
    scope = (
        f"pooled over {len(compared.benchmarks)} benchmarks, "
        if len(compared.benchmarks) > 1
        else ""
    )
    fell = "; ".join(
        f"{row.name} {_change_words(row)}" for row in compared.benchmarks if row.direction == "down"
    )
    return (
        f"The trained model is {words} last night's: {scope}{points(pooled.difference)} points (95 "
        f"% interval {points_interval(pooled.ci95)}, p {format_p(pooled.p)})."
        + (f" BELOW last night: {fell}." if scope and fell else "")
    )


def _change_words(row: BenchmarkChange) -> str:
    return f"{points(row.difference)} points (p {format_p(row.p)}, Holm {plain_p(row.p_holm)})"


def _content(compared: SuiteComparison) -> dict[str, Any]:
    return {
        "benchmarks": [{**asdict(row), "direction": row.direction} for row in compared.benchmarks],
        "pooled": asdict(compared.pooled),
    }


def _measured(
    compared: SuiteComparison,
) -> dict[str, tuple[dict[str, float | None], dict[str, float | None]]]:
    """Metrics of both sides by benchmark and pooled, in the form gates expect."""
    found = {
        row.name: (dict(row.before_metrics), dict(row.after_metrics)) for row in compared.benchmarks
    }
    pooled = compared.pooled
    if len(found) == 1:
        return {POOLED: next(iter(found.values()))}
    return {**found, POOLED: ({"accuracy": 100 * pooled.before}, {"accuracy": 100 * pooled.after})}
