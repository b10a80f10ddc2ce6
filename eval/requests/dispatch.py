"""Dispatches requests to a server with bounded concurrency, a rate limit and retries."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import random
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, NamedTuple

import uvloop

from eval.endpoint import Endpoint, Sampling
from eval.problems.items import Item
from eval.requests.client import Connection, RequestError
from eval.requests.identity import ModelChangedError, Weights
from eval.requests.replies import Answer

logger = logging.getLogger(__name__)

_MAX_BACKOFF_SECONDS = 60.0
_MAX_PROBE_INTERVAL_SECONDS = 5.0
_POLL_SECONDS = 0.1
_MAX_PROBE_ATTEMPTS = 3
_FINAL_CHECK_SECONDS = 60.0  # the server is idle by then


@dataclass(frozen=True)
class Limits:
    """Client-side limits: concurrency, request rate, timeouts. They never affect an answer.

    `concurrency` bounds the requests in flight, `timeout_seconds` a whole attempt.
    Attempts are spaced by `backoff_seconds * 2**k` with jitter, at most a minute, or by the
    server's Retry-After. `outage_seconds` is how long to wait for a server that refuses
    connections.
    """

    concurrency: int = 48
    requests_per_second: float | None = None  # None: unlimited
    timeout_seconds: float = 600.0
    max_attempts: int = 8
    backoff_seconds: float = 0.5
    outage_seconds: float = 120.0


@dataclass
class Request:
    """A request for sample `sample` of an item."""

    item: Item
    sample: int
    sampling: Sampling
    benchmark: str = ""  # name, if several are evaluated
    attempts: int = 0
    started_at: float | None = None


class Outcome(NamedTuple):
    """The result of a request: an answer, or why all attempts failed."""

    answer: Answer | None
    attempts: int
    seconds: float  # over all attempts, including the waits between them
    ended_at: float  # wall clock
    failure: str | None = None
    is_refused: bool = False  # by the server: another attempt would fail too
    advice: str = ""  # what to change after a failure


Batch = list[tuple[Request, Outcome]]
Finish = Callable[[Request, Outcome], Coroutine[Any, Any, None]]
OnWeights = Callable[[Weights], None]


class Dispatcher:
    """Sends requests to a server.

    A failed request is retried with backoff, unless it timed out or was refused. A refused
    connection costs no attempt: the request returns to the queue, and the server has
    `outage_seconds` to come back.

    All answers come from the same weights: these are checked before the first request, after each
    failure before another request is sent, and at the end. `weights` are the expected ones; None
    accepts the first.
    """

    def __init__(self, endpoint: Endpoint, limits: Limits, weights: Weights | None = None) -> None:
        self._endpoint, self._limits, self._weights = endpoint, limits, weights
        self._on_weights: OnWeights | None = None
        self._queue: deque[Request] = deque()
        self._num_open = 0
        self._dropped: set[str] = set()  # benchmarks
        # Needed beside cancel(): a task may miss one that arrives with its answer.
        self._is_stopped = False
        self._retrying = dict[int, Request]()  # open requests with a failed attempt, by id()
        self._changed = asyncio.Event()
        self._next_start = 0.0
        self._workers: list[asyncio.Task[None]] = []
        self._watcher: asyncio.Task[None] | None = None  # while the server is unreachable
        self._outage = ""  # why the server was last unreachable
        self._is_given_up = False
        self._checking = asyncio.Lock()
        self._checked_at = -math.inf  # start of the last successful check of the weights
        self._failed_at = 0.0  # last failed request; it invalidates earlier checks
        # Wall clock: other weights may have produced later answers.
        self.unchecked_since = math.inf

    @property
    def outage(self) -> str:
        """Why the server was given up, or ""."""
        return self._outage if self._is_given_up else ""

    @property
    def num_retrying(self) -> int:
        """Number of requests that failed and will be retried."""
        return len(self._retrying)

    @property
    def is_checking(self) -> bool:
        """True while requests wait for a check of the weights."""
        return self._checking.locked()

    @property
    def max_consecutive_failures(self) -> int:
        """Number of failures in a row after which no server is expected to answer."""
        return max(2 * self._limits.concurrency, 8)

    def stop(self) -> None:
        """Send no more requests and cancel those in flight."""
        self._is_stopped = True
        for worker in self._workers:
            worker.cancel()

    def drop(self, benchmark: str) -> None:
        """Send no more requests of a benchmark. Those in flight finish and are not retried."""
        self._dropped.add(benchmark)
        left = [request for request in self._queue if request.benchmark != benchmark]
        self._num_open -= len(self._queue) - len(left)
        self._queue = deque(left)
        self._retrying = {
            key: one for key, one in self._retrying.items() if one.benchmark != benchmark
        }
        self._changed.set()

    async def run(
        self, requests: Sequence[Request], finish: Finish, on_weights: OnWeights | None = None
    ) -> None:
        """Await `finish`, which must store an outcome before it awaits, for each request.

        `on_weights` is called with the weights after each check. Stops and raises when `finish`
        raises, or with ModelChangedError when a server has other weights.
        """
        self._on_weights = on_weights
        self._queue.extend(requests)
        self._num_open = len(requests)
        num_workers = min(self._limits.concurrency, len(requests))
        async with Connection(self._endpoint, self._limits.timeout_seconds) as connection:
            self._workers = [
                asyncio.create_task(self._work(connection, finish)) for _ in range(num_workers)
            ]
            try:
                await asyncio.wait(self._workers, return_when=asyncio.FIRST_EXCEPTION)
            finally:
                self.stop()
                ended = await asyncio.gather(*self._workers, return_exceptions=True)
                if self._watcher is not None:
                    self._watcher.cancel()
                    await asyncio.wait([self._watcher])
        for error in ended:
            if isinstance(error, Exception):
                raise error

    async def _work(self, connection: Connection, finish: Finish) -> None:
        while (request := await self._take()) is not None:
            await self._pace()
            started_at = request.started_at = request.started_at or time.monotonic()
            failure: RequestError | None = None
            try:
                await self._check_weights(connection)
                answer = await connection.answer(request.item, request.sampling, request.sample)
                request.attempts += 1
            except RequestError as error:
                self._failed_at = time.monotonic()
                self.unchecked_since = min(self.unchecked_since, time.time())
                if self._is_stopped:
                    return
                if await self._retry(request, connection, error):
                    continue
                answer, failure = None, error
            self._num_open -= 1
            self._retrying.pop(id(request), None)
            if not self._num_open:  # wake the idle workers once, not for each of the last requests
                self._changed.set()
            seconds, ended_at = time.monotonic() - started_at, time.time()
            why = (str(failure), failure.is_final, failure.advice) if failure else ()
            await finish(request, Outcome(answer, request.attempts, seconds, ended_at, *why))

    async def check_at_end(self) -> None:
        """Raise ModelChangedError if the server that answered now serves other weights."""
        if self._checked_at == -math.inf:
            return
        self._checked_at = -math.inf  # force another check
        seconds = min(self._limits.timeout_seconds, _FINAL_CHECK_SECONDS)
        async with Connection(self._endpoint, seconds) as connection:
            try:
                await self._check_weights(connection)
            except RequestError as error:
                failure = f"{self._endpoint.address} could not be identified at the end: {error}"
                if self.unchecked_since < math.inf and not self._is_given_up:
                    self._outage, self._is_given_up = failure, True
                logger.warning("%s", failure)
            except ModelChangedError as error:
                raise ModelChangedError(str(error), is_late=True) from None

    async def _check_weights(self, connection: Connection) -> None:
        """Return once any worker has checked the weights after the last failure."""
        async with self._checking:
            if self._checked_at > self._failed_at:
                return
            began = time.monotonic()
            weights, url = await self._identify(connection), self._endpoint.address
            if self._weights is None:
                self._weights = weights
                if weights.logprobs is None:
                    known = f"its model folder {weights.root}" if weights.root else "the name"
                    logger.warning("%s returns no log-probs: only %s identifies it", url, known)
            elif difference := self._weights.difference(weights):
                raise ModelChangedError(
                    f"{url} serves another model than the one evaluated so far, under the same "
                    f"name ({self._endpoint.model}): {difference}. A score must come from one "
                    "model: serve the first model again and repeat the command, or choose another "
                    "--output for this one"
                )
            self._checked_at = began
            if began > self._failed_at:
                self.unchecked_since = math.inf
            if self._on_weights is not None:
                self._on_weights(self._weights)

    async def _identify(self, connection: Connection) -> Weights:
        """Identify the weights behind a connection; unknown if only the probe requests fail."""
        is_identifiable = self._weights is not None and self._weights.logprobs is not None
        for attempt in range(_MAX_PROBE_ATTEMPTS):
            try:
                weights = await connection.identify()
                if is_identifiable and weights.logprobs is None:
                    raise RequestError(
                        "the log-probs of a fixed prompt, which show that the model is the same, "
                        "are missing from the server's reply"
                    )
                return weights
            except RequestError as error:
                if is_identifiable or error.is_unreachable:
                    raise
                logger.debug("attempt %d to identify the weights failed: %s", attempt + 1, error)
                await asyncio.sleep(self._limits.backoff_seconds)
        return self._weights or Weights(None, None)

    async def _take(self) -> Request | None:
        """Return the next request, or None if nothing is left to send."""
        while not (self._is_stopped or self._is_given_up) and self._num_open:
            if self._queue and self._watcher is None:
                return self._queue.popleft()
            self._changed.clear()
            await self._changed.wait()
        return None

    async def _retry(self, request: Request, connection: Connection, error: RequestError) -> bool:
        """Wait and requeue the request. False if it has failed for good."""
        if request.benchmark in self._dropped:
            return False
        if error.is_unreachable:
            self._watch(connection, str(error))
            self._put_back(request)
            return True
        request.attempts += 1
        if error.is_final or error.is_timeout or request.attempts >= self._limits.max_attempts:
            return False
        self._retrying[id(request)] = request
        await asyncio.sleep(max(self._backoff(request.attempts), error.retry_after_seconds))
        self._put_back(request)
        return True

    def _put_back(self, request: Request) -> None:
        self._queue.appendleft(request)
        self._changed.set()

    def _backoff(self, attempts: int) -> float:
        longest = min(_MAX_BACKOFF_SECONDS, self._limits.backoff_seconds * 2 ** (attempts - 1))
        return longest * random.uniform(0.5, 1.0)

    async def _pace(self) -> None:
        """Wait as long as `requests_per_second` demands."""
        if self._limits.requests_per_second is None:
            return
        turn = max(time.monotonic(), self._next_start)
        self._next_start = turn + 1 / self._limits.requests_per_second
        await asyncio.sleep(turn - time.monotonic())

    def _watch(self, connection: Connection, reason: str) -> None:
        """Send nothing until the server accepts connections again, or give it up."""
        if self._watcher is not None or self._is_given_up:
            return
        self._outage = reason
        url, seconds = self._endpoint.address, self._limits.outage_seconds
        logger.warning("%s cannot be reached (%s); waiting up to %g s for it", url, reason, seconds)
        self._watcher = asyncio.create_task(self._await_return(connection))

    async def _await_return(self, connection: Connection) -> None:
        give_up_at = time.monotonic() + self._limits.outage_seconds
        delay, is_up = self._limits.backoff_seconds, False
        while not (is_up or self._endpoint.has_ended() or time.monotonic() >= give_up_at):
            await asyncio.sleep(min(delay, max(0.0, give_up_at - time.monotonic())))
            is_up = await connection.is_reachable()
            delay = min(_MAX_PROBE_INTERVAL_SECONDS, 2 * delay)
        state = "is reachable again" if is_up else "did not come back"
        logger.warning("%s %s", self._endpoint.address, state)
        self._is_given_up, self._watcher = not is_up, None
        self._changed.set()


def run_in_thread(work: Coroutine[Any, Any, None], stop: Callable[[], None]) -> None:
    """Run a coroutine in an event loop beside the main thread, and propagate its exception.

    Signal handlers run in the main thread, which only waits here: asyncio would swallow an
    exception raised by a handler inside a callback, such as Prefect's TerminationSignal. `stop` is
    called in the loop at the end and must make the coroutine return after an interruption.
    """
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    loop = runner.get_loop()
    with ThreadPoolExecutor(1) as thread:
        try:
            running = thread.submit(runner.run, work, context=contextvars.copy_context())
            while not running.done():  # poll: the signal may have arrived in another thread
                wait([running], _POLL_SECONDS)
            running.result()
        finally:
            loop.call_soon_threadsafe(stop)
            thread.submit(runner.close)
