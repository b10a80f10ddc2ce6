"""SIGTERM and SIGINT as a request to stop where nothing is lost; a second signal ends a training at once."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from dapo_core.errors import DapoError

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
ECHO_SECONDS = 1.0  # in which another signal is the same request: wrappers repeat what the terminal sent


class StopRequested(Exception):
    """The training has reached a point where it can stop, as requested."""


class TrainingStopped(DapoError, RuntimeError):
    """A signal ended the training early; the message says what it continues from."""

    exit_code: int = 143  # of the command: 128 plus the signal's number


class StopRequest:
    """Listens for SIGTERM and SIGINT inside its `with` block; on leaving, the handlers before it come back.

    A signal raises KeyboardInterrupt. Inside `deferred` the first one is only recorded, and `check` raises. An
    ignored signal stays ignored, as in what a shell runs in the background. Other threads than the main one do not
    listen.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.signal: signal.Signals | None = None  # the first one
        self.is_urgent = False  # a second one came
        self._clock = clock
        self._requested_at = 0.0
        self._is_deferred = False
        self._last_step = 0  # the step that would get the last checkpoint; 0 for none
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._record)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Record the first signal inside, instead of raising KeyboardInterrupt."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False

    @contextmanager
    def interruptible(self, step: int) -> Iterator[None]:
        """Raise StopRequested for a request before or inside: training step `step` only waits here.

        The caller calls `check` while it waits. After the block a request waits for the next such block.
        """
        self._last_step = step - 1
        self.check()
        yield
        self.check()
        self._last_step = step

    def check(self) -> None:
        """Raise StopRequested if there is a request."""
        if self.signal is not None:
            raise StopRequested(self.signal.name)

    def _record(self, number: int, frame: FrameType | None) -> None:
        now = self._clock()
        if self.signal is not None:
            if now < self._requested_at + ECHO_SECONDS:
                return
            self.is_urgent = True
            raise KeyboardInterrupt
        self.signal, self._requested_at = signal.Signals(number), now
        if not self._is_deferred:
            raise KeyboardInterrupt
        # In a thread: the signal may have interrupted a write to the log's stream.
        threading.Thread(target=logger.warning, args=(self._outlook(),)).start()

    def _outlook(self) -> str:
        assert self.signal is not None
        then = "ending without a checkpoint, as no step is done"
        if self._last_step:
            then = f"writing a last checkpoint after step {self._last_step}, then ending"
        return f"{self.signal.name} received: {then}; another signal ends it at once"


@contextmanager
def raising_stopped(stop: StopRequest, continued_from: Callable[[], str | None]) -> Iterator[None]:
    """Raise TrainingStopped, which names the checkpoint to continue from, where the first signal ends training."""
    try:
        yield
    except (StopRequested, KeyboardInterrupt) as error:
        if stop.signal is None or stop.is_urgent:
            raise
        beginning = " before its first checkpoint; the same command starts from the beginning"
        stopped = TrainingStopped(f"training was stopped{continued_from() or beginning}")
        stopped.exit_code = 128 + stop.signal
        raise stopped from error
