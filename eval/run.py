"""Evaluate a served model on a set of items, resumably, into a results directory."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from eval.benchmark import Item
from eval.client import ChatClient, Endpoint, Outcome, Sampling
from eval.errors import EvaluationError
from eval.grading import grade
from eval.progress import EvaluationProgress
from eval.results import (
    RESULTS_FILE,
    SETTINGS_FILE,
    SUMMARY_FILE,
    Row,
    differences,
    group_by,
    make_settings,
    mean_response_tokens,
    rate,
    read_rows,
    read_settings,
    write_atomically,
    write_rows,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Summary:
    """The numbers of one evaluation, as in summary.json.

    A failed request says nothing about the model: `n`, `accuracy`, the groups and the no-answer and truncated
    rates count answered items only; `request_failed_rate` is over all `num_items`.
    """

    accuracy: float
    n: int
    num_items: int
    by_level: dict[str, dict[str, float]]  # level -> {n, right, accuracy}
    by_subject: dict[str, dict[str, float]]
    no_answer_rate: float
    truncated_rate: float
    request_failed_rate: float
    mean_response_tokens: float | None
    settings: dict[str, Any]


def evaluate(
    items: Sequence[Item],
    endpoint: Endpoint,
    sampling: Sampling,
    output_dir: str | Path,
    *,
    model_digest: str | None = None,
    max_failed_ratio: float = 0.0,
) -> Summary:
    """Ask the model every item and return the summary, which is also written beside the rows.

    A directory with equal settings is continued: only missing items and failed requests are asked. Other
    settings start anew, the old files moved to `superseded-N/`. Raises EvaluationError when more than
    `max_failed_ratio` of the requests failed; every finished row is kept for the next attempt.
    """
    if not items:
        raise EvaluationError("there are no items to evaluate: the evaluation set is empty")
    output_dir = Path(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    settings = make_settings(items, endpoint, sampling, model_digest)
    rows = _resume(output_dir, settings)
    missing = [item for item in items if item.id not in rows]
    max_failed = int(max_failed_ratio * len(items))
    if missing:
        asyncio.run(_ask_all(missing, endpoint, sampling, output_dir, max_failed))
    rows = read_rows(output_dir)
    failures = [rows[item.id] for item in items if item.id in rows and not rows[item.id].is_answered]
    unasked = len(items) - len(rows)
    if len(failures) > max_failed:
        given_up = f", {unasked} were not asked any more because nothing answered" if unasked else ""
        raise EvaluationError(
            f"{len(failures)} of {len(items)} requests to {endpoint.chat_url} failed{given_up}; "
            f"at most {max_failed} may (evaluate.max_failed_ratio = {max_failed_ratio:g}). "
            f"First reason: {failures[0].failure}. "
            f"The answered items are kept in {output_dir}: the same evaluation continues from them."
        )
    ordered = [rows[item.id] for item in items]
    write_rows(output_dir, ordered)  # rows are appended as they finish; a finished file has the items' order
    summary = summarise(ordered, settings)
    write_atomically(output_dir / SUMMARY_FILE, json.dumps(asdict(summary), indent=2, ensure_ascii=False) + "\n")
    logger.info(
        "accuracy %.1f %% on %d items (no answer %.1f %%, truncated %.1f %%, failed requests %.1f %%)",
        100 * summary.accuracy,
        summary.n,
        100 * summary.no_answer_rate,
        100 * summary.truncated_rate,
        100 * summary.request_failed_rate,
    )
    return summary


def summarise(rows: Sequence[Row], settings: dict[str, Any]) -> Summary:
    """The summary of all rows of an evaluation."""
    answered = [row for row in rows if row.is_answered]
    return Summary(
        accuracy=rate(answered, lambda row: row.is_right),
        n=len(answered),
        num_items=len(rows),
        by_level=_accuracy_by(answered, "level"),
        by_subject=_accuracy_by(answered, "subject"),
        no_answer_rate=rate(answered, lambda row: row.verdict == "no_answer"),
        truncated_rate=rate(answered, lambda row: row.verdict == "truncated"),
        request_failed_rate=rate(rows, lambda row: not row.is_answered),
        mean_response_tokens=mean_response_tokens(answered),
        settings=settings,
    )


def _accuracy_by(rows: Sequence[Row], field: str) -> dict[str, dict[str, float]]:
    return {
        key: {
            "n": len(group),
            "right": sum(row.is_right for row in group),
            "accuracy": rate(group, lambda row: row.is_right),
        }
        for key, group in group_by(rows, field).items()
    }


def _resume(output_dir: Path, settings: dict[str, Any]) -> dict[str, Row]:
    """Rows of an earlier attempt that can be kept; leaves the directory ready to be appended to."""
    stored = read_settings(output_dir)
    if stored != settings:
        if stored is not None or (output_dir / RESULTS_FILE).exists():
            _move_aside(output_dir, differences(stored or {}, settings))
        write_atomically(output_dir / SETTINGS_FILE, json.dumps(settings, indent=2) + "\n")
        return {}
    rows = {identity: row for identity, row in read_rows(output_dir).items() if row.is_answered}
    # A torn last line has no newline: the next row must not be appended to it.
    write_rows(output_dir, rows.values())
    if rows:
        logger.info("%s: continuing, %d of %d items are answered", output_dir, len(rows), settings["num_items"])
    return rows


def _move_aside(output_dir: Path, reasons: Sequence[str]) -> None:
    number = 1
    while (output_dir / f"superseded-{number}").exists():
        number += 1
    aside = output_dir / f"superseded-{number}"
    aside.mkdir()
    for name in (RESULTS_FILE, SETTINGS_FILE, SUMMARY_FILE):
        if (output_dir / name).exists():
            (output_dir / name).rename(aside / name)
    logger.warning("%s: starting anew, the old results are in %s (%s)", output_dir, aside, "; ".join(reasons))


async def _ask_all(
    items: Sequence[Item], endpoint: Endpoint, sampling: Sampling, output_dir: Path, max_failed: int
) -> None:
    """Append a row for each item, as it finishes; stops early when the server answers nobody any more."""
    tally = _Tally(max_failed, patience=max(2 * endpoint.concurrency, 8))
    queue = iter(items)
    num_workers = min(endpoint.concurrency, len(items))
    with (
        (output_dir / RESULTS_FILE).open("a", encoding="utf-8") as file,
        EvaluationProgress(len(items)) as progress,
    ):
        clients = [ChatClient(endpoint, sampling) for _ in range(num_workers)]
        await asyncio.gather(*(_work(queue, client, file, progress, tally) for client in clients))


class _Tally:
    """Failed requests so far, and how many in a row."""

    def __init__(self, max_failed: int, patience: int) -> None:
        self._max_failed = max_failed
        self._patience = patience
        self._failed = 0
        self._in_a_row = 0

    def count(self, row: Row) -> None:
        """Count one finished row."""
        self._failed += not row.is_answered
        self._in_a_row = 0 if row.is_answered else self._in_a_row + 1

    @property
    def is_hopeless(self) -> bool:
        """True when the bound is passed and nothing has answered for a while: asking on would be in vain."""
        return self._failed > self._max_failed and self._in_a_row >= self._patience


async def _work(
    queue: Iterator[Item], client: ChatClient, file: TextIO, progress: EvaluationProgress, tally: _Tally
) -> None:
    async with client:
        for item in queue:
            row = _make_row(item, await client.ask(item.messages))
            file.write(row.to_line())
            file.flush()
            progress.advance(row.response_tokens)
            tally.count(row)
            if tally.is_hopeless:
                return


def _make_row(item: Item, outcome: Outcome) -> Row:
    graded = grade(outcome.text, outcome.finish_reason, item.gold)
    return Row(
        id=item.id,
        sample=0,
        prompt=item.messages,
        response=outcome.text,
        finish_reason=outcome.finish_reason,
        response_tokens=outcome.response_tokens,
        answer=graded.answer,
        gold=item.gold,
        verdict=graded.verdict,
        aisbench_answer=graded.aisbench_answer,
        aisbench_right=graded.aisbench_right,
        aisbench_raises=graded.aisbench_raises,
        attempts=outcome.attempts,
        seconds=round(outcome.seconds, 4),
        subject=item.subject,
        level=item.level,
        failure=outcome.failure,
    )
