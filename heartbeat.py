"""Logs what a long operation is doing, every 10 s until it ends. Standard library only."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
import time
from collections.abc import Callable, Iterator

logger = logging.getLogger(__name__)

SECONDS = 10.0

_operations: contextvars.ContextVar[list[Callable[[], str]] | None] = contextvars.ContextVar(
    "operations", default=None
)


@contextlib.contextmanager
def heartbeat(describe: Callable[[], str]) -> Iterator[None]:
    """Log what `describe` returns every 10 s; inside another heartbeat, in place of that one."""
    outer = _operations.get()
    if outer is not None:
        outer.append(describe)
        try:
            yield
        finally:
            outer.remove(describe)
        return
    operations, ended, began = [describe], threading.Event(), time.monotonic()

    def beat() -> None:
        while not ended.wait(SECONDS):
            logger.info("%s (%.0f s so far)", operations[-1](), time.monotonic() - began)

    token = _operations.set(operations)
    context = contextvars.copy_context()  # the console prints the stage
    thread = threading.Thread(target=context.run, args=(beat,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        _operations.reset(token)
        ended.set()
        thread.join()
