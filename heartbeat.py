"""Logs what a long operation is doing, so that no silence exceeds 10 s. Standard library only."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

logger = logging.getLogger(__name__)

SECONDS = 7.0  # of silence; an operation speaks after a quarter of it at the earliest
MAX_CHARS = 200  # of a description, which may quote a long line
_QUOTED = re.compile(r" \(\d+ s so far\)$")  # another process's line may end so

_Operation = tuple[Callable[[], str], float]  # its description, and when it began
_operations: contextvars.ContextVar[list[_Operation] | None] = contextvars.ContextVar(
    "operations", default=None
)
_last_line = time.monotonic()


def line_shown() -> None:
    """Take note that this process has just shown a line, whatever it says."""
    global _last_line
    _last_line = time.monotonic()


def print_to(stream: TextIO) -> None:
    """Print the lines to a stream, in a process that does not set up logging."""
    logger.addHandler(logging.StreamHandler(stream))
    logger.setLevel(logging.INFO)


@contextlib.contextmanager
def heartbeat(describe: Callable[[], str]) -> Iterator[None]:
    """Log what `describe` returns after each 7 s in which this process shows no line.

    Inside another heartbeat, in place of that one.
    """
    operation = describe, time.monotonic()
    outer = _operations.get()
    if outer is not None:
        outer.append(operation)
        try:
            yield
        finally:
            outer.remove(operation)
        return
    operations, ended = [operation], threading.Event()
    token = _operations.set(operations)
    context = contextvars.copy_context()  # the console prints the stage
    thread = threading.Thread(target=context.run, args=(_beat, operations, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        _operations.reset(token)
        ended.set()
        thread.join()


def _beat(operations: list[_Operation], ended: threading.Event) -> None:
    while not ended.wait(SECONDS / 16):
        describe, began = operations[-1]
        now = time.monotonic()
        if now >= max(_last_line + SECONDS, began + SECONDS / 4):
            text = _QUOTED.sub("", describe())
            if len(text) > MAX_CHARS:
                text = f"{text[:MAX_CHARS]} ..."
            logger.info("%s (%.0f s so far)", text, now - began)
            line_shown()
