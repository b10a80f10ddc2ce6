"""Logs what a long operation is doing, every 10 s until it ends. Standard library only."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
import time
from collections.abc import Callable, Iterator

SECONDS = 10.0


@contextlib.contextmanager
def heartbeat(logger: logging.Logger, describe: Callable[[], str]) -> Iterator[None]:
    """Log what `describe` returns, and the seconds since the block began, every 10 s."""
    ended, began = threading.Event(), time.monotonic()

    def beat() -> None:
        while not ended.wait(SECONDS):
            logger.info("%s (%.0f s so far)", describe(), time.monotonic() - began)

    context = contextvars.copy_context()  # the console prints the stage
    thread = threading.Thread(target=context.run, args=(beat,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
