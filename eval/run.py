"""Evaluate a served model on one benchmark or several, resumably, each into a results directory."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from eval import EvaluationError
from eval.answers.grading import GRADERS
from eval.batches import Batch, Batches
from eval.dispatch import Dispatcher, Limits, Request, run_in_thread
from eval.endpoint import Endpoint, Sampling
from eval.identity import ModelChangedError, Weights
from eval.problems.items import EvaluationSet
from eval.recorder import Benchmark, Recorder
from eval.results import Row, exclusive, make_folder, make_settings
from eval.summary import Summary

logger = logging.getLogger(__name__)

OnProgress = Callable[[int, int], None]  # requests finished, and in all
LOG_SECONDS = 60.0  # between two lines on progress, while requests finish


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
    """`evaluate_all` for one benchmark."""
    benchmark = Benchmark(evaluation_set, sampling, Path(output_dir), max_failed_ratio=max_failed_ratio)
    [summary] = evaluate_all(
        [benchmark], endpoints, limits=limits, model_digest=model_digest, on_progress=on_progress
    )
    return summary


def evaluate_all(
    benchmarks: Sequence[Benchmark],
    endpoints: Sequence[Endpoint],
    *,
    limits: Limits | None = None,
    model_digest: str | None = None,
    on_progress: OnProgress | None = None,
) -> list[Summary]:
    """Ask for each sample of each item and return the summaries, which are also written beside the rows.

    A problem that is on r rows of its file has r times `sampling.num_samples` samples. The endpoints serve one
    model and share the work of all benchmarks, the requests that may take longest first. A directory with equal
    settings is continued: only missing rows and failed requests are asked. If only the grader or the gold answers
    differ, its rows are graded again. With other settings the benchmark starts over, and the old files move to
    `superseded-N/`. Raises EvaluationError when more than `max_failed_ratio` of a benchmark's requests failed, and
    RequestsRefused when all of these were refused as they are; every finished row is kept for the next attempt,
    and the other benchmarks are finished.
    """
    for benchmark in benchmarks:
        if not (items := benchmark.evaluation_set.items) or not endpoints:
            raise EvaluationError(f"{len(items)} items and {len(endpoints)} servers: nothing can be evaluated")
    with contextlib.ExitStack() as stack:
        recorders = []
        for benchmark in benchmarks:
            stack.enter_context(exclusive(make_folder(benchmark.output_dir)))
            grader = stack.enter_context(benchmark.grader or GRADERS[benchmark.evaluation_set.grader]())
            settings = _settings(benchmark, endpoints[0], model_digest, grader.rule)
            recorders.append(Recorder(benchmark, settings, grader))
        asked = [recorder for recorder in recorders if recorder.num_missing]
        known = next((served for recorder in recorders if (served := recorder.served) is not None), None)
        session = _Session(asked, Dispatcher(endpoints, limits or Limits(), known), known)
        if asked:
            session.ask(on_progress)
        return _finish(recorders, ", ".join(endpoint.base_url for endpoint in endpoints), session.outage)


def _settings(benchmark: Benchmark, endpoint: Endpoint, model_digest: str | None, rule: str) -> dict[str, Any]:
    """The settings of a benchmark's results, with the samples that repeated rows of its file ask for."""
    asked, sampling = benchmark.evaluation_set, benchmark.requested
    if asked.num_repeats > 1:
        logger.info(
            "%d problems on %d rows each: every problem is one item with %d samples",
            len(asked.items), asked.num_repeats, sampling.num_samples,
        )  # fmt: skip
        if sampling.temperature == 0:
            logger.warning("at temperature 0 the samples of an item are alike; set evaluate.temperature for avg@k")
    settings = make_settings(
        asked.items,
        endpoint,
        sampling,
        model_digest,
        benchmark=asked.benchmark,
        template=asked.template,
        grader=rule,
    )
    return settings if benchmark.judge is None else {**settings, "judge": benchmark.judge.to_json()}


def _finish(recorders: Sequence[Recorder], servers: str, outage: str) -> list[Summary]:
    """The summaries, once every benchmark without a failure has its own. Raises the failures as one."""
    summaries, failures = [], dict[str, EvaluationError]()
    for recorder in recorders:
        try:
            summaries.append(recorder.finish(servers, outage))
        except EvaluationError as error:
            failures[recorder.name] = error
    if failures:
        kinds = {type(error) for error in failures.values()}
        said = " ".join(f"{name}: {error}" if name else str(error) for name, error in failures.items())
        raise (kinds.pop() if len(kinds) == 1 else EvaluationError)(said)
    return summaries


class _Session:
    """The missing requests of several benchmarks, asked as one queue."""

    def __init__(self, recorders: Sequence[Recorder], dispatcher: Dispatcher, weights: Weights | None) -> None:
        self._recorders = {recorder.name: recorder for recorder in recorders}
        self._dispatcher = dispatcher
        if weights is not None:
            self._keep_weights(weights)

    @property
    def outage(self) -> str:
        """Why a server was given up."""
        return self._dispatcher.outage

    def ask(self, on_progress: OnProgress | None) -> None:
        """Run the requests and record each that ends, also when they are interrupted.

        Raises ModelChangedError, and moves the rows aside if any may be another model's.
        """
        expected = [pair for recorder in self._recorders.values() for pair in recorder.missing()]
        requests = [request for _, request in sorted(expected, key=lambda pair: pair[0], reverse=True)]
        try:
            run_in_thread(self._record(requests, on_progress), self._dispatcher.stop)
        except ModelChangedError as error:
            for recorder in self._recorders.values() if error.is_late else ():
                recorder.set_aside(str(error))
            raise
        finally:
            for recorder in self._recorders.values():
                recorder.close()

    async def _record(self, requests: Sequence[Request], on_progress: OnProgress | None) -> None:
        with _Progress(len(requests), on_progress) as progress:

            async def record(batch: Batch) -> None:
                for name, recorder in self._recorders.items():
                    own = [(request, outcome) for request, outcome in batch if request.benchmark == name]
                    if own:
                        rows = await recorder.graded(own)
                        recorder.append(rows, own)
                        progress.advance(rows, self._dispatcher.num_repeated)
                        self._end_if_hopeless(recorder)

            batches = Batches(record)
            try:
                await self._dispatcher.run(requests, batches.add, self._keep_weights)
            finally:
                await batches.finish()
            await self._dispatcher.check_at_end()

    def _keep_weights(self, weights: Weights) -> None:
        for recorder in self._recorders.values():
            recorder.keep_weights(weights)

    def _end_if_hopeless(self, recorder: Recorder) -> None:
        """Send no more of a benchmark's requests when only failures come back; end when nothing else is left."""
        patience = self._dispatcher.patience
        if recorder.is_hopeless(patience):
            self._dispatcher.drop(recorder.name)
            if all(one.is_hopeless(patience) or not one.num_missing for one in self._recorders.values()):
                self._dispatcher.stop()


class _Progress:
    """How far an evaluation is: a bar on a terminal, otherwise a log line for each tenth or LOG_SECONDS."""

    def __init__(self, num_requests: int, on_progress: OnProgress | None) -> None:
        self._num_requests = num_requests
        self._on_progress = on_progress
        self._num_done = self._num_tokens = self._num_failed = 0
        self._start = self._logged_at = time.monotonic()
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

    def advance(self, rows: Sequence[Row], num_repeated: int) -> None:
        """Count finished requests; of those that are open, `num_repeated` failed and are asked again."""
        done_before, self._num_done = self._num_done, self._num_done + len(rows)
        self._num_tokens += sum(row.response_tokens or 0 for row in rows)
        if self._on_progress is not None:
            self._on_progress(self._num_done, self._num_requests)
        now = time.monotonic()
        seconds = max(now - self._start, 1e-9)
        speed = f"{self._num_tokens / seconds:.0f} tokens/s"
        failed = [row for row in rows if not row.is_answered]
        if failed and not self._num_failed:
            logger.warning("a request failed after %d attempts: %s", failed[0].attempts, failed[0].failure)
        self._num_failed += len(failed)
        speed += f", {self._num_failed} failed" if self._num_failed else ""
        speed += f", {num_repeated} to ask again" if num_repeated else ""
        self._bar.update(self._task, advance=len(rows), speed=speed)
        is_tenth = 10 * self._num_done // self._num_requests > 10 * done_before // self._num_requests
        if self._bar.disable and (is_tenth or now - self._logged_at >= LOG_SECONDS):
            self._logged_at = now
            # Without those that are asked again: they wait before they are.
            num_new = self._num_requests - self._num_done - num_repeated
            left = f", about {math.ceil(seconds / self._num_done * num_new)} s left" if num_new > 0 else ""
            logger.info("%d of %d items done, %s%s", self._num_done, self._num_requests, speed, left)
