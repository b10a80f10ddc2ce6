"""A limit on how long a stage may take, kept by an alarm in the main thread, where stages run."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from dapo_core.errors import StageTimedOut

logger = logging.getLogger(__name__)

AGAIN_SECONDS = 5.0


class _LimitReached(KeyboardInterrupt):
    """What the alarm raises.

    No `except Exception` of a stage holds it up, and asyncio lets nothing but KeyboardInterrupt and SystemExit out
    of a coroutine: Prefect's own time-out, an asyncio.CancelledError, could end one request and be forgotten.
    """


@contextlib.contextmanager
def time_limit(hours: float | None, key: str, afterwards: str) -> Iterator[None]:
    """Leave the block after that many hours with StageTimedOut, which names the key and what comes afterwards.

    What the block's own `finally` clauses do is not limited: they end child processes.
    """
    if hours is None:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        logger.warning("%s=%g is not kept: this stage does not run in the main thread", key, hours)
        yield
        return
    handler = signal.signal(signal.SIGALRM, _raise_limit_reached)
    try:
        timer = signal.setitimer(signal.ITIMER_REAL, hours * 3600, AGAIN_SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, *timer)
            signal.signal(signal.SIGALRM, handler)
    except _LimitReached:
        raise StageTimedOut(
            f"{key}={hours:g}: ended after {_duration(hours)}; raise it, or {afterwards}"
        ) from None


@contextlib.contextmanager
def clock_stopped() -> Iterator[None]:
    """Have the block, which only waits for its turn, not count for the limit around it, if there is one."""
    if signal.getsignal(signal.SIGALRM) is not _raise_limit_reached:
        yield
        return
    left = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *left)


def _raise_limit_reached(number: int, frame: FrameType | None) -> None:
    """Raise, unless the block is on its way out; Python drops what is raised in a finalizer, so it comes again."""
    error = sys.exc_info()[1]
    while error is not None:
        if isinstance(error, _LimitReached):
            return
        error = error.__context__
    raise _LimitReached


def _duration(hours: float) -> str:
    return (
        f"{hours:g} h" if hours >= 1 else f"{hours * 60:.3g} min" if hours >= 1 / 60 else f"{hours * 3600:.3g} s"
    )
