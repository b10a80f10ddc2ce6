"""Evaluate a served model on an evaluation set, resumably, into a results directory."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from eval import EvaluationError, RequestsRefused
from eval.answers.grading import GRADERS, Grader
from eval.client import Endpoint, Sampling
from eval.dispatch import Dispatcher, Limits, Outcome, Request, run_in_thread
from eval.identity import ModelChangedError, Weights
from eval.problems.items import EvaluationSet, Item
from eval.results import (
    GRADING_SETTINGS,
    RESULTS_FILE,
    SERVED,
    SETTINGS_FILE,
    SUMMARY_FILE,
    Evaluation,
    Row,
    RowKey,
    describe_differences,
    exclusive,
    make_folder,
    make_settings,
    read_rows,
    read_settings,
    write_json,
    write_rows,
)
from eval.summary import Summary, same_answer_by, summarise

logger = logging.getLogger(__name__)

_NUM_GRADING_THREADS = 4
REFUSED = (
    "The server refuses these requests as they are, and would again: a prompt too long for serve.max_model_len, a "
    "model without a chat template, or another API (evaluate.api) are the usual reasons."
)

OnProgress = Callable[[int, int], None]  # requests finished, and in all


def evaluate(
    evaluation_set: EvaluationSet,
    endpoints: Sequence[Endpoint],
    sampling: Sampling,
    output_dir: str | Path,
    *,
    limits: Limits | None = None,
    model_digest: str | None = None,
    max_failed_ratio: float = 0.0,
    on_progress: OnProgress | None = None,
) -> Summary:
    """Ask for each sample of each item and return the summary, which is also written beside the rows.

    A problem that is on r rows of its file has r times `sampling.num_samples` samples. The endpoints serve one
    model and share the work. A directory with equal settings is continued: only missing rows and failed requests
    are asked. If only the grader or the gold answers differ, its rows are graded again. With other settings the
    evaluation starts over, and the old files move to `superseded-N/`. Raises EvaluationError when more than
    `max_failed_ratio` of the requests failed, and RequestsRefused when all of these were refused as they are;
    every finished row is kept for the next attempt.
    """
    items = evaluation_set.items
    if not items or not endpoints:
        raise EvaluationError(f"{len(items)} items and {len(endpoints)} servers: nothing can be evaluated")
    num_samples = evaluation_set.num_repeats * sampling.num_samples
    sampling = replace(sampling, stop=evaluation_set.template.stop, num_samples=num_samples)
    if evaluation_set.num_repeats > 1:
        _log_repeats(evaluation_set, sampling)
    settings = make_settings(
        items,
        endpoints[0],
        sampling,
        model_digest,
        benchmark=evaluation_set.benchmark,
        template=evaluation_set.template,
        grader=GRADERS[evaluation_set.grader].rule,
    )
    output_dir = make_folder(output_dir)
    wanted = [(item, sample) for item in items for sample in range(sampling.num_samples)]
    with exclusive(output_dir), GRADERS[evaluation_set.grader]() as grader:
        rows = _resume(output_dir, settings, items, grader)
        missing = [Request(item, sample) for item, sample in wanted if (item.id, sample) not in rows]
        if missing:
            max_failed = int(max_failed_ratio * len(wanted))
            dispatcher = Dispatcher(endpoints, sampling, limits or Limits(), Weights.of(settings.get(SERVED)))
            recorder = _Recorder(output_dir, settings, grader, dispatcher, max_failed, on_progress)
            recorder.ask(missing)
            rows = read_rows(output_dir)
            try:
                _refuse_failures(rows, dispatcher, endpoints, max_failed, len(wanted), output_dir)
            except EvaluationError as error:
                if recorder.only_refused:
                    raise RequestsRefused(f"{error} {REFUSED}") from None
                raise
        # Rows are appended as they finish; a finished file has the items' order.
        ordered = [rows[item.id, sample] for item, sample in wanted]
        write_rows(output_dir, ordered)
        summary = summarise(Evaluation.of(settings, ordered), same_answer_by(grader.grade))
        write_json(output_dir / SUMMARY_FILE, asdict(summary))
    _log(summary)
    return summary


def _log_repeats(evaluation_set: EvaluationSet, sampling: Sampling) -> None:
    logger.info(
        "%d problems on %d rows each: every problem is one item with %d samples",
        len(evaluation_set.items), evaluation_set.num_repeats, sampling.num_samples,
    )  # fmt: skip
    if sampling.temperature == 0:
        logger.warning("at temperature 0 the samples of an item are alike; set evaluate.temperature for avg@k")


def regrade_row(row: Row, grader: Grader, item: Item | None = None) -> Row:
    """The row with new verdicts, and with the gold answer, subject and level of the item if given."""
    if item is not None:
        row = replace(row, gold=item.gold, subject=item.subject, level=item.level)
    is_chat = not isinstance(row.prompt, str)
    graded = grader.grade(row.response, row.finish_reason, row.gold, is_chat)
    return replace(row, **asdict(graded))


def _resume(
    output_dir: Path, settings: dict[str, Any], items: Sequence[Item], grader: Grader
) -> dict[RowKey, Row]:
    """The rows of an earlier attempt that can be kept; leaves the directory ready for more."""
    stored = read_settings(output_dir) or {}
    served = stored.pop(SERVED, None)
    rows: dict[RowKey, Row] = {}
    if stored != {**settings, **{key: stored.get(key) for key in GRADING_SETTINGS}}:
        if stored or (output_dir / RESULTS_FILE).exists():
            _move_aside(output_dir, describe_differences(stored, settings))
    else:
        rows = {key: row for key, row in read_rows(output_dir).items() if row.is_answered}
        if stored != settings:
            reasons = "; ".join(describe_differences(stored, settings))
            logger.warning("%s: grading again (%s)", output_dir, reasons)
            (output_dir / SUMMARY_FILE).unlink(missing_ok=True)
            by_id = {item.id: item for item in items}
            with ThreadPoolExecutor(_NUM_GRADING_THREADS) as threads:
                graded = threads.map(lambda row: regrade_row(row, grader, by_id[row.id]), rows.values())
                rows = {row.key: row for row in graded}
        write_rows(output_dir, rows.values())  # without a torn last line: rows are appended
    if rows:
        settings[SERVED] = served
    write_json(output_dir / SETTINGS_FILE, settings)
    if rows:
        num_rows = settings["num_items"] * settings["sampling"]["num_samples"]
        logger.info("%s: continuing, %d of %d items are answered", output_dir, len(rows), num_rows)
    return rows


def _move_aside(output_dir: Path, reasons: Sequence[str]) -> None:
    number = 1
    while (aside := output_dir / f"superseded-{number}").exists():
        number += 1
    aside.mkdir()
    for name in (RESULTS_FILE, SETTINGS_FILE, SUMMARY_FILE):
        if (output_dir / name).exists():
            (output_dir / name).rename(aside / name)
    logger.warning("%s: the old results are now in %s (%s)", output_dir, aside, "; ".join(reasons))


class _Recorder:
    """Appends a graded row for each outcome; stops the requests when only failures come back."""

    def __init__(
        self,
        output_dir: Path,
        settings: dict[str, Any],
        grader: Grader,
        dispatcher: Dispatcher,
        max_failed: int,
        on_progress: OnProgress | None,
    ) -> None:
        self._output_dir = output_dir
        self._settings = settings
        self._grader = grader
        self._dispatcher = dispatcher
        self._max_failed = max_failed
        self._on_progress = on_progress
        self._num_failed = 0
        self._num_failed_in_a_row = 0
        self._num_refused = 0

    @property
    def only_refused(self) -> bool:
        """Whether every failed request was refused as it is, so that another attempt would end alike."""
        return 0 < self._num_refused == self._num_failed

    def ask(self, requests: Sequence[Request]) -> None:
        """Run the requests and record each that ends, also when they are interrupted.

        Raises ModelChangedError, and moves every row aside if any may be another model's.
        """
        try:
            run_in_thread(self._record(requests), self._dispatcher.stop)
        except ModelChangedError as error:
            if error.is_late:
                _move_aside(self._output_dir, [str(error)])
            raise

    async def _record(self, requests: Sequence[Request]) -> None:
        with (
            (self._output_dir / RESULTS_FILE).open("a", encoding="utf-8") as file,
            ThreadPoolExecutor(_NUM_GRADING_THREADS) as threads,
            _Progress(len(requests), self._on_progress) as progress,
        ):

            async def finish(request: Request, outcome: Outcome) -> None:
                loop = asyncio.get_running_loop()
                row = await loop.run_in_executor(threads, regrade_row, _make_row(request, outcome), self._grader)
                self._append(row, file)
                self._num_refused += outcome.is_refused
                progress.advance(row.response_tokens)

            await self._dispatcher.run(requests, finish, self._keep_weights)
            await self._dispatcher.check_at_end()

    def _keep_weights(self, weights: Weights) -> None:
        self._settings[SERVED] = weights.to_json()
        write_json(self._output_dir / SETTINGS_FILE, self._settings)

    def _append(self, row: Row, file: TextIO) -> None:
        file.write(row.to_line())
        file.flush()
        self._num_failed += not row.is_answered
        self._num_failed_in_a_row = 0 if row.is_answered else self._num_failed_in_a_row + 1
        if self._num_failed > self._max_failed and self._num_failed_in_a_row >= self._dispatcher.patience:
            self._dispatcher.stop()


class _Progress:
    """How far an evaluation is: a bar on a terminal, otherwise a log line every tenth."""

    def __init__(self, num_requests: int, on_progress: OnProgress | None) -> None:
        self._num_requests = num_requests
        self._on_progress = on_progress
        self._num_done = self._num_tokens = 0
        self._start = time.monotonic()
        self._bar = Progress(
            TextColumn("evaluate"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"),
            TextColumn("left:"), TimeRemainingColumn(), refresh_per_second=4, disable=not sys.stderr.isatty(),
        )  # fmt: skip
        self._task = self._bar.add_task("evaluate", total=num_requests, speed="")

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def advance(self, response_tokens: int | None) -> None:
        """Count one finished request."""
        self._num_done += 1
        self._num_tokens += response_tokens or 0
        if self._on_progress is not None:
            self._on_progress(self._num_done, self._num_requests)
        seconds = max(time.monotonic() - self._start, 1e-9)
        speed = f"{self._num_tokens / seconds:.0f} tokens/s"
        self._bar.update(self._task, advance=1, speed=speed)
        is_tenth = 10 * self._num_done // self._num_requests > 10 * (self._num_done - 1) // self._num_requests
        if self._bar.disable and is_tenth:
            left = seconds / self._num_done * (self._num_requests - self._num_done)
            done = f"{self._num_done} of {self._num_requests} items done"
            logger.info("%s, %s, about %.0f s left", done, speed, left)


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
        ended_at=round(time.time(), 3),
    )


def _refuse_failures(
    rows: dict[RowKey, Row],
    dispatcher: Dispatcher,
    endpoints: Sequence[Endpoint],
    max_failed: int,
    num_wanted: int,
    output_dir: Path,
) -> None:
    """Raise EvaluationError when too many requests failed, or some were not sent."""
    failures = [row for row in rows.values() if not row.is_answered]
    unasked = num_wanted - len(rows)
    if len(failures) <= max_failed and not unasked:
        return
    given_up = f", {unasked} were not sent because nothing answered" if unasked else ""
    reason = failures[0].failure if failures else dispatcher.outage
    servers = ", ".join(endpoint.base_url for endpoint in endpoints)
    raise EvaluationError(
        f"{len(failures)} of {num_wanted} requests to {servers} failed{given_up}; "
        f"at most {max_failed} may (evaluate.max_failed_ratio). First reason: {reason}. "
        f"The answers so far are kept in {output_dir}: run the same evaluation again to continue."
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
