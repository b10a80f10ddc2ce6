"""Wall-clock seconds of the phases of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseTimer:
    """Wall-clock seconds of a step's phases."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent in the block to the phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def attribute(self, seconds: float, source: str, target: str) -> None:
        """Move up to `seconds` from phase `source` to phase `target`."""
        seconds = min(seconds, self.seconds[source])
        self.seconds[source] -= seconds
        self.seconds[target] = self.seconds.get(target, 0.0) + seconds

    def read(self) -> dict[str, float]:
        """Return the seconds of every phase so far, and of the whole `step`."""
        return {**self.seconds, "step": time.perf_counter() - self.started}
