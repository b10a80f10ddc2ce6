"""Graceful stop: the first signal stops at a safe point, the second one at once."""

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
ECHO_SECONDS = 1.0  # ignore repeats: wrappers forward a signal that the terminal has already sent


class StopRequested(Exception):
    """Training reached a safe point after a stop request."""


class TrainingStopped(DapoError, RuntimeError):
    """A signal ended training early; the message names the checkpoint to resume from."""

    exit_code: int = 143  # of the command: 128 + signal number


class StopRequest:
    """Handles SIGTERM and SIGINT inside its `with` block; restores the previous handlers on exit.

    A signal raises KeyboardInterrupt. Inside `deferred`, the first one is only recorded, and
    `check` raises. Signals that are ignored, as in shell background jobs, stay ignored. Has no
    effect outside the main thread.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.signal: signal.Signals | None = None  # the first signal
        self.is_urgent = False  # a second signal arrived
        self._clock = clock
        self._requested_at = 0.0
        self._is_deferred = False
        self._last_step = 0  # step of the final checkpoint on a stop; 0: none
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._record)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Record the first signal inside the block instead of raising KeyboardInterrupt."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False

    @contextmanager
    def interruptible(self, step: int) -> Iterator[None]:
        """Raise StopRequested for a request before or in the block, where step `step` only waits.

        The caller must call `check` while waiting. A request after the block takes effect in the
        next such block.
        """
        self._last_step = step - 1
        self.check()
        yield
        self.check()
        self._last_step = step

    def check(self) -> None:
        """Raise StopRequested if a stop was requested."""
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
        # In a thread: the signal may have interrupted a write to the log stream.
        threading.Thread(target=logger.warning, args=(self._message(),)).start()

    def _message(self) -> str:
        assert self.signal is not None
        action = "ending without a checkpoint, because no step is complete"
        if self._last_step:
            action = f"writing a final checkpoint after step {self._last_step}, then ending"
        return f"{self.signal.name} received: {action}; another signal ends training at once"


@contextmanager
def raising_stopped(stop: StopRequest, continued_from: Callable[[], str | None]) -> Iterator[None]:
    """Raise TrainingStopped, which names the checkpoint, if a first signal ends the block."""
    try:
        yield
    except (StopRequested, KeyboardInterrupt) as error:
        if stop.signal is None or stop.is_urgent:
            raise
        beginning = " before its first checkpoint; the same command starts from the beginning"
        stopped = TrainingStopped(f"training was stopped{continued_from() or beginning}")
        stopped.exit_code = 128 + stop.signal
        raise stopped from error
