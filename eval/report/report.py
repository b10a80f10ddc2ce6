"""The before/after report: report.json, report.md for terminals, report.html for people."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from durable import write_atomically
from eval.report.compare import Comparison, Side
from eval.report.item_pages import PackedItems
from eval.report.pages import (
    field_of,
    format_p,
    inline_script,
    markup,
    percent,
    points,
    points_interval,
    render,
)
from eval.report.plots import Plots
from eval.report.training import Steps, skipped_steps_notes, training_totals
from eval.requests.identity import NO_LOGPROBS
from eval.results.rows import make_folder
from eval.results.statistics import SIGNIFICANCE
from eval.results.summary import describe_unknown_reasons

REPORT_JSON, REPORT_MARKDOWN, REPORT_PAGE = "report.json", "report.md", "report.html"
MOSTLY_TRUNCATED = 0.5
SHORT_DIGEST = 12
SAME_MODEL = (
    "Both sides are the same model: any change is serving and sampling noise, not training."
)
THESE_MODELS = (
    "This compares these two models on items like these. It does not predict the result of another "
    "training run with a different seed."
)


@dataclass(frozen=True)
class Provenance:
    """What a report shows beyond the two results directories."""

    title: str = "Before/after report"
    problems: str = "own problems"  # label for problems that are not a known benchmark
    models: Mapping[str, str] = field(default_factory=dict)  # side -> name
    engine: Mapping[str, str] = field(default_factory=dict)  # package -> version
    data: str | None = None  # digest of the problem file
    # the Provenance table: recipe, run, code ...
    facts: Mapping[str, str] = field(default_factory=dict)
    # name -> {cached, seconds}
    stages: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    artifacts: Mapping[str, str | Path] = field(default_factory=dict)  # name -> path
    traces: Mapping[str, str] = field(default_factory=dict)  # name -> path relative to the report
    # data_card.json, plus prompt_lengths if training measured them
    card: Mapping[str, Any] | None = None
    advice: str | None = None  # on keys of the next training


UNKNOWN = Provenance()


def write_pages(report: Mapping[str, Any], page: str, output_dir: str | Path) -> None:
    """Write report.json, report.md and report.html (`page`) to the folder."""
    files = {
        REPORT_JSON: json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n",
        REPORT_MARKDOWN: render_markdown(report),
        REPORT_PAGE: page,
    }
    output_dir = make_folder(output_dir)
    for name, text in files.items():
        # Responses may contain lone surrogates, which UTF-8 cannot encode.
        write_atomically(output_dir / name, text.encode(errors="replace"))


def make_report(
    comparison: Comparison, steps: Steps, provenance: Provenance = UNKNOWN
) -> dict[str, Any]:
    """Content of report.json: the comparison, its verdict in words, the training and the run."""
    fields = asdict(comparison)
    flips = {kind: fields.pop(kind) for kind in ("gained", "lost")}
    num_lost, num_gained = fields.pop("b"), fields.pop("c")
    detectable = fields.pop("detectable")
    num_groups = sum(map(len, comparison.groups.values()))
    report = {
        **run_fields(steps, provenance),
        "verdict": verdict(comparison),
        "notes": [*skipped_steps_notes(steps), *notes(comparison)],
        "measured": describe_measurement(comparison, provenance),
        "provenance": dict(provenance.facts),
        "is_significant": comparison.is_significant,
        **fields,
        "num_gained": num_gained,
        "num_lost": num_lost,
        "minimal_detectable_difference": detectable,
        "mcnemar": None,  # only with one sample per item
        "num_groups": num_groups,
        "expected_false_alarms": SIGNIFICANCE * num_groups,
        "flips": flips,
        "gates": [],
        "baselines": [],
        "absent": {},
        "checkpoints": None,
        "artifacts": {name: str(path) for name, path in provenance.artifacts.items()},
    }
    if comparison.num_samples == 1:
        p_values = {"p": comparison.p, "mid_p": comparison.mid_p}
        report["mcnemar"] = {"b": num_lost, "c": num_gained, **p_values}
    return report


def run_fields(steps: Steps, provenance: Provenance) -> dict[str, Any]:
    """Fields of report.json about the whole run, shared by single reports and suites."""
    return {
        "title": provenance.title,
        "created_at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "train": {**training_totals(steps), "advice": provenance.advice if steps else None},
        "data": provenance.card,
        "stages": {name: dict(stage) for name, stage in provenance.stages.items()},
        "traces": dict(provenance.traces),
    }


def render_markdown(report: Mapping[str, Any]) -> str:
    """report.md for terminals and Prefect: aligned tables in 100 columns, except for paths."""
    return render("suite.md.j2" if "benchmarks" in report else "report.md.j2", report=report)


def render_html(report: Mapping[str, Any], plots: Plots, items: PackedItems) -> str:
    """report.html: one self-contained page, where only the bundled script may run."""
    script, script_hash = inline_script("items.js")
    return render(
        "report.html.j2",
        report=report,
        field=field_of(report),
        items=items,
        script=script,
        script_hash=script_hash,
        plots=markup(plots),
    )


def verdict(comparison: Comparison) -> str:
    """The change in one or two sentences, with its interval, number of items and test."""
    x, y = percent(comparison.before.accuracy), percent(comparison.after.accuracy)
    if comparison.is_one_evaluation:
        return (
            f"Both sides are the same stored evaluation, {x} right on {_items(comparison)}: with a "
            "single measurement, nothing can be said about a change."
        )
    low, high = (points(bound) for bound in comparison.ci95)
    if comparison.is_significant:
        verb = "rose" if comparison.difference > 0 else "fell"
        size = (
            f"{100 * abs(comparison.difference):.1f} points (95 % interval of the change {low} to "
            f"{high})"
        )
        first = (
            f"Accuracy {verb} by {size}, from {x} to {y} on {_items(comparison)}: "
            f"{_evidence(comparison)}."
        )
        return " ".join([first, *_left_out(comparison)])
    first = (
        f"No significant change in accuracy: {x} before, {y} after, "
        f"{points(comparison.difference)} points (95 % interval {low} to {high}) on "
        f"{_items(comparison)}: {_evidence(comparison)}."
    )
    detectable = comparison.detectable
    undetected = (
        f"with these items, a true change smaller than about {100 * detectable:.1f} points goes "
        "undetected more than one time in five"
        if detectable < 1
        else "with so few items, no change is detected reliably, however large"
    )
    second = f"This does not show that nothing changed: {undetected}."
    return " ".join([first, second, *_left_out(comparison)])


def notes(comparison: Comparison) -> list[str]:
    """Caveats for a careful reader, one sentence each."""
    if comparison.is_one_evaluation:
        return []
    found = []
    sides = {"before": comparison.before, "after": comparison.after}
    if comparison.is_same_model:
        found.append(SAME_MODEL)
    unproven = [name for name, side in sides.items() if NO_LOGPROBS in side.weights]
    if unproven:
        found.append(
            f"The server returned no log-probs {' and '.join(unproven)} training, so only its "
            "model folder or name shows that a single model gave all answers."
        )
    found += [
        f"{side.capitalize()}: {describe_unknown_reasons(result.unknown_finish_reasons)}."
        for side, result in sides.items()
        if result.unknown_finish_reasons
    ]
    truncated = [side.truncated_rate for side in sides.values()]
    if max(truncated) >= MOSTLY_TRUNCATED:
        found.append(
            f"{percent(truncated[0])} of the responses before and {percent(truncated[1])} after "
            "were truncated and count as not right: the accuracy depends on "
            "evaluate.max_response_tokens at least as much as on the models."
        )
    aisbench = comparison.graders
    if aisbench is None:
        return [*found, THESE_MODELS]
    if (
        aisbench.before
        == aisbench.after
        == 0
        < max(comparison.before.accuracy, comparison.after.accuracy)
    ):
        found.append(
            "AISBench's rule marks no response right on either side: it looks for \\boxed{} and "
            "'answer is', but these responses state their answers in another form. Ignore its "
            "numbers here."
        )
    elif (aisbench.p < SIGNIFICANCE) != comparison.is_significant:
        found.append(
            "The graders disagree: under AISBench's rule the change is "
            f"{points(aisbench.difference)} points (95 % interval "
            f"{points_interval(aisbench.ci95)}, p {format_p(aisbench.p)})."
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
        f"{unpaired.num_items} more {verb} left out because a request failed ({unpaired.before} "
        f"before, {unpaired.after} after); whatever the answers would have been, the change over "
        f"all {total} items lies between {low} and {high} points."
    ]


def describe_measurement(comparison: Comparison, provenance: Provenance) -> dict[str, str]:
    """Facts about the evaluation for the top of a report, by label."""
    settings = comparison.settings
    k, n = comparison.num_samples, comparison.n + comparison.unpaired.num_items
    sides = {"before": comparison.before, "after": comparison.after}
    template = settings.get("prompt_template") or {"name": "given"}
    system = ", with a system prompt" if template.get("system") else ""
    data = provenance.data or settings.get("prompts", "")
    found = {
        "benchmark": f"{settings.get('benchmark') or provenance.problems}, {n} items"
        + (f", {k} responses each" if k > 1 else ""),
        **{
            f"model {side}": model_words(provenance.models.get(side, result.name), result.model)
            for side, result in sides.items()
        },
        "prompt": f"{template['name']}, {settings.get('api', 'unknown API')}{system}",
        "sampling": "; after: ".join(
            dict.fromkeys(_sampling(side.sampling) for side in sides.values())
        ),
        "engine": _engine(provenance.engine, sides),
        "grader": str(settings.get("grader")),
        "data": f"sha256 {str(data)[:SHORT_DIGEST]}" if data else "",
    }
    return {label: words for label, words in found.items() if words}


def model_words(name: str | None, model: str) -> str:
    """The model's name and short content digest; settings identify models of a store by digest."""
    is_digest = len(model) == 64 and not model.strip("0123456789abcdef")
    short = f"sha256 {model[:SHORT_DIGEST]}" if is_digest else model
    return f"{name} ({short})" if name and name != short else short


def _engine(versions: Mapping[str, str], sides: Mapping[str, Side]) -> str:
    """The installed versions, else what the servers report; both if the two sides differ."""
    installed = ", ".join(f"{name} {version}" for name, version in versions.items())
    # vLLM appends a hash of its settings, which changes with the model's name.
    named = {
        side: re.sub(r"-[0-9a-f]{8}$", "", result.engine)
        for side, result in sides.items()
        if result.engine
    }
    if len(set(named.values())) > 1:
        served = ", ".join(f"{side} {engine}" for side, engine in named.items())
        return f"{installed}; {served}" if installed else served
    return installed or next(iter(named.values()), "")


def _sampling(sampling: Mapping[str, Any]) -> str:
    """Describe the sampling; fields of value None were not sent."""
    temperature, top_p, top_k = (sampling.get(key) for key in ("temperature", "top_p", "top_k"))
    if temperature == 0:
        words = "greedy"
    elif temperature is None and top_p is None:
        words = "server defaults"
    else:
        named = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
        words = ", ".join(
            f"{key} {'of the server' if value is None else format(value, 'g')}"
            for key, value in named.items()
            if value is not None or key != "top_k"
        )
    if sampling.get("source") == "model":
        words += " (the model's generation_config.json)"
    for name in ("chat_template_kwargs", "extra_body", "renamed_fields"):
        words += "".join(f", {key}={value}" for key, value in (sampling.get(name) or {}).items())
    limit, seed, k = sampling["max_tokens"], sampling["seed"], sampling["num_samples"]
    words += f", at most {limit:,} tokens" if limit else ", no token limit"
    if seed is None:
        return f"{words}, no seed"
    return f"{words}, seeds {seed} to {seed + k - 1}" if k > 1 else f"{words}, seed {seed}"
