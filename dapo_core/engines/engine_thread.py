"""An engine on a thread of its own, which decodes whatever its owner does meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import TypeVar

from dapo_core.engines.base import Engine, GenerationRequest, Response

Result = TypeVar("Result")


class EngineThread:
    """An engine that decodes as long as it has requests; calls of it take turns with its steps.

    All of it happens on one thread, construction included: torch keeps the device, the number of threads and the
    compiler's settings per thread. An error of a step is raised by every later `submit`, `take` and `run`.
    """

    def __init__(self, build: Callable[[], Engine], on_news: Callable[[], None]) -> None:
        """Blocks until the engine is built. `on_news` is called on the thread when `take` has something to say."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._on_news = on_news
        self._responses: SimpleQueue[Response] = SimpleQueue()
        self._is_stepping = False  # of the thread alone
        self._last_step: Future[None] = Future()
        self._engine = self._thread.submit(build).result()

    @property
    def policy_version(self) -> int:
        """Optimizer steps whose weights the engine holds."""
        return self._engine.policy_version

    def num_unfinished(self) -> int:
        """Requests that the engine has neither finished nor aborted."""
        return self._engine.num_unfinished()

    def num_unfinished_tokens(self) -> int:
        """Response tokens of these so far."""
        return self._engine.num_unfinished_tokens()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests, all between the same two steps."""
        self.run(lambda engine: engine.submit(requests))

    def take(self) -> list[Response]:
        """The responses that finished since the last call."""
        self._raise_failure()
        responses = []
        while True:
            try:
                responses.append(self._responses.get_nowait())
            except Empty:
                return responses

    def run(self, call: Callable[[Engine], Result]) -> Result:
        """The result of `call`, made between two steps."""
        return self._thread.submit(self._run, call).result()

    def close(self) -> None:
        """Close the engine and end the thread."""
        self._thread.submit(self._engine.close).result()
        self._thread.shutdown()

    def _run(self, call: Callable[[Engine], Result]) -> Result:
        self._raise_failure()
        result = call(self._engine)
        if not self._is_stepping and self._engine.num_unfinished():
            self._is_stepping = True
            self._queue_step()
        return result

    def _queue_step(self) -> None:
        self._last_step = self._thread.submit(self._step)
        self._last_step.add_done_callback(lambda step: self._on_news() if step.exception() else None)

    def _step(self) -> None:
        if self._engine.num_unfinished():
            finished = self._engine.step()
            for response in finished:
                self._responses.put(response)
            if finished:
                self._on_news()
        self._is_stepping = self._engine.num_unfinished() > 0
        if self._is_stepping:
            self._queue_step()

    def _raise_failure(self) -> None:
        if self._last_step.done():
            self._last_step.result()
