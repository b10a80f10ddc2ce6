"""Dispatches requests to servers with bounded concurrency, rate limits, retries and failover."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import uvloop

from eval.endpoint import Endpoint, Sampling
from eval.problems.items import Item
from eval.requests.client import Answer, Connection, RequestError
from eval.requests.identity import ModelChangedError, Weights

logger = logging.getLogger(__name__)

_MAX_BACKOFF_SECONDS = 60.0
_MAX_PROBE_INTERVAL_SECONDS = 5.0
_POLL_SECONDS = 0.1
_MAX_PROBE_ATTEMPTS = 3
_FINAL_CHECK_SECONDS = 60.0  # the server is idle by then


@dataclass(frozen=True)
class Limits:
    """Client-side limits: concurrency, request rate, timeouts. They never affect an answer.

    `concurrency` bounds the requests in flight per server, `timeout_seconds` a whole attempt.
    Attempts are spaced by `backoff_seconds * 2**k` with jitter, at most a minute, or by the
    server's Retry-After. `outage_seconds` is how long to wait for a server that refuses
    connections.
    """

    concurrency: int = 48
    requests_per_second: float | None = None  # across all servers; None: unlimited
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
    # Server that failed the request -> whether it timed out. A timeout is not retried on the same
    # server.
    failed_at: dict[_Server, bool] = field(default_factory=dict)


class Outcome(NamedTuple):
    """The result of a request: an answer, or why all attempts failed."""

    answer: Answer | None
    attempts: int
    seconds: float  # over all attempts, including the waits between them
    failure: str | None = None
    is_refused: bool = (
        False  # the server refused the request itself: another attempt would fail too
    )


Batch = list[tuple[Request, Outcome]]
Finish = Callable[[Request, Outcome], Coroutine[Any, Any, None]]
OnWeights = Callable[[Weights], None]


@dataclass(eq=False)
class _Server:
    endpoint: Endpoint
    is_up: bool = True
    is_given_up: bool = False
    outage: str = ""  # why it was last unreachable
    checked_at: float = 0.0  # start of the last successful check of its weights
    failed_at: float = 0.0  # last failed request; it invalidates earlier checks
    has_answered: bool = False
    checking: asyncio.Lock = field(default_factory=asyncio.Lock)


class Dispatcher:
    """Sends each request to whichever server is free.

    A failed request goes to another server first. Once all servers have failed it, it backs off and
    starts over, except on servers where it timed out. Refused connections cost no attempts: the
    requests return to the queue, and the server has `outage_seconds` to come back.

    All answers come from the same weights: these are checked on each new connection and after each
    failure, before an answer counts. `weights` are the expected ones; None accepts the first ones
    found.
    """

    def __init__(
        self, endpoints: Sequence[Endpoint], limits: Limits, weights: Weights | None = None
    ) -> None:
        self._servers = [_Server(endpoint) for endpoint in endpoints]
        self._limits = limits
        self._weights = weights
        self._on_weights: OnWeights | None = None
        self._queue: deque[Request] = deque()
        self._num_open = 0
        self._dropped: set[str] = set()  # benchmarks
        self._is_stopped = (
            False  # needed beside cancel(): a task may miss one that arrives with its answer
        )
        self._retrying = dict[int, Request]()  # open requests with a failed attempt, by id()
        self._changed = asyncio.Event()
        self._next_start = 0.0
        self._workers: list[asyncio.Task[None]] = []
        self._watchers: set[asyncio.Task[None]] = set()

    @property
    def outage(self) -> str:
        """Why a server was given up, or ""."""
        return next((server.outage for server in self._servers if server.is_given_up), "")

    @property
    def num_retrying(self) -> int:
        """Number of requests that failed and will be retried."""
        return len(self._retrying)

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

        If no weights were expected, `on_weights` is called once, before the first outcome. Stops
        and raises when `finish` raises, or with ModelChangedError when a server has other weights.
        """
        self._on_weights = on_weights
        self._queue.extend(requests)
        self._num_open = len(requests)
        num_workers = min(self._limits.concurrency, len(requests))
        async with contextlib.AsyncExitStack() as connections:
            for server in self._servers:
                connection = Connection(server.endpoint, self._limits.timeout_seconds)
                await connections.enter_async_context(connection)
                workers = [self._work(server, connection, finish) for _ in range(num_workers)]
                self._workers += map(asyncio.create_task, workers)
            try:
                await asyncio.wait(self._workers, return_when=asyncio.FIRST_EXCEPTION)
            finally:
                self.stop()
                for watcher in self._watchers:
                    watcher.cancel()
                ended = await asyncio.gather(
                    *self._workers, *self._watchers, return_exceptions=True
                )
        for error in ended:
            if isinstance(error, Exception):
                raise error

    async def _work(self, server: _Server, connection: Connection, finish: Finish) -> None:
        while (request := await self._take(server)) is not None:
            await self._pace()
            started_at = request.started_at = request.started_at or time.monotonic()
            failure, is_refused = None, False
            try:
                answer = await connection.answer(request.item, request.sampling, request.sample)
                await self._check_weights(server, connection)
                request.attempts += 1
            except RequestError as error:
                server.failed_at = time.monotonic()
                if self._is_stopped:
                    return
                if await self._retry(request, server, error):
                    continue
                answer, failure, is_refused = None, str(error), error.is_final
            self._num_open -= 1
            self._retrying.pop(id(request), None)
            if not self._num_open:  # wake the idle workers once, not for each of the last requests
                self._changed.set()
            seconds = time.monotonic() - started_at
            await finish(request, Outcome(answer, request.attempts, seconds, failure, is_refused))

    async def check_at_end(self) -> None:
        """Raise ModelChangedError if a server that answered now serves other weights."""
        for server in self._servers:
            if server.has_answered:
                server.failed_at = time.monotonic()  # force another check
                seconds = min(self._limits.timeout_seconds, _FINAL_CHECK_SECONDS)
                async with Connection(server.endpoint, seconds) as connection:
                    try:
                        await self._check_weights(server, connection)
                    except RequestError as error:
                        logger.info("%s stopped responding: %s", server.endpoint.base_url, error)
                    except ModelChangedError as error:
                        raise ModelChangedError(str(error), is_late=True) from None

    async def _check_weights(self, server: _Server, connection: Connection) -> None:
        """Return once the weights were checked after the newest connection and the last failure."""
        # the answer's connection, or a later one
        since = max(connection.opened_at, server.failed_at)
        if server.checked_at > since:
            return
        async with server.checking:
            if server.checked_at > since:
                return
            began = time.monotonic()
            weights = await self._identify(connection)
            url = server.endpoint.base_url
            if self._weights is None:
                self._weights = weights
                if self._on_weights is not None:
                    self._on_weights(weights)
                if weights.logprobs is None:
                    known = (
                        f"its model folder {weights.root}" if weights.root else "the model's name"
                    )
                    logger.warning(
                        "%s returns no log-probs: only %s identifies its weights", url, known
                    )
            elif difference := self._weights.difference(weights):
                raise ModelChangedError(
                    f"{url} serves another model than the one evaluated so far, under the same "
                    f"name ({server.endpoint.model}): {difference}. A score must come from one "
                    "model: serve the first model again and repeat the command, or choose another "
                    "--output for this one"
                )
            server.checked_at = began
            server.has_answered = True

    async def _identify(self, connection: Connection) -> Weights:
        """Identify the weights behind a connection; unknown if only the probe requests fail."""
        for attempt in range(_MAX_PROBE_ATTEMPTS):
            try:
                return await connection.identify()
            except RequestError as error:
                is_identifiable = self._weights is not None and self._weights.logprobs is not None
                if is_identifiable or error.is_unreachable:
                    raise
                logger.debug("attempt %d to identify the weights failed: %s", attempt + 1, error)
                await asyncio.sleep(self._limits.backoff_seconds)
        return self._weights or Weights(None, None)

    async def _take(self, server: _Server) -> Request | None:
        """Return the next request for this server, or None if nothing is left for it."""
        while not (self._is_stopped or server.is_given_up) and self._num_open:
            for number, request in enumerate(self._queue if server.is_up else ()):
                if server not in request.failed_at or self._has_failed_everywhere(request):
                    del self._queue[number]
                    return request
            self._changed.clear()
            await self._changed.wait()
        return None

    def _has_failed_everywhere(self, request: Request) -> bool:
        return all(server.is_given_up or server in request.failed_at for server in self._servers)

    async def _retry(self, request: Request, server: _Server, error: RequestError) -> bool:
        """Requeue the request and wait before the next one. False if it failed for good."""
        if request.benchmark in self._dropped:
            return False
        if error.is_unreachable:
            self._watch(server, str(error))
            self._put_back(request)
            return True
        request.attempts += 1
        request.failed_at[server] = error.is_timeout
        if error.is_final or request.attempts >= self._limits.max_attempts:
            return False
        logger.debug("attempt %d failed, retrying: %s", request.attempts, error)
        self._retrying[id(request)] = request
        pause = max(self._backoff(request.attempts), error.retry_after_seconds)
        if not self._has_failed_everywhere(request):
            self._put_back(request)
            await asyncio.sleep(pause)
            return True
        timed_out = {failed: True for failed, is_timeout in request.failed_at.items() if is_timeout}
        if all(other.is_given_up or other in timed_out for other in self._servers):
            return False
        await asyncio.sleep(pause)
        request.failed_at = timed_out
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

    def _watch(self, server: _Server, reason: str) -> None:
        """Send nothing to the server until it accepts connections again, or give it up."""
        if not server.is_up:
            return
        server.is_up, server.outage = False, reason
        url, seconds = server.endpoint.base_url, self._limits.outage_seconds
        logger.warning("%s cannot be reached (%s); waiting up to %g s for it", url, reason, seconds)
        watcher = asyncio.create_task(self._await_return(server))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    async def _await_return(self, server: _Server) -> None:
        give_up_at = time.monotonic() + self._limits.outage_seconds
        delay = self._limits.backoff_seconds
        async with Connection(server.endpoint, self._limits.timeout_seconds) as connection:
            while not (
                server.is_up or server.endpoint.has_ended() or time.monotonic() >= give_up_at
            ):
                await asyncio.sleep(min(delay, max(0.0, give_up_at - time.monotonic())))
                server.is_up = await connection.is_reachable()
                delay = min(_MAX_PROBE_INTERVAL_SECONDS, 2 * delay)
        server.is_given_up = not server.is_up
        state = "is reachable again" if server.is_up else "did not come back"
        logger.warning("%s %s", server.endpoint.base_url, state)
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
