"""Report of a suite: a front page, one page per benchmark, baselines, checkpoints and gates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from markupsafe import Markup

from durable import write_atomically
from eval.problems.registry import POOLED
from eval.report.checkpoint_curve import checkpoint_curve
from eval.report.compare import MAX_RESPONSE_CHARS, ComparisonError, compare_evaluations
from eval.report.gates import (
    AFTER,
    BEFORE,
    LAST_NIGHT,
    Gate,
    GateResult,
    check_gate,
    describe_gates,
    parse_gate,
)
from eval.report.item_pages import pack_items
from eval.report.pages import (
    field_of,
    format_p,
    markup,
    percent,
    plain_p,
    points,
    points_interval,
    render,
)
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
from eval.report.training import Steps, consistency, read_training_metrics, skipped_steps_notes
from eval.results.rows import SERVED, Evaluation, load_evaluation, make_folder
from eval.results.statistics import SIGNIFICANCE
from eval.results.suite import Member, Suite, describe_suite, read_suite

CHECKPOINT_PAGE = "checkpoints.html"
# Fields of the headline's report that a suite's report.json omits: they are in the benchmark's own
# report.
_OWN_PAGE = frozenset(
    "flips items transitions groups num_groups expected_false_alarms lengths gain".split()
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
    folders = {BEFORE: read_suite(models.before), AFTER: read_suite(models.after)}
    suite = _common_suite(models)
    is_suite = len(suite.members) > 1
    columns = [BEFORE, *models.baselines, *models.absent, LAST_NIGHT]
    parsed_gates = [parse_gate(gate, _names(suite), columns) for gate in gates]
    steps = read_training_metrics(train_metrics) if train_metrics is not None else []
    others = _Others(models)
    pairs, reports = list[Paired](), dict[str, dict[str, Any]]()
    for member in suite.members:  # one at a time, so that only one has its responses in memory
        max_chars = 0 if output_dir is None else MAX_RESPONSE_CHARS  # only the pages show texts
        before, after = (load_evaluation(folders[side][member.name], max_chars) for side in folders)
        comparison = compare_evaluations(before, after)
        pairs.append(Paired.of(member, comparison, before))
        others.add(member, before, after)
        # The front page of a suite shows what concerns the whole run.
        own_steps = [] if is_suite else steps
        shown = _of_benchmark(provenance, member.name) if is_suite else provenance
        own = make_report(comparison, own_steps, shown)
        if output_dir is not None:
            plots = {**draw_plots(comparison, own_steps), **_prompt_plots(shown)}
            page_of = partial(render_html, plots=plots, items=pack_items(before, after))
            if is_suite:
                write_pages(own, page_of(own), Path(output_dir) / member.name)
        reports[member.name] = _without_items(own) if is_suite else own
    compared = compare_suite(pairs)
    report = reports[suite.headline]
    if is_suite:
        report |= _front(suite, compared, reports, steps, provenance)
        page_of = partial(_render_front, steps=steps, provenance=provenance)
    results = others.check(parsed_gates, compared, models.absent)
    more = [*_left_out_sentences(folders), *_run_sentences(steps, others.baselines, provenance)]
    sentences = [*report.get("sentences", [report["verdict"]]), *more, *describe_gates(results)]
    report |= {
        "not_compared": {side: _only_in(folders, side) for side in folders},
        "gates": [asdict(result) for result in results],
        **others.content(pairs, models),
        "verdict": " ".join(sentences),
        "sentences": sentences,
        "is_one_evaluation": compared.is_one_evaluation,
        "is_failed": any(result.is_passed is False for result in results),
    }
    if output_dir is not None:
        _write_checkpoint_page(report, Path(output_dir))
        write_pages(report, page_of(report), output_dir)
    return report


def _names(suite: Suite) -> list[str]:
    """The benchmarks that gates may name; [] if there is only one."""
    return [member.name for member in suite.members] if len(suite.members) > 1 else []


def _of_benchmark(provenance: Provenance, name: str) -> Provenance:
    """What one benchmark's page of a suite shows of the run."""
    title = f"{provenance.title}: {name}"
    return replace(provenance, title=title, problems=name, data="", stages={}, traces={}, card=None)


def _without_items(report: Mapping[str, Any]) -> dict[str, Any]:
    """A benchmark's report without what only its own page shows."""
    kept = {key: value for key, value in report.items() if key not in _OWN_PAGE}
    return {**kept, "graders": kept["graders"] and {**kept["graders"], "disagreements": []}}


def _common_suite(models: Models) -> Suite:
    """The benchmarks of both sides, in the order of `after`. Raises ComparisonError for none."""
    before, after = describe_suite(models.before), describe_suite(models.after)
    names = {member.name for member in before.members}
    common = tuple(member for member in after.members if member.name in names)
    if not common:
        listed = [", ".join(one.name for one in side.members) for side in (before, after)]
        raise ComparisonError(
            f"the two sides have no common benchmark: {listed[0]} before; {listed[1]} after. "
            "Evaluate both on the same ones."
        )
    known = [one.name for one in common]
    headlines = [side.headline for side in (after, before) if side.headline in known]
    return Suite(common, [*headlines, *known][0])


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
    """Check gates on one evaluation, except for those that compare it. Raises GateError."""
    suite, folders, pairs = describe_suite(folder), read_suite(folder), []
    for member in suite.members:
        evaluation = load_evaluation(folders[member.name], max_chars=0)
        comparison = compare_evaluations(evaluation, evaluation)
        pairs.append(Paired.of(member, comparison, evaluation))
    measured = {AFTER: _measured(compare_suite(pairs))}
    absent = {column: f"dapo compare --gate checks it against {column}" for column in columns}
    parsed = [parse_gate(gate, _names(suite), columns) for gate in gates]
    return [check_gate(gate, measured, absent) for gate in parsed]


def _run_sentences(
    steps: Steps, baselines: Mapping[str, _Column], provenance: Provenance
) -> list[str]:
    """Whether engine and policy agree, and how a nightly run compares with earlier nights."""
    last, since = baselines.get(LAST_NIGHT), provenance.facts.get("since the first night")
    sentences = [str(found)] if (found := consistency(steps)) else []
    sentences += [last_night_verdict(last.comparison(AFTER))] if last and last.pairs else []
    return [*sentences, f"The trained model is {since}."] if since else sentences


class _Column:
    """A baseline or checkpoint, paired with other models benchmark by benchmark."""

    def __init__(self, name: str, path: str | Path) -> None:
        self.name = name
        self.missing: dict[str, str] = {}
        self.pairs: dict[str, list[Paired]] = {}  # by the side it is paired with
        self._folders = read_suite(path)
        self._model = ""

    def add(self, member: Member, sides: Mapping[str, Evaluation], is_later: bool = False) -> None:
        """Pair one benchmark, this model first (second if `is_later`), or record why not."""
        if member.name not in self._folders:
            self.missing[member.name] = "it was not evaluated"
            return
        evaluation = load_evaluation(self._folders[member.name], max_chars=0)
        served = evaluation.settings.get(SERVED) or {}
        self._model = model_words(served.get("name"), str(evaluation.settings["model"]))
        pairs = {side: (evaluation, other) for side, other in sides.items()}
        if is_later:
            pairs = {side: (other, evaluation) for side, other in sides.items()}
        try:
            found = {side: compare_evaluations(*pair) for side, pair in pairs.items()}
        except ComparisonError as error:
            self.missing[member.name] = str(error)
            return
        for side, comparison in found.items():
            paired = Paired.of(member, comparison, evaluation)
            self.pairs.setdefault(side, []).append(paired)

    def comparison(self, side: str) -> SuiteComparison:
        """The change from this model to the given side."""
        return compare_suite(self.pairs[side])

    def content(self) -> dict[str, Any]:
        """Entry in report.json: `before` and `after` hold the change from this model."""
        sides = {side: _content(self.comparison(side)) for side in self.pairs}
        return {"name": self.name, "model": self._model, "missing": self.missing, **sides}


class _Others:
    """The models beside the two that are compared."""

    def __init__(self, models: Models) -> None:
        self.baselines = {name: _Column(name, path) for name, path in models.baselines.items()}
        self.checkpoints = {
            step: _Column(f"step {step}", path) for step, path in models.checkpoints.items()
        }

    def add(self, member: Member, before: Evaluation, after: Evaluation) -> None:
        """Pair one benchmark of every model."""
        for baseline in self.baselines.values():
            baseline.add(member, {BEFORE: before, AFTER: after})
        for checkpoint in self.checkpoints.values():
            checkpoint.add(member, {BEFORE: before}, is_later=True)

    def check(
        self, gates: Sequence[Gate], compared: SuiteComparison, absent: Mapping[str, str]
    ) -> list[GateResult]:
        """Check gates on the comparison and on those with the baselines."""
        measured: dict[str, Any] = dict.fromkeys((BEFORE, AFTER), _measured(compared))
        for name, baseline in self.baselines.items():
            measured[name] = _measured(baseline.comparison(AFTER)) if baseline.pairs else {}
        return [check_gate(gate, measured, absent) for gate in gates]

    def content(self, pairs: Sequence[Paired], models: Models) -> dict[str, Any]:
        """Fields of report.json. `pairs` are those of the model after the last step."""
        missing, whole = dict(models.absent), dict[int, Sequence[Paired]]()
        for step, column in self.checkpoints.items():
            if column.missing:
                missing[column.name] = "; ".join(column.missing.values())
            else:
                whole[step] = column.pairs[BEFORE]
        if models.last_step and whole:
            whole[models.last_step] = pairs
        curve = checkpoint_curve(whole)
        return {
            "baselines": [baseline.content() for baseline in self.baselines.values()],
            "absent": missing,
            "checkpoints": curve and asdict(curve),
        }


def _front(
    suite: Suite,
    compared: SuiteComparison,
    reports: Mapping[str, Mapping[str, Any]],
    steps: Steps,
    provenance: Provenance,
) -> dict[str, Any]:
    """Fields of the suite's report that replace or extend the headline's."""
    asked = {name: report["measured"] for name, report in reports.items()}
    shared = ("model before", "model after", "engine")
    headline = asked[suite.headline]
    left_out = {name: report["unpaired"]["num_items"] for name, report in reports.items()}
    return {
        **run_fields(steps, provenance),
        "sentences": suite_verdict(compared, suite.headline),
        "notes": [*skipped_steps_notes(steps), *_notes(compared, left_out)],
        "measured": {label: words for label, words in headline.items() if label in shared},
        "headline": suite.headline,
        **_content(compared),
        "asked": asked,
    }


def _notes(compared: SuiteComparison, left_out: Mapping[str, int]) -> list[str]:
    if compared.is_one_evaluation:
        return []
    found = [SAME_MODEL] if compared.is_same_model else []
    found += [
        f"{row.num_elsewhere} problems of {row.name} also occur in an earlier benchmark; the pool "
        "counts them only there."
        for row in compared.benchmarks
        if row.num_elsewhere
    ]
    found += [
        f"{number} items of {name} are left out because a request failed; its page shows the "
        "bounds."
        for name, number in left_out.items()
        if number
    ]
    return [*found, THESE_MODELS]


def _render_front(report: Mapping[str, Any], steps: Steps, provenance: Provenance) -> str:
    plots = {"training": training_plots(steps), **_prompt_plots(provenance)}
    return render(
        "suite.html.j2",
        report=report,
        field=field_of(report),
        page=REPORT_PAGE,
        plots=markup({**plots, "suite": suite_plots(report)}),
    )


def _prompt_plots(provenance: Provenance) -> Plots:
    lengths = (provenance.card or {}).get("prompt_lengths")
    return {"prompts": [prompt_length_plot(lengths)] if lengths else []}


def _write_checkpoint_page(report: Mapping[str, Any], output_dir: Path) -> None:
    """Write checkpoints.html: accuracy over training steps, if there are any."""
    curve = report["checkpoints"]
    if not curve:
        return
    drawing = Markup(checkpoint_plot(curve))
    page = render("checkpoints.html.j2", report=report, curve=curve, drawing=drawing)
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
        verb = "rose" if pooled.difference > 0 else "fell"
        change = f"{verb} by {100 * abs(pooled.difference):.1f} points"
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
    fell = [row for row in rows if row.difference < 0 and not row.direction]
    lower = ", ".join(f"{row.name} {points(row.difference)}" for row in fell)
    return [*sentences, f"Lower, but not significantly: {lower}."] if lower else sentences


def last_night_verdict(compared: SuiteComparison) -> str:
    """Whether the model is better or worse than last night's, naming benchmarks that fell."""
    pooled = compared.pooled
    words = "better" if pooled.difference > 0 else "WORSE"
    words = f"{words} than" if pooled.p < SIGNIFICANCE else "not significantly different from"
    rows = compared.benchmarks
    scope = f"pooled over {len(rows)} benchmarks, " if len(rows) > 1 else ""
    lower = [f"{row.name} {_change_words(row)}" for row in rows if row.direction == "down"]
    fell = "; ".join(lower)
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
