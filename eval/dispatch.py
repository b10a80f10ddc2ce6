"""Requests shared between servers: bounded, paced, retried, and moved away from a server that fails."""

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

from eval.client import Answer, Connection, RequestError
from eval.endpoint import Endpoint, Sampling
from eval.identity import ModelChangedError, Weights
from eval.problems.items import Item

logger = logging.getLogger(__name__)

_LONGEST_BACKOFF_SECONDS = 60.0
_LONGEST_PROBE_SECONDS = 5.0
_POLL_SECONDS = 0.1
_PROBE_ATTEMPTS = 3
_LAST_CHECK_SECONDS = 60.0  # the server has nothing else to do by then


@dataclass(frozen=True)
class Limits:
    """Concurrency, pace and patience of the client; none of it changes an answer.

    `concurrency` bounds the requests in flight at each server, `timeout_seconds` one attempt as a whole. Attempts
    are spaced by `backoff_seconds * 2**k`, with jitter, at most a minute, or by the server's Retry-After.
    `outage_seconds` is how long a server that refuses connections may take to come back.
    """

    concurrency: int = 48
    requests_per_second: float | None = None  # over all servers; None: unbounded
    timeout_seconds: float = 600.0
    max_attempts: int = 8
    backoff_seconds: float = 0.5
    outage_seconds: float = 120.0


@dataclass
class Request:
    """One response to ask for: sample `sample` of an item."""

    item: Item
    sample: int
    sampling: Sampling
    benchmark: str = ""  # whose item it is, where several are asked
    attempts: int = 0
    started_at: float | None = None
    # Servers that failed it, and whether by a time-out. A time-out is not repeated at the same server.
    failed_at: dict[_Server, bool] = field(default_factory=dict)


class Outcome(NamedTuple):
    """The result of a request: an answer, or why every attempt failed."""

    answer: Answer | None
    attempts: int
    seconds: float  # over all attempts, with the waiting between them
    failure: str | None = None
    is_refused: bool = False  # the server refused the request itself: another attempt would fail too


Finish = Callable[[Request, Outcome], Coroutine[Any, Any, None]]
OnWeights = Callable[[Weights], None]


@dataclass(eq=False)
class _Server:
    endpoint: Endpoint
    is_up: bool = True
    is_given_up: bool = False
    outage: str = ""  # why it was last unreachable
    checked_at: float = 0.0  # when the last check that found the evaluation's weights began
    failed_at: float = 0.0  # when a request last failed: an earlier check does not count any more
    has_answered: bool = False
    checking: asyncio.Lock = field(default_factory=asyncio.Lock)


class Dispatcher:
    """Sends each request to whichever server is free.

    A request that failed goes to another server first; once every server has failed it, it waits and starts over,
    except that a time-out is not repeated. A server that refuses connections costs no attempts: its requests go
    back to the queue, and it has `outage_seconds` to return.

    Every answer is from the same weights: they are checked on each new connection and after each failure, before
    the answer counts. `weights` are those to expect; None for the first ones found.
    """

    def __init__(self, endpoints: Sequence[Endpoint], limits: Limits, weights: Weights | None = None) -> None:
        self._servers = [_Server(endpoint) for endpoint in endpoints]
        self._limits = limits
        self._weights = weights
        self._on_weights: OnWeights | None = None
        self._queue: deque[Request] = deque()
        self._num_open = 0
        self._dropped: set[str] = set()  # benchmarks
        # Beside cancelling: a task may lose a cancellation that arrives together with its answer.
        self._is_stopped = False
        self._repeated = dict[int, Request]()  # open requests with a failed attempt, by identity
        self._changed = asyncio.Event()
        self._next_start = 0.0
        self._workers: list[asyncio.Task[None]] = []
        self._watchers: set[asyncio.Task[None]] = set()

    @property
    def outage(self) -> str:
        """Why a server was given up; "" when none was."""
        return next((server.outage for server in self._servers if server.is_given_up), "")

    @property
    def num_repeated(self) -> int:
        """Requests that failed and are asked again."""
        return len(self._repeated)

    @property
    def patience(self) -> int:
        """Failures in a row after which no server can be expected to answer."""
        return max(2 * self._limits.concurrency, 8)

    def stop(self) -> None:
        """Send no more requests and drop those in flight."""
        self._is_stopped = True
        for worker in self._workers:
            worker.cancel()

    def drop(self, benchmark: str) -> None:
        """Send no more requests of a benchmark; those in flight end, and are not repeated."""
        self._dropped.add(benchmark)
        left = [request for request in self._queue if request.benchmark != benchmark]
        self._num_open -= len(self._queue) - len(left)
        self._queue = deque(left)
        self._repeated = {key: one for key, one in self._repeated.items() if one.benchmark != benchmark}
        self._changed.set()

    async def run(self, requests: Sequence[Request], finish: Finish, on_weights: OnWeights | None = None) -> None:
        """Await `finish` with the outcome of each request; it must keep the outcome before it waits for anything.

        `on_weights` is called once, before the first outcome, if no weights were expected. Raises what `finish`
        raises, and ModelChangedError when a server has other weights; stops then.
        """
        self._on_weights = on_weights
        self._queue.extend(requests)
        self._num_open = len(requests)
        num_workers = min(self._limits.concurrency, len(requests))
        async with contextlib.AsyncExitStack() as connections:
            for server in self._servers:
                connection = Connection(server.endpoint, self._limits.timeout_seconds)
                await connections.enter_async_context(connection)
                works = [self._work(server, connection, finish) for _ in range(num_workers)]
                self._workers += map(asyncio.create_task, works)
            try:
                await asyncio.wait(self._workers, return_when=asyncio.FIRST_EXCEPTION)
            finally:
                self.stop()
                for watcher in self._watchers:
                    watcher.cancel()
                ended = await asyncio.gather(*self._workers, *self._watchers, return_exceptions=True)
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
            self._repeated.pop(id(request), None)
            if not self._num_open:  # each worker that waits would otherwise wake up for each of the last requests
                self._changed.set()
            seconds = time.monotonic() - started_at
            await finish(request, Outcome(answer, request.attempts, seconds, failure, is_refused))

    async def check_at_end(self) -> None:
        """Raise ModelChangedError when a server that answered now serves other weights, unnoticed until now."""
        for server in self._servers:
            if server.has_answered:
                server.failed_at = time.monotonic()  # so that it is checked once more
                seconds = min(self._limits.timeout_seconds, _LAST_CHECK_SECONDS)
                async with Connection(server.endpoint, seconds) as connection:
                    try:
                        await self._check_weights(server, connection)
                    except RequestError as error:
                        logger.info("%s no longer answers: %s", server.endpoint.base_url, error)
                    except ModelChangedError as error:
                        raise ModelChangedError(str(error), is_late=True) from None

    async def _check_weights(self, server: _Server, connection: Connection) -> None:
        """Return once the weights were checked after the newest connection and failure, by whichever worker."""
        since = max(connection.opened_at, server.failed_at)  # the answer's own connection or a later one
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
                    shown = f"its model folder {weights.root}" if weights.root else "the model's name"
                    logger.warning("%s gives no log-probs: %s is all that identifies its weights", url, shown)
            elif difference := self._weights.difference(weights):
                raise ModelChangedError(
                    f"{url} serves another model than the one evaluated so far, under the same name "
                    f"({server.endpoint.model}): {difference}. One score of two models means nothing: start the "
                    f"first model again and repeat the command, or choose another --output for this one"
                )
            server.checked_at = began
            server.has_answered = True

    async def _identify(self, connection: Connection) -> Weights:
        """The weights behind a connection; none are shown where only the fixed prompt fails."""
        for attempt in range(_PROBE_ATTEMPTS):
            try:
                return await connection.identify()
            except RequestError as error:
                is_shown = self._weights is not None and self._weights.logprobs is not None
                if is_shown or error.is_unreachable:
                    raise
                logger.debug("attempt %d to identify the weights failed: %s", attempt + 1, error)
                await asyncio.sleep(self._limits.backoff_seconds)
        return self._weights or Weights(None, None)

    async def _take(self, server: _Server) -> Request | None:
        """The next request for this server; None when nothing is left for it."""
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
        """Put the request back and wait before this server's next one; False when the request has failed."""
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
        logger.debug("attempt %d failed, asking again: %s", request.attempts, error)
        self._repeated[id(request)] = request
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
        longest = min(_LONGEST_BACKOFF_SECONDS, self._limits.backoff_seconds * 2 ** (attempts - 1))
        return longest * random.uniform(0.5, 1.0)

    async def _pace(self) -> None:
        """Wait for this request's turn under the bound on requests per second."""
        if self._limits.requests_per_second is None:
            return
        turn = max(time.monotonic(), self._next_start)
        self._next_start = turn + 1 / self._limits.requests_per_second
        await asyncio.sleep(turn - time.monotonic())

    def _watch(self, server: _Server, reason: str) -> None:
        """Send nothing to the server until it takes connections again, or give it up."""
        if not server.is_up:
            return
        server.is_up, server.outage = False, reason
        url, seconds = server.endpoint.base_url, self._limits.outage_seconds
        logger.warning("%s cannot be reached (%s); it has %g s to come back", url, reason, seconds)
        self._start(self._await_return(server), self._watchers)

    async def _await_return(self, server: _Server) -> None:
        give_up_at = time.monotonic() + self._limits.outage_seconds
        delay = self._limits.backoff_seconds
        async with Connection(server.endpoint, self._limits.timeout_seconds) as connection:
            while not (server.is_up or server.endpoint.has_ended() or time.monotonic() >= give_up_at):
                await asyncio.sleep(min(delay, max(0.0, give_up_at - time.monotonic())))
                server.is_up = await connection.is_there()
                delay = min(_LONGEST_PROBE_SECONDS, 2 * delay)
        server.is_given_up = not server.is_up
        logger.warning("%s %s", server.endpoint.base_url, "is back" if server.is_up else "did not come back")
        self._changed.set()

    def _start(self, work: Coroutine[Any, Any, None], running: set[asyncio.Task[None]]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        running.add(task)
        task.add_done_callback(running.discard)
        return task


def run_in_thread(work: Coroutine[Any, Any, None], stop: Callable[[], None]) -> None:
    """Run a coroutine in an event loop beside the main thread, and raise what it raises.

    asyncio swallows an exception that a signal handler raises inside a callback, such as Prefect's
    TerminationSignal. Handlers run in the main thread, so here it only waits. `stop` is called in the loop at the
    end, and after an interruption has to make the coroutine return.
    """
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    loop = runner.get_loop()
    with ThreadPoolExecutor(1) as thread:
        try:
            running = thread.submit(runner.run, work, context=contextvars.copy_context())
            while not running.done():  # wake up regularly: the signal may have arrived in another thread
                wait([running], _POLL_SECONDS)
            running.result()
        finally:
            loop.call_soon_threadsafe(stop)
            thread.submit(runner.close)
