"""Wall-clock seconds of the phases of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from heartbeat import heartbeat

# the draw and the first policy rank log their own progress
_WITH_PROGRESS = frozenset({"gen", "old_log_prob", "ref", "update_actor"})


class PhaseTimer:
    """Wall-clock seconds of a step's phases; long ones are logged with the step's `title`."""

    def __init__(self, title: str = "training") -> None:
        self.title = title
        self.started = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent in the block to the phase."""
        start, has_progress = time.perf_counter(), name in _WITH_PROGRESS
        try:
            with nullcontext() if has_progress else heartbeat(lambda: f"{self.title}: {name}"):
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
