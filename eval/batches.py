"""Outcomes collected for milliseconds: grading and writing them one by one costs more than the requests do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from eval.dispatch import Outcome, Request

_COLLECTING_SECONDS = 0.05  # what a kill may cost beside the requests in flight
_MOST_PENDING = 4096  # outcomes that are not yet recorded; more wait, and their workers with them

Batch = list[tuple[Request, Outcome]]


class Batches:
    """Has outcomes recorded in batches by `record`, several of which may run at once."""

    def __init__(self, record: Callable[[Batch], Awaitable[None]]) -> None:
        self._record = record
        self._collected: Batch = []
        self._num_pending = 0
        self._running: set[asyncio.Future[None]] = set()
        self._failure: BaseException | None = None

    async def add(self, request: Request, outcome: Outcome) -> None:
        """Keep an outcome for the next batch; wait while too many are pending. Raises what `record` raised."""
        self._collected.append((request, outcome))
        self._num_pending += 1
        if outcome.answer is None:  # recorded at once: the requests end when only failures come back
            self._start()
            await asyncio.wait(self._running)
        elif len(self._collected) == 1:
            asyncio.get_running_loop().call_later(_COLLECTING_SECONDS, self._start)
        while self._num_pending > _MOST_PENDING and self._running:
            await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
        if self._failure is not None:
            raise self._failure

    async def finish(self) -> None:
        """Return once every outcome is recorded. Raises what `record` raised."""
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
