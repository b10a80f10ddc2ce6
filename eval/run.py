"""Evaluate a served model on an evaluation set, resumably, into a results directory."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

from eval import EvaluationError
from eval.client import Endpoint, Sampling
from eval.dispatch import Dispatcher, Limits, Outcome, Request
from eval.event_loop import run_in_thread
from eval.judging import Judge, grader_name, open_judge
from eval.problems.items import EvaluationSet, Item
from eval.progress import EvaluationProgress
from eval.results import (
    GRADING_SETTINGS,
    RESULTS_FILE,
    SETTINGS_FILE,
    SUMMARY_FILE,
    Row,
    RowKey,
    differences,
    exclusive,
    make_folder,
    make_settings,
    read_rows,
    read_settings,
    write_atomically,
    write_rows,
)
from eval.samples import same_answer_by
from eval.summary import Summary, summarise

logger = logging.getLogger(__name__)

_NUM_GRADING_THREADS = 4


def evaluate(
    evaluation_set: EvaluationSet,
    endpoints: Sequence[Endpoint],
    sampling: Sampling,
    output_dir: str | Path,
    *,
    limits: Limits | None = None,
    model_digest: str | None = None,
    max_failed_ratio: float = 0.0,
    on_progress: Callable[[int, int], None] | None = None,
) -> Summary:
    """Ask for each sample of each item and return the summary, which is also written beside the rows.

    The endpoints serve one model and share the work. A directory with equal settings is continued: only missing
    rows and failed requests are asked; where just the grader or the gold answers differ, its rows are graded
    again. Other settings start anew, the old files moved to `superseded-N/`. Raises EvaluationError when more
    than `max_failed_ratio` of the requests failed; every finished row is kept for the next attempt. `on_progress`
    gets the number of requests that are done and of those to be done.
    """
    items = evaluation_set.items
    if not items or not endpoints:
        raise EvaluationError(f"{len(items)} items and {len(endpoints)} servers: nothing can be evaluated")
    sampling = replace(sampling, stop=evaluation_set.template.stop)
    settings = make_settings(
        items,
        endpoints[0],
        sampling,
        model_digest,
        benchmark=evaluation_set.benchmark,
        template=evaluation_set.template,
        grader=grader_name(evaluation_set.ruler),
    )
    output_dir = make_folder(output_dir)
    with exclusive(output_dir):
        wanted = [(item, sample) for item in items for sample in range(sampling.num_samples)]
        with open_judge(evaluation_set.ruler) as judge:
            rows = _resume(output_dir, settings, items, judge)
            missing = [Request(item, sample) for item, sample in wanted if (item.id, sample) not in rows]
            max_failed = int(max_failed_ratio * len(wanted))
            if missing:
                dispatcher = Dispatcher(endpoints, sampling, limits or Limits())
                recorder = _Recorder(output_dir, judge, dispatcher, max_failed, on_progress)
                run_in_thread(recorder.record(missing), dispatcher.stop)
                rows = read_rows(output_dir)
                _refuse_failures(rows, dispatcher, endpoints, max_failed, len(wanted), output_dir)
            # Rows are appended as they finish; a finished file has the items' order.
            ordered = [rows[item.id, sample] for item, sample in wanted]
            write_rows(output_dir, ordered)
            summary = summarise(ordered, settings, same_answer_by(judge.grade))
        text = json.dumps(asdict(summary), indent=2, ensure_ascii=False)
        write_atomically(output_dir / SUMMARY_FILE, text + "\n")
    _log(summary)
    return summary


def regrade_row(row: Row, judge: Judge, item: Item | None = None) -> Row:
    """The row with the verdicts of a judge, and with the gold answer, subject and level of the item if given."""
    if item is not None:
        row = replace(row, gold=item.gold, subject=item.subject, level=item.level)
    graded = judge.grade(row.response, row.finish_reason, row.gold)
    return replace(row, **asdict(graded))


def _resume(output_dir: Path, settings: dict[str, Any], items: Sequence[Item], judge: Judge) -> dict[RowKey, Row]:
    """Rows of an earlier attempt that can be kept; leaves the directory ready to be appended to."""
    stored = read_settings(output_dir)
    graded_alike = {**settings, **{key: (stored or {}).get(key) for key in GRADING_SETTINGS}}
    if stored != graded_alike:
        if stored is not None or (output_dir / RESULTS_FILE).exists():
            _move_aside(output_dir, differences(stored or {}, settings))
        write_atomically(output_dir / SETTINGS_FILE, json.dumps(settings, indent=2) + "\n")
        return {}
    rows = {key: row for key, row in read_rows(output_dir).items() if row.is_answered}
    if stored != settings:
        logger.warning("%s: grading again (%s)", output_dir, "; ".join(differences(stored, settings)))
        (output_dir / SUMMARY_FILE).unlink(missing_ok=True)
        by_id = {item.id: item for item in items}
        with ThreadPoolExecutor(_NUM_GRADING_THREADS) as threads:
            graded = threads.map(lambda row: regrade_row(row, judge, by_id[row.id]), rows.values())
            rows = {row.key: row for row in graded}
    # A torn last line has no newline: the next row must not be appended to it.
    write_rows(output_dir, rows.values())
    write_atomically(output_dir / SETTINGS_FILE, json.dumps(settings, indent=2) + "\n")
    if rows:
        num_rows = settings["num_items"] * settings["sampling"]["num_samples"]
        logger.info("%s: continuing, %d of %d items are answered", output_dir, len(rows), num_rows)
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


class _Recorder:
    """Appends a row for each outcome, graded beside the requests; stops them when nobody answers any more."""

    def __init__(
        self,
        output_dir: Path,
        judge: Judge,
        dispatcher: Dispatcher,
        max_failed: int,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self._output_dir = output_dir
        self._judge = judge
        self._dispatcher = dispatcher
        self._max_failed = max_failed
        self._on_progress = on_progress
        self._failed = 0
        self._failed_in_a_row = 0
        self._grading: set[asyncio.Task[None]] = set()

    async def record(self, requests: Sequence[Request]) -> None:
        """Rows of all requests that came to an end, also of those before an interruption."""
        with (
            (self._output_dir / RESULTS_FILE).open("a", encoding="utf-8") as file,
            ThreadPoolExecutor(_NUM_GRADING_THREADS) as threads,
            EvaluationProgress(len(requests), self._on_progress) as progress,
        ):

            def finish(request: Request, outcome: Outcome) -> asyncio.Task[None]:
                task = asyncio.create_task(self._write(request, outcome, file, threads, progress))
                self._grading.add(task)
                task.add_done_callback(self._stop_on_error)
                return task

            try:
                await self._dispatcher.run(requests, finish)
            finally:
                await asyncio.gather(*self._grading)

    def _stop_on_error(self, task: asyncio.Task[None]) -> None:
        """Ask no more when a row could not be written; `record` raises the reason."""
        if task.cancelled() or task.exception() is not None:
            self._dispatcher.stop()

    async def _write(
        self,
        request: Request,
        outcome: Outcome,
        file: TextIO,
        threads: ThreadPoolExecutor,
        progress: EvaluationProgress,
    ) -> None:
        loop = asyncio.get_running_loop()
        row = await loop.run_in_executor(threads, regrade_row, _make_row(request, outcome), self._judge)
        file.write(row.to_line())
        file.flush()
        progress.advance(row.response_tokens)
        self._failed += not row.is_answered
        self._failed_in_a_row = 0 if row.is_answered else self._failed_in_a_row + 1
        if self._failed > self._max_failed and self._failed_in_a_row >= self._dispatcher.patience:
            self._dispatcher.stop()


def _make_row(request: Request, outcome: Outcome) -> Row:
    """The row of an outcome, not yet graded."""
    item, answer = request.item, outcome.answer
    return Row(
        id=item.id,
        sample=request.sample,
        prompt=item.prompt,
        response=answer.text if answer else None,
        finish_reason=answer.finish_reason if answer else None,
        response_tokens=answer.response_tokens if answer else None,
        answer=None,
        gold=item.gold,
        verdict="request_failed",
        aisbench_answer=None,
        aisbench_right=False,
        aisbench_raises=False,
        attempts=outcome.attempts,
        seconds=round(outcome.seconds, 4),
        subject=item.subject,
        level=item.level,
        failure=outcome.failure,
    )


def _refuse_failures(
    rows: dict[RowKey, Row],
    dispatcher: Dispatcher,
    endpoints: Sequence[Endpoint],
    max_failed: int,
    num_wanted: int,
    output_dir: Path,
) -> None:
    """Raise EvaluationError when requests failed beyond the bound, or were not asked at all."""
    failures = [row for row in rows.values() if not row.is_answered]
    unasked = num_wanted - len(rows)
    if len(failures) <= max_failed and not unasked:
        return
    given_up = f", {unasked} were not asked any more because nothing answered" if unasked else ""
    reason = failures[0].failure if failures else dispatcher.outage
    servers = ", ".join(endpoint.base_url for endpoint in endpoints)
    raise EvaluationError(
        f"{len(failures)} of {num_wanted} requests to {servers} failed{given_up}; "
        f"at most {max_failed} may (evaluate.max_failed_ratio). First reason: {reason}. "
        f"The answered items are kept in {output_dir}: the same evaluation continues from them."
    )


def _log(summary: Summary) -> None:
    logger.info(
        "accuracy %.1f %% on %d responses (AISBench's rule %.1f %%, no answer %.1f %%, truncated %.1f %%, "
        "failed requests %.1f %%)",
        100 * summary.accuracy,
        summary.n,
        100 * summary.aisbench["accuracy"],
        100 * summary.no_answer_rate,
        100 * summary.truncated_rate,
        100 * summary.request_failed_rate,
    )
    if summary.repeats and summary.repeats["differing_responses"]:
        logger.warning(
            "greedy repeats differ on %.1f %% of %d items (answers on %.1f %%): this server is not deterministic",
            100 * summary.repeats["differing_responses"],
            summary.repeats["num_items"],
            100 * summary.repeats["differing_answers"],
        )
