"""Requests shared between servers: bounded, paced, asked again, and moved away from a server that is gone."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field

from eval.client import Answer, Connection, Endpoint, RequestError, Sampling
from eval.problems.items import Item

logger = logging.getLogger(__name__)

_LONGEST_BACKOFF_SECONDS = 60.0
_LONGEST_PROBE_SECONDS = 5.0
_FAILURES_BEFORE_REST = 8


@dataclass(frozen=True)
class Limits:
    """How much is asked at once, and how patiently; none of it changes an answer.

    `concurrency` bounds the requests in flight at each server, `timeout_seconds` one attempt as a whole. Attempts
    are spaced by `backoff_seconds * 2**k`, with jitter, at most a minute, or by the server's Retry-After.
    `outage_seconds` is how long a server that takes no connections may need to come back.
    """

    concurrency: int = 48
    requests_per_second: float | None = None  # over all servers; None: no bound
    timeout_seconds: float = 600.0
    max_attempts: int = 8
    backoff_seconds: float = 0.5
    outage_seconds: float = 120.0


@dataclass
class Request:
    """One response that is wanted: sample `sample` of an item."""

    item: Item
    sample: int
    attempts: int = 0
    started_at: float | None = None
    avoided: _Server | None = None  # where it failed last, until it may be asked there again
    timed_out_at: set[_Server] = field(default_factory=set)


@dataclass(frozen=True)
class Outcome:
    """What came of a request: an answer, or why every attempt failed."""

    answer: Answer | None
    attempts: int
    seconds: float  # over all attempts, with the waiting between them
    failure: str | None = None


Finish = Callable[[Request, Outcome], "asyncio.Task[None]"]


@dataclass(eq=False)
class _Server:
    endpoint: Endpoint
    is_up: bool = True
    is_given_up: bool = False
    failures_in_a_row: int = 0
    outage: str = ""  # why it was last thought to be gone


class Dispatcher:
    """Asks every request once it can, at whichever server is free.

    A request that failed waits before the same server gets it again; another server may take it at once. One that
    timed out goes to each server once. A server that takes no connections costs no attempts: its requests are put
    back, and it has `outage_seconds` to return. One that only fails rests while others are up.
    """

    def __init__(self, endpoints: Sequence[Endpoint], sampling: Sampling, limits: Limits) -> None:
        self._servers = [_Server(endpoint) for endpoint in endpoints]
        self._sampling = sampling
        self._limits = limits
        self._fresh: deque[Request] = deque()
        self._again: list[Request] = []
        self._num_open = 0
        # Beside cancelling: what a worker awaits may lose a cancellation that comes with the answer.
        self._is_stopped = False
        self._changed = asyncio.Event()
        self._next_start = 0.0
        self._workers: list[asyncio.Task[None]] = []
        self._returns: set[asyncio.Task[None]] = set()

    @property
    def patience(self) -> int:
        """Failures in a row after which it is plain that nobody answers."""
        return max(2 * self._limits.concurrency, 8)

    @property
    def outage(self) -> str:
        """Why a server was given up; "" when none was."""
        return next((server.outage for server in self._servers if server.is_given_up), "")

    def stop(self) -> None:
        """Ask nothing any more and drop what is in flight."""
        self._is_stopped = True
        for worker in self._workers:
            worker.cancel()

    async def run(self, requests: Sequence[Request], finish: Finish) -> None:
        """Call `finish` with the outcome of each request, as it comes; its task ends before the next request."""
        self._fresh.extend(requests)
        self._num_open = len(requests)
        num_workers = min(self._limits.concurrency, len(requests))
        self._workers = [
            asyncio.create_task(self._work(server, finish)) for server in self._servers for _ in range(num_workers)
        ]
        try:
            done, _ = await asyncio.wait(self._workers, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            self.stop()
            for task in self._returns:
                task.cancel()
            await asyncio.gather(*self._workers, *self._returns, return_exceptions=True)
        for worker in done:
            if not worker.cancelled():
                worker.result()

    async def _work(self, server: _Server, finish: Finish) -> None:
        async with Connection(server.endpoint, self._sampling, self._limits.timeout_seconds) as connection:
            while (request := await self._take(server)) is not None:
                await self._pace()
                started_at = request.started_at = request.started_at or time.monotonic()
                try:
                    answer = await connection.ask(request.item.prompt, request.sample)
                except RequestError as error:
                    if self._is_stopped:
                        return
                    if await self._retry(request, server, error):
                        continue
                    outcome = Outcome(None, request.attempts, time.monotonic() - started_at, str(error))
                else:
                    server.failures_in_a_row = 0
                    outcome = Outcome(answer, request.attempts + 1, time.monotonic() - started_at)
                self._num_open -= 1
                self._changed.set()
                await asyncio.shield(finish(request, outcome))

    async def _take(self, server: _Server) -> Request | None:
        """The next request for this server; None when there is nothing left to do for it."""
        while not (self._is_stopped or server.is_given_up) and self._num_open:
            request = self._pick(server) if server.is_up else None
            if request is not None:
                return request
            self._changed.clear()
            await self._changed.wait()
        return None

    def _pick(self, server: _Server) -> Request | None:
        for number, request in enumerate(self._again):
            if self._may_ask(request, server):
                return self._again.pop(number)
        return self._fresh.popleft() if self._fresh else None

    def _may_ask(self, request: Request, server: _Server) -> bool:
        if server in request.timed_out_at:  # again only when no other is left, to end it
            return self._has_timed_out_everywhere(request)
        return request.avoided is not server

    def _has_timed_out_everywhere(self, request: Request) -> bool:
        return all(server.is_given_up or server in request.timed_out_at for server in self._servers)

    async def _retry(self, request: Request, server: _Server, error: RequestError) -> bool:
        """Put the request back and wait as long as this server is to be left alone; False when it has failed."""
        if error.is_unreachable:
            self._await_return(server, str(error))
            self._put_back(request, None)
            return True
        request.attempts += 1
        if error.is_timeout:
            request.timed_out_at.add(server)
            if self._has_timed_out_everywhere(request):
                return False
        if error.is_final or request.attempts >= self._limits.max_attempts:
            return False
        logger.debug("attempt %d failed, asking again: %s", request.attempts, error)
        self._put_back(request, server)
        server.failures_in_a_row += 1
        if server.failures_in_a_row >= _FAILURES_BEFORE_REST and any(
            s.is_up for s in self._servers if s != server
        ):
            self._rest(server)
        await asyncio.sleep(max(self._backoff(request.attempts), error.retry_after_seconds))
        if request.avoided is server:
            request.avoided = None
            self._changed.set()
        return True

    def _put_back(self, request: Request, avoided: _Server | None) -> None:
        request.avoided = avoided
        self._again.append(request)
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

    def _await_return(self, server: _Server, reason: str) -> None:
        if not server.is_up:
            return
        server.is_up, server.outage = False, reason
        logger.warning(
            "%s cannot be reached (%s); it has %g s to come back",
            server.endpoint.base_url,
            reason,
            self._limits.outage_seconds,
        )
        self._start(self._watch(server))

    def _rest(self, server: _Server) -> None:
        if not server.is_up:
            return
        server.is_up = False
        seconds = self._backoff(server.failures_in_a_row // _FAILURES_BEFORE_REST)
        logger.debug("%s fails only and rests for %.1f s", server.endpoint.base_url, seconds)
        self._start(self._wake(server, seconds))

    def _start(self, task: Coroutine[None, None, None]) -> None:
        running = asyncio.create_task(task)
        self._returns.add(running)
        running.add_done_callback(self._returns.discard)

    async def _wake(self, server: _Server, seconds: float) -> None:
        await asyncio.sleep(seconds)
        server.is_up = True
        self._changed.set()

    async def _watch(self, server: _Server) -> None:
        give_up_at = time.monotonic() + self._limits.outage_seconds
        delay = self._limits.backoff_seconds
        async with Connection(server.endpoint, self._sampling, self._limits.timeout_seconds) as connection:
            while not server.is_up and time.monotonic() < give_up_at:
                await asyncio.sleep(min(delay, max(0.0, give_up_at - time.monotonic())))
                server.is_up = await connection.is_there()
                delay = min(_LONGEST_PROBE_SECONDS, 2 * delay)
        server.is_given_up = not server.is_up
        logger.warning("%s %s", server.endpoint.base_url, "is back" if server.is_up else "did not come back")
        self._changed.set()
