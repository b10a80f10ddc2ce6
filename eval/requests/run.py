"""Evaluates a served model on benchmarks, each into a results folder that can be resumed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from eval import EvaluationError
from eval.answers.grading import GRADERS
from eval.endpoint import Endpoint
from eval.requests.dispatch import Batch, Dispatcher, Limits, Outcome, Request, run_in_thread
from eval.requests.identity import ModelChangedError, Weights
from eval.requests.recorder import Benchmark, Recorder
from eval.results.rows import Row, exclusive, make_folder, make_settings
from eval.results.summary import Summary
from heartbeat import heartbeat

logger = logging.getLogger(__name__)

OnProgress = Callable[[int, int], None]  # (finished requests, all requests)
_BATCH_SECONDS = 0.05  # results that a kill may cost, beside the requests in flight
_MAX_PENDING = 4096  # outcomes not yet recorded; beyond that the workers wait


def evaluate_all(
    benchmarks: Sequence[Benchmark],
    endpoint: Endpoint,
    *,
    limits: Limits | None = None,
    model_digest: str | None = None,
    on_progress: OnProgress | None = None,
) -> list[Summary]:
    """Evaluate all benchmarks in one session. Returns their summaries, also written to files.

    A problem on r rows of its file gets r times `sampling.num_samples` samples. The requests
    expected to take longest are sent first. A folder with equal settings is resumed: only missing
    rows and failed requests are sent. If only the grader or the gold answers differ, stored rows
    are graded again. Otherwise the benchmark starts over, and the old files move to
    `superseded-N/`.

    Raises EvaluationError if more than `max_failed_ratio` of a benchmark's requests failed, or
    RequestsRefused if the server refused all of those. Finished rows are kept for the next attempt,
    and other benchmarks are completed.
    """
    for benchmark in benchmarks:
        if not benchmark.evaluation_set.items:
            raise EvaluationError("0 items: nothing can be evaluated")
    with contextlib.ExitStack() as stack:
        recorders = []
        for benchmark in benchmarks:
            stack.enter_context(exclusive(make_folder(benchmark.output_dir)))
            grader = stack.enter_context(
                benchmark.grader or GRADERS[benchmark.evaluation_set.grader]()
            )
            settings = _settings(benchmark, endpoint, model_digest, grader.rule)
            recorders.append(Recorder(benchmark, settings, grader))
        incomplete = [recorder for recorder in recorders if recorder.num_missing]
        known = next(
            (served for recorder in recorders if (served := recorder.served) is not None), None
        )
        dispatcher = Dispatcher(endpoint, limits or Limits(), known)
        if incomplete:
            _Session(incomplete, dispatcher, endpoint, known).run(on_progress)
        return _finish(recorders, endpoint.address, dispatcher.outage)


def _settings(
    benchmark: Benchmark, endpoint: Endpoint, model_digest: str | None, rule: str
) -> dict[str, Any]:
    evaluation_set, sampling = benchmark.evaluation_set, benchmark.requested
    if evaluation_set.num_repeats > 1:
        logger.info(
            "%d problems on %d rows each: every problem is one item with %d samples",
            len(evaluation_set.items),
            evaluation_set.num_repeats,
            sampling.num_samples,
        )
        if sampling.temperature == 0:
            logger.warning(
                "all samples of an item are alike at temperature 0; set evaluate.temperature for "
                "avg@k"
            )
    return make_settings(
        evaluation_set.items,
        endpoint,
        sampling,
        model_digest,
        benchmark=evaluation_set.benchmark,
        template=evaluation_set.template,
        grader=rule,
    )


def _finish(recorders: Sequence[Recorder], server: str, outage: str) -> list[Summary]:
    """Write and return all summaries. Raises the failures of benchmarks as one error after that."""
    summaries, failures = [], dict[str, EvaluationError]()
    for recorder in recorders:
        try:
            summaries.append(recorder.finish(server, outage))
        except EvaluationError as error:
            failures[recorder.name] = error
    if failures:
        kinds = {type(error) for error in failures.values()}
        message = " ".join(
            f"{name}: {error}" if name else str(error) for name, error in failures.items()
        )
        raise (kinds.pop() if len(kinds) == 1 else EvaluationError)(message)
    return summaries


class _Session:
    """Sends the missing requests of several benchmarks as one queue."""

    def __init__(
        self,
        recorders: Sequence[Recorder],
        dispatcher: Dispatcher,
        endpoint: Endpoint,
        weights: Weights | None,
    ) -> None:
        self._recorders = {recorder.name: recorder for recorder in recorders}
        self._dispatcher, self._endpoint = dispatcher, endpoint
        if weights is not None:
            self._keep_weights(weights)

    def run(self, on_progress: OnProgress | None) -> None:
        """Send the requests and record each outcome, up to an interruption.

        Raises ModelChangedError, after moving the rows aside if another model may have produced
        some of them.
        """
        missing = [pair for recorder in self._recorders.values() for pair in recorder.missing()]
        requests = [
            request for _, request in sorted(missing, key=lambda pair: pair[0], reverse=True)
        ]
        try:
            run_in_thread(self._record(requests, on_progress), self._dispatcher.stop)
        except ModelChangedError as error:
            for recorder in self._recorders.values() if error.is_late else ():
                recorder.set_aside(str(error))
            raise
        finally:
            for recorder in self._recorders.values():
                recorder.close(self._dispatcher.unchecked_since)

    async def _record(self, requests: Sequence[Request], on_progress: OnProgress | None) -> None:
        progress = _Progress(len(requests), self._dispatcher, on_progress)
        with progress.shown():

            async def record(batch: Batch) -> None:
                for name, recorder in self._recorders.items():
                    part = [
                        (request, outcome)
                        for request, outcome in batch
                        if request.benchmark == name
                    ]
                    if part:
                        rows = await recorder.grade(part)
                        recorder.append(rows, part)
                        progress.advance(rows)
                        self._stop_if_hopeless(recorder)

            batches = _Batches(record)
            try:
                await self._dispatcher.run(requests, batches.add, self._keep_weights)
            finally:
                await batches.finish()
            await self._dispatcher.check_at_end()

    def _keep_weights(self, weights: Weights) -> None:
        for recorder in self._recorders.values():
            recorder.keep_weights(weights, self._endpoint)

    def _stop_if_hopeless(self, recorder: Recorder) -> None:
        """Drop a benchmark when only failures come back; stop when no other is left."""
        limit = self._dispatcher.max_consecutive_failures
        if recorder.is_hopeless(limit):
            self._dispatcher.drop(recorder.name)
            if all(
                one.is_hopeless(limit) or not one.num_missing for one in self._recorders.values()
            ):
                self._dispatcher.stop()


class _Batches:
    """Collects outcomes for milliseconds and records them in batches, possibly concurrent.

    Grading and writing them one by one would cost more than the requests.
    """

    def __init__(self, record: Callable[[Batch], Awaitable[None]]) -> None:
        self._record = record
        self._collected: Batch = []
        self._num_pending = 0
        self._running: set[asyncio.Future[None]] = set()
        self._failure: BaseException | None = None

    async def add(self, request: Request, outcome: Outcome) -> None:
        """Add an outcome to the next batch; wait if too many are pending. Raises like `record`."""
        self._collected.append((request, outcome))
        self._num_pending += 1
        # record failures immediately, to notice when nothing else comes back
        if outcome.answer is None:
            self._start()
            await asyncio.wait(self._running)
        elif len(self._collected) == 1:
            asyncio.get_running_loop().call_later(_BATCH_SECONDS, self._start)
        while self._num_pending > _MAX_PENDING and self._running:
            await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
        if self._failure is not None:
            raise self._failure

    async def finish(self) -> None:
        """Wait until every outcome is recorded. Raises the errors of `record`."""
        self._start()
        while self._running:
            await asyncio.wait(self._running)
        if self._failure is not None:
            raise self._failure

    def _start(self) -> None:
        if self._collected:
            batch, self._collected = self._collected, []
            task = asyncio.ensure_future(self._record(batch))
            self._running.add(task)
            task.add_done_callback(lambda task: self._end(task, len(batch)))

    def _end(self, task: asyncio.Future[None], count: int) -> None:
        self._num_pending -= count
        self._running.discard(task)
        self._failure = self._failure or task.exception()


class _Progress:
    """Shows progress: a bar on a terminal, else log lines."""

    def __init__(
        self, num_requests: int, dispatcher: Dispatcher, report: OnProgress | None
    ) -> None:
        self._num_requests, self._dispatcher, self._report = num_requests, dispatcher, report
        self._num_done = self._num_tokens = self._num_failed = 0
        self._start = time.monotonic()
        self._bar = Progress(
            TextColumn("evaluate"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TextColumn("left:"),
            TimeRemainingColumn(),
            refresh_per_second=4,
            disable=not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task("evaluate", total=num_requests, speed="")

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Show it until the block ends."""
        with self._bar if not self._bar.disable else heartbeat(self._describe):
            yield

    def advance(self, rows: Sequence[Row]) -> None:
        """Count finished requests."""
        self._num_done += len(rows)
        self._num_tokens += sum(row.response_tokens or 0 for row in rows)
        if self._report is not None:
            self._report(self._num_done, self._num_requests)
        failed = [row for row in rows if not row.is_answered]
        if failed and not self._num_failed:
            logger.warning(
                "a request failed after %d attempts: %s", failed[0].attempts, failed[0].failure
            )
        self._num_failed += len(failed)
        self._bar.update(self._task, advance=len(rows), speed=self._speed())

    def _speed(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        parts = [f"{self._num_tokens / seconds:.0f} tokens/s"]
        parts += [f"{self._num_failed} failed"] if self._num_failed else []
        num_retrying = self._dispatcher.num_retrying
        return ", ".join(parts + ([f"{num_retrying} to retry"] if num_retrying else []))

    def _describe(self) -> str:
        parts = [f"{self._num_done} of {self._num_requests} items done", self._speed()]
        # retries mostly wait
        num_new = self._num_requests - self._num_done - self._dispatcher.num_retrying
        if self._num_done and num_new > 0:
            seconds = time.monotonic() - self._start
            parts.append(f"about {math.ceil(seconds / self._num_done * num_new)} s left")
        if self._dispatcher.is_checking:
            parts.append("waiting for the server to show which model it serves")
        return ", ".join(parts)
