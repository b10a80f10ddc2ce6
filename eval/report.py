"""The before/after report: report.json for machines, report.md for terminals, report.html for people."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from durable import write_atomically
from eval.compare import Comparison, Side, compare_evaluations
from eval.identity import NO_LOGPROBS
from eval.item_pages import PackedItems, pack_items
from eval.pages import field_of, format_p, inline_script, percent, points, render
from eval.plots import Plots, draw_plots
from eval.results import load_evaluation, make_folder
from eval.statistics import SIGNIFICANCE
from eval.training import Steps, read_training_metrics, skipped_steps_notes, training_totals

REPORT_JSON, REPORT_MARKDOWN, REPORT_PAGE = "report.json", "report.md", "report.html"
MOSTLY_CUT = 0.5
SHORT_DIGEST = 12
SAME_MODEL = "Both sides are the same model: any change is noise of serving and sampling, not training."
THESE_MODELS = (
    "This compares these two models on items like these. It does not predict the result of training again with "
    "another seed."
)


@dataclass(frozen=True)
class Provenance:
    """What a report knows beside its two results directories."""

    title: str = "Before/after report"
    problems: str = "own problems"  # what they are where they are no known benchmark
    models: Mapping[str, str] = field(default_factory=dict)  # side -> name
    engine: Mapping[str, str] = field(default_factory=dict)  # package -> version
    data: str | None = None  # digest of the problems' file
    made: Mapping[str, str] = field(default_factory=dict)  # recipe, run, code ..., for the block at the end
    stages: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # name -> {cached, seconds}
    artifacts: Mapping[str, str | Path] = field(default_factory=dict)  # name -> path
    traces: Mapping[str, str] = field(default_factory=dict)  # name -> path relative to the report
    card: Mapping[str, Any] | None = None  # data_card.json, with prompt_lengths where a training measured them


UNKNOWN = Provenance()


def write_report(
    before_dir: str | Path,
    after_dir: str | Path,
    train_metrics: str | Path | None,
    output_dir: str | Path,
    provenance: Provenance = UNKNOWN,
    draw: Callable[[Comparison, Steps], Plots] = draw_plots,
) -> dict[str, Any]:
    """The content of report.json, written to `output_dir` together with report.md and report.html.

    `train_metrics` is the training run's metrics.jsonl, None when nothing was trained; `draw` gives what
    `draw_plots` does. Raises what `compare` raises.
    """
    before, after = load_evaluation(before_dir), load_evaluation(after_dir)
    comparison = compare_evaluations(before, after)
    steps = read_training_metrics(train_metrics) if train_metrics is not None else []
    report = make_report(comparison, steps, provenance)
    write_pages(report, render_html(report, draw(comparison, steps), pack_items(before, after)), output_dir)
    return report


def write_pages(report: Mapping[str, Any], page: str, output_dir: str | Path) -> None:
    """Write report.json, report.md and the page as report.html to the folder."""
    files = {
        REPORT_JSON: json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n",
        REPORT_MARKDOWN: render_markdown(report),
        REPORT_PAGE: page,
    }
    output_dir = make_folder(output_dir)
    for name, text in files.items():
        # A response may contain a lone surrogate, which UTF-8 cannot encode.
        write_atomically(output_dir / name, text.encode(errors="replace"))


def make_report(comparison: Comparison, steps: Steps, provenance: Provenance = UNKNOWN) -> dict[str, Any]:
    """The content of report.json: the comparison and its verdict in words, the training, the run."""
    fields = asdict(comparison)
    flips = {kind: fields.pop(kind) for kind in ("gained", "lost")}
    num_lost, num_gained = fields.pop("b"), fields.pop("c")
    num_groups = sum(map(len, comparison.groups.values()))
    report = {
        "title": provenance.title,
        "created_at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "verdict": verdict(comparison),
        "notes": [*skipped_steps_notes(steps), *notes(comparison)],
        "measured": describe_measurement(comparison, provenance),
        "provenance": dict(provenance.made),
        "is_significant": comparison.is_significant,
        **fields,
        "num_gained": num_gained,
        "num_lost": num_lost,
        "mcnemar": None,  # unless each item has one sample
        "num_groups": num_groups,
        "expected_false_alarms": SIGNIFICANCE * num_groups,
        "flips": flips,
        "train": training_totals(steps),
        "gates": [],
        "baselines": [],
        "absent": {},
        "checkpoints": None,
        "data": provenance.card,
        "stages": {name: dict(stage) for name, stage in provenance.stages.items()},
        "traces": dict(provenance.traces),
        "artifacts": {name: str(path) for name, path in provenance.artifacts.items()},
    }
    if comparison.num_samples == 1:
        report["mcnemar"] = {"b": num_lost, "c": num_gained, "p": comparison.p, "mid_p": comparison.mid_p}
    return json.loads(json.dumps(report))  # as a reader of the file gets it: tuples become lists


def render_markdown(report: Mapping[str, Any]) -> str:
    """report.md for terminals and Prefect's page: aligned tables, at most 100 columns except for paths."""
    return render("suite.md.j2" if "benchmarks" in report else "report.md.j2", report=report)


def render_html(report: Mapping[str, Any], plots: Plots, items: PackedItems) -> str:
    """report.html: one self-contained page; model output is escaped, and only our own script may run."""
    from markupsafe import Markup

    script, script_hash = inline_script("items.js")
    return render(
        "report.html.j2",
        report=report,
        field=field_of(report),
        items=items,
        script=script,
        script_hash=script_hash,
        # Our own SVG; matplotlib has escaped the levels and subjects in it.
        plots={name: [Markup(plot) for plot in drawn] for name, drawn in plots.items()},
    )


def verdict(comparison: Comparison) -> str:
    """One sentence or two: the change with its interval, the number of items, and the test."""
    x, y = percent(comparison.before.accuracy), percent(comparison.after.accuracy)
    if comparison.is_one_evaluation:
        return (
            f"Both sides are the same stored evaluation, {x} right on {_items(comparison)}: there was only one "
            f"measurement, so nothing can be said about a change."
        )
    low, high = (points(bound) for bound in comparison.ci95)
    if comparison.is_significant:
        verb = "rose" if comparison.difference > 0 else "fell"
        size = f"{100 * abs(comparison.difference):.1f} points (95 % interval of the change {low} to {high})"
        first = f"Accuracy {verb} by {size}, from {x} to {y} on {_items(comparison)}: {_evidence(comparison)}."
        return " ".join([first, *_left_out(comparison)])
    first = (
        f"No significant change in accuracy: {x} before, {y} after, {points(comparison.difference)} points "
        f"(95 % interval {low} to {high}) on {_items(comparison)}: {_evidence(comparison)}."
    )
    detectable = comparison.minimal_detectable_difference
    missed = (
        f"with these items, a true change of less than about {100 * detectable:.1f} points is missed more than "
        f"one time in five"
        if detectable < 1
        else "with so few items, no change is found reliably, however large"
    )
    second = f"That does not show that nothing changed: {missed}."
    return " ".join([first, second, *_left_out(comparison)])


def notes(comparison: Comparison) -> list[str]:
    """Caveats that a careful reader needs, as sentences."""
    if comparison.is_one_evaluation:
        return []
    found = []
    sides = {"before": comparison.before, "after": comparison.after}
    if comparison.before.model == comparison.after.model:
        found.append(SAME_MODEL)
    if (comparison.settings.get("judge") or {}).get("headline"):
        found.append(
            "The accuracy is the verdict of a language model as the judge, as the recipe says, not the exact "
            "grader's: it changes with the judge's model and prompt."
        )
    unproven = [name for name, side in sides.items() if NO_LOGPROBS in side.weights]
    if unproven:
        found.append(
            f"The servers gave no log-probs {' and '.join(unproven)} training: only the folder or the name that "
            f"they serve says that all answers of a side are of one model."
        )
    cut = [side.truncated_rate for side in sides.values()]
    if max(cut) >= MOSTLY_CUT:
        found.append(
            f"{percent(cut[0])} of the responses before and {percent(cut[1])} after were cut off and count as not "
            f"right: the accuracy depends on evaluate.max_response_tokens at least as much as on the models."
        )
    aisbench = comparison.graders
    if aisbench.before == aisbench.after == 0 < max(comparison.before.accuracy, comparison.after.accuracy):
        found.append(
            "AISBench's rule marks no response of either side right: it looks for \\boxed{} and 'answer is', and "
            "these responses give their answers in another form. Its figures mean nothing here."
        )
    elif (aisbench.p < SIGNIFICANCE) != comparison.is_significant:
        found.append(
            f"The graders differ: under AISBench's string rule the change is {points(aisbench.difference)} points "
            f"(95 % interval {points(aisbench.ci95[0])} to {points(aisbench.ci95[1])}, p {format_p(aisbench.p)})."
        )
    return [*found, THESE_MODELS]


def _items(comparison: Comparison) -> str:
    plural = "s" if comparison.n > 1 else ""
    if comparison.num_samples == 1:
        return f"the same {comparison.n} item{plural}"
    return f"the same {comparison.n} item{plural}, {comparison.num_samples} responses each"


def _evidence(comparison: Comparison) -> str:
    words = ("gained", "lost") if comparison.num_samples == 1 else ("items better", "worse")
    counts = f"{comparison.c} {words[0]}, {comparison.b} {words[1]}"
    return f"{counts}, {comparison.test} p {format_p(comparison.p)}"


def _left_out(comparison: Comparison) -> list[str]:
    unpaired = comparison.unpaired
    if not unpaired.num_items:
        return []
    total = comparison.n + unpaired.num_items
    low, high = (points(bound) for bound in unpaired.difference_range)
    verb = "item is" if unpaired.num_items == 1 else "items are"
    return [
        f"{unpaired.num_items} further {verb} left out because a request failed ({unpaired.before} before, "
        f"{unpaired.after} after); whatever the answers would have been, the change over all {total} items lies "
        f"between {low} and {high} points."
    ]


def describe_measurement(comparison: Comparison, provenance: Provenance) -> dict[str, str]:
    """What was measured, for the top of a report: {label: words}."""
    settings = comparison.settings
    k, n = comparison.num_samples, comparison.n + comparison.unpaired.num_items
    sides = {"before": comparison.before, "after": comparison.after}
    template = settings.get("prompt_template") or {"name": "given"}
    system = ", with a system prompt" if template.get("system") else ""
    data = provenance.data or settings.get("prompts", "")
    found = {
        "benchmark": f"{settings.get('benchmark') or provenance.problems}, {n} items"
        + (f", {k} responses to each" if k > 1 else ""),
        **{
            f"model {side}": model_words(provenance.models.get(side), result.model)
            for side, result in sides.items()
        },
        "prompt": f"{template['name']}, {settings.get('api', 'unknown API')}{system}",
        "sampling": "; after: ".join(dict.fromkeys(_sampling(side.sampling) for side in sides.values())),
        "engine": _engine(provenance.engine, sides),
        "grader": str(settings.get("grader")),
        "judge": _judge(settings.get("judge")),
        "data": f"sha256 {str(data)[:SHORT_DIGEST]}" if data else "",
    }
    return {label: words for label, words in found.items() if words}


def _judge(judge: Mapping[str, Any] | None) -> str:
    if not judge:
        return ""
    role = "the headline" if judge["headline"] else "beside the grader"
    return f"{judge['model']}, {judge['votes']} vote{'s' * (judge['votes'] > 1)} on each response, {role}"


def model_words(name: str | None, model: str) -> str:
    """The name with the short content digest, which is what the settings call a model of a store."""
    is_digest = len(model) == 64 and not model.strip("0123456789abcdef")
    short = f"sha256 {model[:SHORT_DIGEST]}" if is_digest else model
    return f"{name} ({short})" if name and name != short else short


def _engine(versions: Mapping[str, str], sides: Mapping[str, Side]) -> str:
    """The installed versions, else what the servers called themselves; both where the two sides differ."""
    installed = ", ".join(f"{name} {version}" for name, version in versions.items())
    # vLLM adds a hash of its settings, which the name of the model alone changes.
    named = {side: re.sub(r"-[0-9a-f]{8}$", "", result.engine) for side, result in sides.items() if result.engine}
    if len(set(named.values())) > 1:
        served = ", ".join(f"{side} {engine}" for side, engine in named.items())
        return f"{installed}; {served}" if installed else served
    return installed or next(iter(named.values()), "")


def _sampling(sampling: Mapping[str, Any]) -> str:
    temperature, k, seed = sampling["temperature"], sampling["num_samples"], sampling["seed"]
    if temperature is None:
        words = "the server's own default"
    else:
        words = "greedy" if temperature == 0 else f"temperature {temperature:g}, top_p {sampling['top_p']:g}"
    if temperature and sampling.get("top_k") is not None:
        words += f", top_k {sampling['top_k']}"
    if sampling.get("source") == "model":
        words += " (the model's generation_config.json)"
    for name in ("chat_template_kwargs", "extra_body"):
        words += "".join(f", {key}={value}" for key, value in (sampling.get(name) or {}).items())
    seeds = f"seeds {seed} to {seed + k - 1}" if k > 1 else f"seed {seed}"
    return f"{words}, at most {sampling['max_tokens']:,} tokens, {seeds}"
