"""Results folders with chosen verdicts, in the format of an evaluation."""

import base64
import gzip
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from eval.answers.grading import VERDICTS, AISBench
from eval.endpoint import Endpoint, Sampling
from eval.problems.items import EvaluationSet, Item
from eval.report import suite_report
from eval.report.compare import Comparison, compare_evaluations
from eval.report.plots import Plots
from eval.requests.recorder import Benchmark
from eval.requests.run import evaluate_all
from eval.results.rows import Evaluation, Row, make_settings, write_rows
from eval.results.summary import Summary

SAMPLING = Sampling(max_tokens=64)
# A letter per response: r right, w wrong, n no answer, t truncated, f failed request.
LETTERS = {verdict[0] if verdict != "request_failed" else "f": verdict for verdict in VERDICTS}


def evaluate(
    evaluation_set: EvaluationSet,
    endpoint: Endpoint,
    sampling: Sampling,
    output_dir: Path,
    *,
    max_failed_ratio: float = 0.0,
    **options: Any,
) -> Summary:
    """Evaluate a single benchmark with `evaluate_all`."""
    benchmark = Benchmark(evaluation_set, sampling, output_dir, max_failed_ratio=max_failed_ratio)
    [summary] = evaluate_all([benchmark], endpoint, **options)
    return summary


def make_items(num_items: int, per_level: int = 4) -> list[Item]:
    """Make items 0, 1, ... of subject `add` whose gold answer is their number plus one."""
    prompts = [({"role": "user", "content": f"{i} + 1 | <b>?"},) for i in range(num_items)]
    return [
        Item(str(i), prompt, str(i + 1), subject="add", level=str(1 + i // per_level))
        for i, prompt in enumerate(prompts)
    ]


def make_row(item: Item, letter: str, sample: int = 0, **changes: Any) -> Row:
    """Make the row of one response. Both graders agree unless `changes` override that."""
    answer = {"r": item.gold, "w": "-1"}.get(letter)
    texts = {"n": "no idea", "t": f"\\boxed{{{item.gold}}} or", "f": None}
    fields: dict[str, Any] = {
        "id": item.id,
        "sample": sample,
        "prompt": item.prompt,
        "response": texts.get(letter, f"<script>hacked = 1</script></script>\n\\boxed{{{answer}}}"),
        "finish_reason": {"f": None, "t": "length"}.get(letter, "stop"),
        "response_tokens": None if letter == "f" else 10 + sample,
        "answer": answer,
        "gold": item.gold,
        "verdict": LETTERS[letter],
        "aisbench": None if letter == "f" else AISBench(str(answer), letter == "r", False),
        "attempts": 1,
        "seconds": 0.5,
        "subject": item.subject,
        "level": item.level,
        "failure": "HTTP 500: boom" if letter == "f" else None,
    }
    return Row(**{**fields, **changes})


def make_rows(items: list[Item], outcomes: str) -> list[Row]:
    """Make rows from `outcomes`: a group of letters per item, or one letter without spaces."""
    groups = (
        outcomes.split() if len(outcomes.split()) == len(items) else list(outcomes.replace(" ", ""))
    )
    return [
        make_row(item, letter, sample)
        for item, letters in zip(items, groups, strict=True)
        for sample, letter in enumerate(letters)
    ]


def settings_of(items: list[Item], model: str = "m", **changes: Any) -> dict[str, Any]:
    """Make the settings of an evaluation of these items."""
    return {**make_settings(items, Endpoint("http://localhost", model), SAMPLING, None), **changes}


def evaluation(items: list[Item], outcomes: str, model: str = "m") -> Evaluation:
    """Make an evaluation in memory, with one or more samples per item."""
    return Evaluation.of(settings_of(items, model), make_rows(items, outcomes))


def write_results(
    directory: Path,
    outcomes: str,
    items: list[Item] | None = None,
    model: str = "m",
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """Write a results folder; `settings` override or extend the default settings."""
    items = items or make_items(len(outcomes.replace(" ", "")))
    directory.mkdir(parents=True)
    (directory / "settings.json").write_text(
        json.dumps(settings_of(items, model, **(settings or {})))
    )
    write_rows(directory, make_rows(items, outcomes))
    return directory


def compared(before: str, after: str) -> Comparison:
    """Compare two evaluations of the same items, all of one level."""
    num_items = len(before.split()) if " " in before else len(before)
    items = make_items(num_items, per_level=max(4, num_items))
    return compare_evaluations(
        evaluation(items, before, "base"), evaluation(items, after, "trained")
    )


def packed_items(page: str) -> tuple[list[list[Any]], list[str]]:
    """Return the item index of a report's page, and the items' bodies in that order."""
    packed = re.findall(r'<template class="packed">([^<]*)</template>', page)
    index, *chunks = [json.loads(gzip.decompress(base64.b64decode(text))) for text in packed]
    return index, [chunks[row[-2]][row[-1]] for row in index]


def no_plots(*_: object) -> Plots:
    """Empty plots, in place of `draw_plots`."""
    return {
        name: [""]
        for name in ("accuracy", "gain", "length", "limit", "transition", "training", "prompts")
    }


def write_report(*arguments: Any) -> dict[str, Any]:
    """Call `write_suite_report` without drawing plots, which takes most of its time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suite_report, "draw_plots", no_plots)
        return suite_report.write_suite_report(*arguments)
