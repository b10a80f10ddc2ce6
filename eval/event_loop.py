"""An event loop beside the main thread, which is then free to be interrupted."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

_NOTICE_SECONDS = 0.1


def run_in_thread(work: Coroutine[Any, Any, None], stop: Callable[[], None]) -> None:
    """Run a coroutine to its end in a thread; whatever is raised meanwhile comes out of here, after `stop`.

    asyncio forgets what a signal handler raises in one of its callbacks, Prefect's TerminationSignal for one. In
    the main thread, where handlers run, there are none. `stop` is called in the loop, in any case, and has the
    coroutine return.
    """
    runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
    loop = runner.get_loop()
    with ThreadPoolExecutor(1) as thread:
        try:
            running = thread.submit(runner.run, work, context=contextvars.copy_context())
            # A handler runs once this thread does: the system may have given the signal to another one.
            while not running.done():
                wait([running], _NOTICE_SECONDS)
            running.result()
        finally:
            loop.call_soon_threadsafe(stop)
            thread.submit(runner.close)
