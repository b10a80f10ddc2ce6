"""What two evaluations measured, in words, and how fast their answers came."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.results import Row

if TYPE_CHECKING:
    from eval.compare import Comparison, Side

SHORT_DIGEST = 12


@dataclass(frozen=True)
class Speed:
    """How fast a server answered. `latency` is of single requests, with retries and the waiting between them."""

    latency: dict[str, float]  # {"50", "95", "max"}, seconds
    tokens_per_second: float | None  # while requests were in flight; None where times or tokens are not recorded


def speed_of(rows: Sequence[Row]) -> Speed:
    """The speed of an evaluation, over its answered rows. Pauses between attempts do not count."""
    import numpy as np

    seconds = np.array([row.seconds for row in rows])
    latency = {name: float(np.percentile(seconds, q)) for name, q in (("50", 50), ("95", 95), ("max", 100))}
    spans = sorted((row.ended_at - row.seconds, row.ended_at) for row in rows if row.ended_at is not None)
    tokens = [row.response_tokens for row in rows if row.response_tokens is not None]
    if len(spans) < len(rows) or len(tokens) < len(rows):
        return Speed(latency, None)
    busy, end = 0.0, 0.0
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return Speed(latency, sum(tokens) / busy if busy else None)


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
