"""The acceptance form of a run: what its records prove, with a verdict per line.

Recipes for Ascend devices are accepted by these figures. A figure that the run did not record stays
`not recorded`; nothing is estimated in its place.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from dapo_core.config.training import TrainingConfig
from dapo_core.errors import ConfigError, ModelError, counted
from dapo_core.memory.devices import GIB, Limit
from dapo_core.memory.plan import RANK, MemoryPlan
from eval.report.training import MAX_PROBS_DIFF, Steps, consistency, read_training_metrics, series
from eval.results.rows import ResultsError
from eval.results.suite import read_suite
from tasks.artifacts.artifact import StoreError
from tasks.config import ChainConfig
from tasks.preflight.environment import described
from tasks.preflight.memory import plan_of
from tasks.runs.history import (
    STEPS_FILE,
    RecordedRun,
    artifact_of,
    find_evaluation,
    read_report,
    training_folder,
)

NUM_STEPS = 100
MAX_ERROR = 0.05  # of the accuracy, relative to the reference
MAX_EXCESS = 0.1  # of a rank's memory over the plan
MAX_GAP = 0.02  # of a step's seconds, between its phases' sum and the step
Z95 = 1.96
ALLOCATED, RESIDENT = "perf/max_memory_allocated_gb", "perf/max_rss_gb"
Verdict = Literal["met", "not met", "not recorded"]


@dataclass(frozen=True)
class Line:
    """One line of the form."""

    name: str
    criterion: str
    recorded: str
    verdict: Verdict


@dataclass(frozen=True)
class Reference:
    """The accuracy that the evaluation is compared with, and where it comes from."""

    accuracy: float
    source: str


@dataclass(frozen=True)
class Records:
    """What the form is filled in from; None, or empty, for what was not recorded."""

    title: str
    steps: Steps
    after: Mapping[str, Any] | None  # accuracy and its interval, of the report
    reference: Reference | None
    plan: MemoryPlan | str  # or why there is none
    is_cpu: bool
    samples_among_all: bool  # else engine and policy log-probs are not comparable
    versions: Mapping[str, str]
    environment: str
    topology: str
    commit: str | None


def require_acceptable(config: TrainingConfig) -> list[str]:
    """Return the overrides that acceptance needs; raises ConfigError for a recipe that cannot."""
    if not config.rollout.samples_among_all:
        raise ConfigError(
            f"--accept compares engine and policy in every step, but rollout.top_p="
            f"{config.rollout.top_p}, rollout.top_k={config.rollout.top_k} leave the engine's "
            "log-probs without the other tokens; set rollout.top_p=1 and rollout.top_k=-1"
        )
    enough = config.train.total_steps >= NUM_STEPS
    return [] if enough else [f"train.total_steps={NUM_STEPS}"]


def records_of(run: RecordedRun, config: ChainConfig, reference: str | None) -> Records:
    """Read a run's records. Raises StoreError for a run without a training, or a bad reference."""
    folder, report = training_folder(run), read_report(run)
    try:
        steps = [line for line in read_training_metrics(folder / STEPS_FILE) if line["step"] > 0]
    except ResultsError:  # it failed before its first step
        steps = []
    manifests = [
        artifact.manifest()
        for label in ("train_policy", "evaluate_after")
        if label in run.stages and (artifact := artifact_of(run, label)) is not None
    ]
    versions: dict[str, str] = {}
    for manifest in reversed(manifests):  # the training's own count
        versions |= {k: v for k, v in manifest["versions"].items() if v != "absent"}
    return Records(
        title=f"{run.name}, run {run.id} ({run.state})",
        steps=steps,
        after=report and {**report["after"], "benchmark": report.get("headline", "evaluation")},
        reference=None if reference is None else reference_of(run.store, reference),
        plan=_plan_of(run, config),
        is_cpu=config.train.device == "cpu",
        samples_among_all=config.rollout.samples_among_all,
        versions=versions,
        environment=described(run.environment),
        topology=topology_of(config, run),
        commit=next((one["code"] for one in manifests if "code" in one), None),
    )


def reference_of(store: Path, text: str) -> Reference:
    """Return the accuracy of a percentage, a results folder or a run; raises StoreError."""
    try:
        percent = float(text.rstrip("% "))
    except ValueError:
        pass
    else:
        if not 0 < percent <= 100:
            raise StoreError(f"--reference {text} is no accuracy: give percent above 0, up to 100")
        return Reference(percent / 100, "as given")
    folder, run = find_evaluation(store, text)
    members = read_suite(folder)
    if len(members) > 1:
        raise StoreError(
            f"--reference {text} has {len(members)} benchmarks: {', '.join(members)}; name the "
            f"folder of the one to compare, such as {folder / next(iter(members))}"
        )
    (path,) = members.values()
    try:
        summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
        accuracy = float(summary["accuracy"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path / 'summary.json'} has no accuracy ({error!r})") from None
    return Reference(accuracy, str(folder) if run is None else f"run {run.id}")


def topology_of(config: TrainingConfig, run: RecordedRun) -> str:
    """The roles on their devices, as configured."""
    train, rollout = config.train, config.rollout
    parts = f"{rollout.tensor_parallel} x {rollout.pipeline_parallel}"
    model = f", {train.device_model}" if train.device_model else ""
    return (
        f"{counted(config.num_devices, 'device')} ({train.device}{model}), {train.placement}: "
        f"{counted(train.num_ranks, 'policy rank')}, sequence parallel {train.sequence_parallel}; "
        f"{counted(rollout.num_workers, 'engine')} ({rollout.engine}) of {parts} devices (tensor x "
        f"pipeline); driver on {run.host}, "
        f"{'a private Ray' if train.ray_address is None else 'a Ray cluster'}"
    )


def acceptance(records: Records) -> list[Line]:
    """Return the form's lines."""
    return [
        _reward(records.steps),
        _mismatch(records),
        _step_time(records.steps),
        _metric(records.steps, "tokens per second and device", "perf/throughput", "{:,.1f}"),
        _metric(records.steps, "MFU of the update", "perf/mfu/actor", "{:.3f}"),
        _memory(records),
        _evaluation(records),
        *_facts(records),
    ]


def is_accepted(lines: Sequence[Line]) -> bool:
    """True if every line is met."""
    return all(line.verdict == "met" for line in lines)


def to_markdown(records: Records, lines: Sequence[Line]) -> str:
    """The form as a file to attach."""
    counts = {verdict: sum(line.verdict == verdict for line in lines) for verdict in _VERDICTS}
    words = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    rows = (
        f"| {line.name} | {line.criterion} | {_cell(line.recorded)} | **{line.verdict}** |"
        for line in lines
    )
    return "\n".join(
        [
            f"# Acceptance of {records.title}",
            "",
            f"{'Accepted' if is_accepted(lines) else 'Not accepted'}: {words}.",
            "",
            "| | criterion | recorded | verdict |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


_VERDICTS: tuple[Verdict, ...] = ("met", "not met", "not recorded")


def _percent(share: float, form: str = "g") -> str:
    return f"{100 * share:{form}} %"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ") or "-"


def _reward(steps: Steps) -> Line:
    """The slope of the mean reward over the steps, by least squares, with its 95 % interval."""
    criterion = f"the slope over at least {NUM_STEPS} steps is above 0 (95 % interval)"
    numbers, rewards = series(steps, "critic/rewards/mean")
    if len(rewards) < 3:
        found = f"{len(rewards)} steps with a reward"
        return Line("reward rises", criterion, found, "not recorded")
    slope, error = _slope(numbers, rewards)
    low, high = (100 * (slope + sign * Z95 * error) for sign in (-1, 1))
    found = (
        f"{100 * slope:+.3f} per 100 steps, {low:+.3f} to {high:+.3f}, over {len(rewards)} steps; "
        f"first tenth {_part(rewards, 0):.3f}, last tenth {_part(rewards, -1):.3f}"
    )
    verdict: Verdict = "met" if low > 0 else "not met"
    return Line(
        "reward rises", criterion, found, verdict if len(rewards) >= NUM_STEPS else "not met"
    )


def _slope(numbers: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """The least-squares slope and its standard error, widened for correlated residuals.

    Neighbouring steps share weights, so their residuals are correlated. With lag-one correlation r,
    n residuals say as much as n (1 - r) / (1 + r) independent ones.
    """
    middle, mean = fmean(numbers), fmean(values)
    spread = sum((number - middle) ** 2 for number in numbers)
    slope = sum((x - middle) * (y - mean) for x, y in zip(numbers, values, strict=True)) / spread
    residuals = [y - mean - slope * (x - middle) for x, y in zip(numbers, values, strict=True)]
    total = sum(residual**2 for residual in residuals)
    if not total:
        return slope, 0.0
    shared = sum(a * b for a, b in itertools.pairwise(residuals)) / total
    shared = min(max(shared, 0.0), 0.99)
    variance = total / (len(values) - 2) / spread * (1 + shared) / (1 - shared)
    return slope, math.sqrt(variance)


def _part(values: Sequence[float], which: int) -> float:
    """The mean of the first (0) or last (-1) tenth."""
    count = max(1, len(values) // 10)
    return fmean(values[:count] if which == 0 else values[-count:])


def _mismatch(records: Records) -> Line:
    criterion = f"mean difference of a token's probability at most {MAX_PROBS_DIFF:g}"
    found = consistency(records.steps)
    if not records.samples_among_all:
        reason = "rollout.top_p or top_k: engine and policy cover different tokens"
        return Line("engine and policy", criterion, reason, "not recorded")
    if found is None:
        reason = "no step compared them"
        return Line("engine and policy", criterion, reason, "not recorded")
    numbers, _ = series(records.steps, "rollout/fresh_compared_tokens")
    recorded = (
        f"{found.log_probs_diff:.2g} nats and {found.probs_diff:.2g} in probability per token on "
        f"average, at most {found.probs_diff_max:.2g}; {found.num_high:,} of {found.num_tokens:,} "
        f"tokens differ by more than 0.1; compared in {len(numbers)} of {len(records.steps)} steps"
    )
    return Line("engine and policy", criterion, recorded, "met" if found.agrees else "not met")


def _step_time(steps: Steps) -> Line:
    criterion = f"recorded in every step; phases add up to the step within {_percent(MAX_GAP)}"
    _, totals = series(steps, "timing_s/step")
    if not totals or len(totals) < len(steps):
        found = f"{len(totals)} of {len(steps)} steps"
        return Line("step time by phase", criterion, found, "not recorded")
    names = dict.fromkeys(name for line in steps for name in line if name.startswith("timing_s/"))
    means = {
        name.removeprefix("timing_s/"): sum(series(steps, name)[1]) / len(steps)
        for name in names
        if name != "timing_s/step"
    }
    whole = fmean(totals)
    shown = sorted(means.items(), key=lambda each: -each[1])
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in shown)
    is_whole = abs(sum(means.values()) - whole) <= MAX_GAP * whole
    return Line(
        "step time by phase",
        criterion,
        f"{whole:.2f} s per step: {phases}",
        "met" if is_whole else "not met",
    )


def _metric(steps: Steps, name: str, key: str, form: str) -> Line:
    """A line for the mean of a metric that every step that trained must have."""
    trained = [line for line in steps if line.get("timing_s/update_actor")]
    _, values = series(trained, key)
    criterion = f"`{key}` recorded in every step"
    if not values or len(values) < len(trained):
        found = f"{len(values)} of {len(trained)} steps"
        return Line(name, criterion, found, "not recorded")
    spread = f"{form.format(min(values))} to {form.format(max(values))}"
    return Line(name, criterion, f"{form.format(fmean(values))} on average, {spread}", "met")


def _memory(records: Records) -> Line:
    criterion = f"a policy rank's peak is at most {_percent(MAX_EXCESS)} above the plan's"
    name = RESIDENT if records.is_cpu else ALLOCATED
    _, values = series(records.steps, name)
    if isinstance(records.plan, str) or not values:
        reason = records.plan if isinstance(records.plan, str) else f"no step has `{name}`"
        return Line("memory against the plan", criterion, reason, "not recorded")
    planned = _planned_gib(records.plan, records.is_cpu)
    found = f"{max(values):.2f} GiB measured (`{name}`), {planned:.2f} GiB planned"
    verdict: Verdict = "met" if max(values) <= (1 + MAX_EXCESS) * planned else "not met"
    return Line("memory against the plan", criterion, found, verdict)


def _planned_gib(plan: MemoryPlan, is_cpu: bool) -> float:
    """What a rank holds in its peak phase; on an accelerator only what torch allocates."""
    sums: dict[str, int] = {}
    for use in plan.uses:
        if use.role == RANK and (is_cpu or use.what != "process"):
            sums[use.phase] = sums.get(use.phase, 0) + use.device_bytes
    return max(sums.values()) / GIB


def _plan_of(run: RecordedRun, config: ChainConfig) -> MemoryPlan | str:
    """The plan of the run's recipe and model, or why there is none."""
    model = artifact_of(run, "fetch_model") if "fetch_model" in run.stages else None
    try:
        return plan_of(config, Path(model.path) if model else None, limit=Limit("", None))
    except (ConfigError, ModelError) as error:
        return f"no plan: {error}"


def _evaluation(records: Records) -> Line:
    criterion = f"accuracy within {_percent(MAX_ERROR)} of the reference"
    after, reference = records.after, records.reference
    if after is None:
        reason = "the run has no report of an evaluation"
        return Line("evaluation", criterion, reason, "not recorded")
    low, high = after["interval"]
    found = (
        f"{after['benchmark']} {100 * after['accuracy']:.1f} %, 95 % interval {100 * low:.1f} to "
        f"{100 * high:.1f} %"
    )
    if reference is None:
        return Line("evaluation", criterion, f"{found}; no --reference given", "not recorded")
    if not reference.accuracy:
        return Line("evaluation", criterion, f"{found}; the reference is 0 %", "not met")
    error, *ends = (value / reference.accuracy - 1 for value in (after["accuracy"], low, high))
    found += (
        f"; reference {100 * reference.accuracy:.1f} % ({reference.source}): error "
        f"{_percent(error, '+.1f')}, {_percent(ends[0], '+.1f')} to {_percent(ends[1], '+.1f')}"
    )
    return Line("evaluation", criterion, found, "met" if abs(error) <= MAX_ERROR else "not met")


def _facts(records: Records) -> Iterator[Line]:
    """Lines that only need to be recorded."""
    versions = ", ".join(f"{name} {version}" for name, version in records.versions.items())
    facts = {
        "versions": versions,
        "environment": records.environment,
        "topology": records.topology,
        "commit": records.commit or "",
    }
    for name, text in facts.items():
        is_there = bool(text) and (name != "commit" or "commit" in text)
        yield Line(name, "recorded", text, "met" if is_there else "not recorded")
