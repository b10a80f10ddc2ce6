"""Time limits of stages, enforced by SIGALRM in the main thread, where stages run."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from dapo_core.errors import DapoError

logger = logging.getLogger(__name__)

REPEAT_SECONDS = 5.0  # between alarms


class StageTimedOut(DapoError, TimeoutError):
    """A stage exceeded its limit in flow.time_limits."""


class _LimitReached(KeyboardInterrupt):
    """Raised by the alarm: asyncio lets only KeyboardInterrupt and SystemExit out of a coroutine."""


@contextlib.contextmanager
def time_limit(hours: float | None, key: str, afterwards: str) -> Iterator[None]:
    """Raise StageTimedOut in the block after that many hours; the message names the key and the
    advice.

    The block's `finally` clauses, which end child processes, may take longer.
    """
    if hours is None:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        logger.warning(
            "%s=%g is not enforced: this stage does not run in the main thread", key, hours
        )
        yield
        return
    handler = signal.signal(signal.SIGALRM, _raise_limit_reached)
    try:
        timer = signal.setitimer(signal.ITIMER_REAL, hours * 3600, REPEAT_SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, *timer)
            signal.signal(signal.SIGALRM, handler)
    except _LimitReached:
        raise StageTimedOut(
            f"{key}={hours:g}: stopped after {_duration(hours)}; raise it, or {afterwards}"
        ) from None


@contextlib.contextmanager
def time_limit_paused() -> Iterator[None]:
    """Suspend the enclosing limit, for a block that waits for a lock."""
    if signal.getsignal(signal.SIGALRM) is not _raise_limit_reached:
        yield
        return
    left = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *left)


def _raise_limit_reached(number: int, frame: FrameType | None) -> None:
    """Raise unless the block is ending already. Alarms repeat since Python drops exceptions in
    finalizers.
    """
    error = sys.exc_info()[1]
    while error is not None:
        if isinstance(error, _LimitReached):
            return
        error = error.__context__
    raise _LimitReached


def _duration(hours: float) -> str:
    if hours >= 1:
        return f"{hours:g} h"
    return f"{hours * 60:.3g} min" if hours >= 1 / 60 else f"{hours * 3600:.3g} s"
