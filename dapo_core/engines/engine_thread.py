"""Runs an engine on its own thread, so that it keeps decoding while its owner does other work."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeVar

from dapo_core.engines.base import Engine, GenerationRequest, Response

Result = TypeVar("Result")


@dataclass
class Usage:
    """How much of an engine was used, over a span of time."""

    began: float  # time.monotonic()
    seconds: float = 0.0  # length of the span
    step_seconds: float = 0.0  # in engine steps
    sequence_seconds: float = 0.0  # the same, times the sequences that each step decoded
    num_decoded: int = 0  # tokens
    num_passes: int = 0  # times that a sequence was decoded; several tokens each with drafts


class EngineThread:
    """An engine that steps as long as it has requests; other calls run between steps.

    Everything runs on one thread, including construction: torch's device, thread count and compiler
    settings are per thread. An error in a step is raised by every later `submit`, `take` and `run`.
    """

    def __init__(self, build: Callable[[], Engine], on_news: Callable[[], None]) -> None:
        """Block until the engine is built. `on_news` is called when `take` has something."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._on_news = on_news
        self._responses: SimpleQueue[Response] = SimpleQueue()
        self._is_stepping = False  # accessed by the thread only
        self._last_step: Future[None] = Future()
        self._engine = self._thread.submit(build).result()
        self._usage = Usage(time.monotonic())

    @property
    def policy_version(self) -> int:
        """Number of optimizer steps behind the engine's weights."""
        return self._engine.policy_version

    def num_unfinished(self) -> int:
        """Return the number of requests that are neither finished nor aborted."""
        return self._engine.num_unfinished()

    def num_unfinished_tokens(self) -> int:
        """Return the response tokens of unfinished requests so far."""
        return self._engine.num_unfinished_tokens()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests, all before the next step."""
        self.run(lambda engine: engine.submit(requests))

    def take(self) -> list[Response]:
        """Return the responses finished since the last call."""
        self._raise_failure()
        return [self._responses.get() for _ in range(self._responses.qsize())]

    def run(self, call: Callable[[Engine], Result]) -> Result:
        """Run `call` between two steps and return its result."""
        return self._thread.submit(self._run, call).result()

    def take_usage(self) -> Usage:
        """Return the engine's usage since the last call."""

        def take(engine: Engine) -> Usage:
            usage, self._usage = self._usage, Usage(time.monotonic())
            usage.seconds = self._usage.began - usage.began
            usage.num_decoded, usage.num_passes = engine.num_decoded, engine.num_passes
            engine.num_decoded = engine.num_passes = 0
            return usage

        return self.run(take)

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
        self._last_step.add_done_callback(
            lambda step: self._on_news() if step.exception() else None
        )

    def _step(self) -> None:
        if num_unfinished := self._engine.num_unfinished():
            began = time.monotonic()
            finished = self._engine.step()
            seconds = time.monotonic() - began
            self._usage.step_seconds += seconds
            num_decoding = min(num_unfinished, self._engine.settings.max_num_seqs)
            self._usage.sequence_seconds += seconds * num_decoding
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
