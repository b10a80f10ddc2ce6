"""SIGTERM and SIGINT as a request to stop where nothing is lost; a second one ends a training at once."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
ECHO_SECONDS = 1.0  # in which another signal is the same request: some wrappers pass on what the terminal sent too


class StopRequested(Exception):
    """A training has come to a point where it can stop, as it was asked to."""


class StopRequest:
    """The request to stop, listened for as long as the block lasts; the handlers are then those of before.

    A signal raises KeyboardInterrupt, but inside `deferred` the first one is noted, and `check` raises. A signal
    that is ignored on entering stays so, as in what a shell runs in the background. Only the main thread listens.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.signal: signal.Signals | None = None  # that asked first
        self.is_urgent = False  # asked a second time
        self._clock = clock
        self._asked_at = 0.0
        self._is_deferred = False
        self._last_step = 0  # after which training would stop
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside, what is begun must be ended in order."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False

    @contextmanager
    def interruptible(self, step: int) -> Iterator[None]:
        """Training, `step` steps done, only waits inside: a request that comes or came raises StopRequested.

        What waits must call `check` every now and then. Once left, a request has to wait for the next such block.
        """
        self._last_step = step
        self.check()
        yield
        self.check()
        self._last_step = step + 1

    def check(self) -> None:
        """Raise StopRequested if there is a request."""
        if self.signal is not None:
            raise StopRequested(self.signal.name)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = self._clock()
        if self.signal is not None:
            if now < self._asked_at + ECHO_SECONDS:
                return
            self.is_urgent = True
            raise KeyboardInterrupt
        self.signal, self._asked_at = signal.Signals(number), now
        if not self._is_deferred:
            raise KeyboardInterrupt
        # Not from here: the signal may have come in the midst of a write to where the log goes.
        threading.Thread(target=logger.warning, args=(self._prospect(),)).start()

    def _prospect(self) -> str:
        assert self.signal is not None
        then = f"a last checkpoint after step {self._last_step}, then the end"
        if not self._last_step:
            then = "the end, and nothing to save as no step is done"
        return f"told to stop by {self.signal.name}: {then}; another signal ends it at once"
