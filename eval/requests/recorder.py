"""Writes a results folder: resumes stored rows, lists missing requests, records graded answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO

from eval import EvaluationError, InputError, RequestsRefused
from eval.answers.extraction import split_thinking
from eval.answers.grading import Grade, Grader
from eval.endpoint import Endpoint, Sampling
from eval.problems.items import EvaluationSet, Item
from eval.requests.dispatch import Batch, Outcome, Request
from eval.requests.identity import HAS_FILES, Weights
from eval.results.pictures import keep_pictures
from eval.results.rows import (
    GRADING_SETTINGS,
    RESULTS_FILE,
    SERVED,
    SETTINGS_FILE,
    SUMMARY_FILE,
    Evaluation,
    ResultsError,
    Row,
    RowKey,
    describe_differences,
    join_lines,
    read_rows,
    read_settings,
    write_json,
    write_rows,
)
from eval.results.summary import Summary, mean_response_tokens, write_summary

logger = logging.getLogger(__name__)

_NUM_GRADING_THREADS = 4
_ROUNDING = 0.001  # seconds, of times in rows


@dataclass(frozen=True)
class Benchmark:
    """Problems to evaluate, how to sample responses, and where to write the results."""

    evaluation_set: EvaluationSet
    sampling: Sampling
    output_dir: Path
    name: str = ""  # in messages; "" for a single benchmark
    max_failed_ratio: float = 0.0
    grader: Grader | None = None  # replaces the set's grader
    # results of the same items by any model, to estimate response lengths
    earlier: Path | None = None

    @property
    def requested(self) -> Sampling:
        """The sampling of its requests, with r times as many samples for problems on r rows."""
        num_samples = self.evaluation_set.num_repeats * self.sampling.num_samples
        return replace(
            self.sampling, stop=self.evaluation_set.template.stop, num_samples=num_samples
        )


class Recorder:
    """The rows of one benchmark: valid ones from earlier attempts, then each new one."""

    def __init__(self, benchmark: Benchmark, settings: dict[str, Any], grader: Grader) -> None:
        """Prepare the folder for more rows. The caller holds its lock."""
        self.name, self.folder, self.settings = benchmark.name, benchmark.output_dir, settings
        self._benchmark, self._grader = benchmark, grader
        self._sampling, items = benchmark.requested, benchmark.evaluation_set.items
        keep_pictures(items, self.folder)
        self._expected = [
            (item, sample) for item in items for sample in range(self._sampling.num_samples)
        ]
        # Exact, because the float 0.29 * 100 is below 29.
        self._max_failed = int(Fraction(str(benchmark.max_failed_ratio)) * len(self._expected))
        self._rows = _resume(
            self.folder,
            settings,
            {(item.id, sample): item for item, sample in self._expected},
            grader,
        )
        self.num_missing = sum(
            (item.id, sample) not in self._rows for item, sample in self._expected
        )
        self._num_failed = self._num_failed_in_a_row = self._num_refused = 0
        self._advice = ""  # of the first failure
        self._file: BinaryIO | None = None

    @property
    def served(self) -> Weights | None:
        """The weights that produced the answers so far."""
        return Weights.of(self.settings.get(SERVED))

    def missing(self) -> list[tuple[float, Request]]:
        """Return the missing requests, each with its expected response tokens.

        The estimate is the mean of known answers to the item by any model, else the mean of all
        known answers, else the token limit.
        """
        known = [*self._rows.values(), *_rows_of(self._benchmark.earlier)]
        by_item: dict[str, list[Row]] = {}
        for row in known:
            by_item.setdefault(row.id, []).append(row)
        usual = mean_response_tokens(known) or self._sampling.max_tokens or 0
        lengths = {
            identity: mean_response_tokens(rows) or usual for identity, rows in by_item.items()
        }
        return [
            (lengths.get(item.id, usual), Request(item, sample, self._sampling, self.name))
            for item, sample in self._expected
            if (item.id, sample) not in self._rows
        ]

    def keep_weights(self, weights: Weights, endpoint: Endpoint) -> None:
        """Store which weights produce the answers, and who serves them."""
        self.settings[SERVED] = {
            **weights.to_json(),
            HAS_FILES: weights.has_local_files,
            "name": endpoint.model,
            "url": endpoint.address,
        }
        write_json(self.folder / SETTINGS_FILE, self.settings)

    async def grade(self, batch: Batch) -> list[Row]:
        """Grade outcomes into rows. Only those that need a process take a thread."""
        rows, slow = list[Row](), list[tuple[Row, Item]]()
        for request, outcome in batch:
            row, item = _make_row(request, outcome), request.item
            quick = self._grader.grade_quickly(row.text, row.finish_reason, item, row.is_chat)
            if quick is None:
                slow.append((row, item))
            else:
                _set_grade(row, quick)
                rows.append(row)
        waiting = (asyncio.to_thread(regrade_row, row, self._grader, item) for row, item in slow)
        return rows + await asyncio.gather(*waiting)

    def append(self, rows: Sequence[Row], batch: Batch) -> None:
        """Append rows to results.jsonl."""
        if self._file is None:
            self._file = (self.folder / RESULTS_FILE).open("ab")
        self._file.write(join_lines(rows))
        self._file.flush()
        self.num_missing -= len(rows)
        self._num_refused += sum(outcome.is_refused for _, outcome in batch)
        self._advice = next(filter(None, (self._advice, *(one.advice for _, one in batch))), "")
        self._num_failed += sum(not row.is_answered for row in rows)
        for row in rows:
            self._rows[row.key] = row
            self._num_failed_in_a_row = 0 if row.is_answered else self._num_failed_in_a_row + 1

    def is_hopeless(self, max_consecutive_failures: int) -> bool:
        """True if too many requests failed, and nothing but failures came back lately."""
        return (
            self._num_failed > self._max_failed
            and self._num_failed_in_a_row >= max_consecutive_failures
        )

    def close(self, unchecked_since: float) -> None:
        """Close results.jsonl and drop answers that arrived since that time."""
        if self._file is not None:
            self._file.close()
        kept = {
            key: row
            for key, row in self._rows.items()
            if not row.is_answered or (row.ended_at or 0.0) + _ROUNDING < unchecked_since
        }
        if num_dropped := len(self._rows) - len(kept):
            logger.warning(
                "%s: dropping %d responses that arrived after a failed request, before the server "
                "showed that it still serves the same model; the next attempt requests them again",
                self.folder,
                num_dropped,
            )
            self._rows = kept
            write_rows(self.folder, kept.values())

    def set_aside(self, reason: str) -> None:
        """Move all rows to `superseded-N/`, since another model may have produced some of them."""
        _move_aside(self.folder, [reason])
        self._rows.clear()

    def finish(self, server: str, outage: str) -> Summary:
        """Sort the rows like the items, and write and return the summary.

        Raises EvaluationError if too many requests failed or some were not sent, RequestsRefused if
        the server refused all failed ones.
        """
        self._check_failures(server, outage)
        ordered = [self._rows[item.id, sample] for item, sample in self._expected]
        write_rows(self.folder, ordered)
        _check_scorer([row for row in ordered if row.is_answered], self._grader.rule)
        summary = write_summary(
            self.folder, Evaluation.of(self.settings, ordered), self._grader.grade
        )
        _log(summary, self.name)
        return summary

    def _check_failures(self, server: str, outage: str) -> None:
        failures = [row for row in self._rows.values() if not row.is_answered]
        num_unsent = len(self._expected) - len(self._rows)
        if len(failures) <= self._max_failed and not num_unsent:
            return
        unsent = f", {num_unsent} were not answered" if num_unsent else ""
        reason = failures[0].failure if failures else outage
        message = (
            f"{len(failures)} of {len(self._expected)} requests to {server} failed{unsent}; at "
            f"most {self._max_failed} may (evaluate.max_failed_ratio). First reason: {reason}. "
            f"{self._advice + ' ' if self._advice else ''}The answers so far are kept in "
            f"{self.folder}: run the same evaluation again to continue."
        )
        if 0 < self._num_refused == self._num_failed:
            raise RequestsRefused(message)
        raise EvaluationError(message)


def _check_scorer(rows: Sequence[Row], rule: str) -> None:
    """Raise InputError if the scorer failed on every response."""
    errors = list(filter(None, map(scorer_error, rows)))
    if errors and len(errors) == len(rows):
        raise InputError(
            f"{rule} failed on all {len(rows)} responses, so nothing is graded; correct "
            "evaluate.scorer and repeat the command, which sends no request again. First failure: "
            f"{errors[0]}"
        )


def scorer_error(row: Row) -> str:
    """Why the scorer failed on the row, or ""."""
    return str((row.details or {}).get("error", ""))


def regrade_row(row: Row, grader: Grader, item: Item | None = None) -> Row:
    """Grade a row again, with the gold answer, subject and level of the item if given."""
    row = copy(row)
    if row.reasoning is None and row.response is not None:
        row.reasoning, row.response = split_thinking(row.response)
    if item is None:
        graded = grader.grade(row.text, row.finish_reason, row.gold, row.is_chat)
    else:
        row.gold, row.subject, row.level = item.gold, item.subject, item.level
        graded = grader.grade_item(row.text, row.finish_reason, item, row.is_chat)
    _set_grade(row, graded)
    return row


def _set_grade(row: Row, grade: Grade) -> None:
    row.answer, row.verdict, row.aisbench, details = grade
    row.details = details or row.details
    if row.is_cut_while_thinking:
        row.verdict, row.answer = "truncated", None


def _resume(
    output_dir: Path, settings: dict[str, Any], expected: Mapping[RowKey, Item], grader: Grader
) -> dict[RowKey, Row]:
    """Return the valid rows of an earlier attempt and prepare the folder for more.

    Raises ResultsError for rows that answer no expected item.
    """
    stored = read_settings(output_dir) or {}
    served = stored.pop(SERVED, None)
    rows: dict[RowKey, Row] = {}
    if _without_grading(stored) != _without_grading(settings):
        if stored or (output_dir / RESULTS_FILE).exists():
            _move_aside(output_dir, describe_differences(stored, settings))
    else:
        found = read_rows(output_dir)
        _refuse_foreign(output_dir, found, expected)
        rows = {key: row for key, row in found.items() if row.is_answered}
        reasons = describe_differences(stored, settings)
        stale = [row for row in rows.values() if reasons or scorer_error(row)]
        if stale:
            why = "; ".join(reasons) or "the scorer failed on them"
            logger.warning("%s: regrading %d stored responses (%s)", output_dir, len(stale), why)
            (output_dir / SUMMARY_FILE).unlink(missing_ok=True)
            with ThreadPoolExecutor(_NUM_GRADING_THREADS) as threads:
                graded = threads.map(lambda row: regrade_row(row, grader, expected[row.key]), stale)
                rows |= {row.key: row for row in graded}
        write_rows(output_dir, rows.values())  # drops a torn last line before appending
    if rows:
        settings[SERVED] = served
    write_json(output_dir / SETTINGS_FILE, settings)
    if rows:
        num_rows = settings["num_items"] * settings["sampling"]["num_samples"]
        logger.info(
            "%s: continuing, %d of %d responses are stored", output_dir, len(rows), num_rows
        )
    return rows


def _refuse_foreign(
    output_dir: Path, rows: Mapping[RowKey, Row], expected: Mapping[RowKey, Item]
) -> None:
    """Raise ResultsError for rows of other items, samples or prompts: someone edited them."""
    foreign = [
        row
        for key, row in rows.items()
        if key not in expected
        or row.prompt != expected[key].prompt
        or (row.images or []) != expected[key].image_names
    ]
    if foreign:
        raise ResultsError(
            f"{output_dir / RESULTS_FILE}: {len(foreign)} of {len(rows)} rows answer no request of "
            f"this evaluation (first: item {foreign[0].id!r}, sample {foreign[0].sample}): the "
            "file was edited, or joined with another. Remove these rows and repeat the command, or "
            "choose another --output"
        )


def _rows_of(earlier: Path | None) -> Iterable[Row]:
    """Return the outlines of earlier results, or nothing if another version wrote them."""
    if earlier is not None:
        with contextlib.suppress(ResultsError):
            return read_rows(earlier, max_chars=0).values()
    return ()


def _without_grading(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in GRADING_SETTINGS}


def _move_aside(output_dir: Path, reasons: Sequence[str]) -> None:
    number = 1
    while (aside := output_dir / f"superseded-{number}").exists():
        number += 1
    aside.mkdir()
    for name in (RESULTS_FILE, SETTINGS_FILE, SUMMARY_FILE):
        if (output_dir / name).exists():
            (output_dir / name).rename(aside / name)
    logger.warning("%s: moved the old results to %s (%s)", output_dir, aside, "; ".join(reasons))


def _make_row(request: Request, outcome: Outcome) -> Row:
    """Make the ungraded row of an outcome."""
    item, answer = request.item, outcome.answer
    reasoning, response = (answer.reasoning, answer.text) if answer else (None, None)
    if reasoning is None and response is not None:
        reasoning, response = split_thinking(response)
    return Row(
        id=item.id,
        sample=request.sample,
        prompt=item.prompt,
        response=response,
        finish_reason=answer.finish_reason if answer else None,
        response_tokens=answer.response_tokens if answer else None,
        answer=None,
        gold=item.gold,
        verdict="request_failed",
        attempts=outcome.attempts,
        seconds=round(outcome.seconds, 4),
        subject=item.subject,
        level=item.level,
        failure=outcome.failure,
        ended_at=round(outcome.ended_at, 3),
        reasoning=reasoning,
        reasoning_tokens=answer.reasoning_tokens if answer else None,
        details=answer.details if answer else None,
        images=item.image_names or None,
    )


def _log(summary: Summary, name: str) -> None:
    logger.info(
        "%saccuracy %.1f %% on %d responses (%sno answer %.1f %%, truncated %.1f %%, failed "
        "requests %.1f %%)",
        f"{name}: " if name else "",
        100 * summary.accuracy,
        summary.n,
        f"AISBench's rule {100 * summary.aisbench['accuracy']:.1f} %, " if summary.aisbench else "",
        100 * summary.no_answer_rate,
        100 * summary.truncated_rate,
        100 * summary.request_failed_rate,
    )
    if (scorer := summary.scorer) is not None:
        logger.info(
            "mean score %.3f; the scorer failed on %d responses",
            scorer["mean_score"],
            scorer["errors"],
        )
    if summary.repeats and summary.repeats["differing_responses"]:
        logger.warning(
            "greedy samples differ on %.1f %% of %d items (answers on %.1f %%): this server is not "
            "deterministic",
            100 * summary.repeats["differing_responses"],
            summary.repeats["num_items"],
            100 * summary.repeats["differing_answers"],
        )
