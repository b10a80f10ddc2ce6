"""What the groups of actors need of the framework that runs their calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Calls(Protocol):
    """Calls of actors: `actor.METHOD.remote(...)` returns a reference, which these resolve."""

    def get(self, references: Any, max_seconds: float = ...) -> Any:
        """Return the results, or raise the first error; TimeoutError after `max_seconds`."""

    def put(self, value: Any) -> Any:
        """Return a reference to a value that several calls take as an argument."""

    def wait(self, references: Sequence[Any], max_seconds: float) -> list[Any]:
        """Return references whose results are there; [] if none is within `max_seconds`."""

    def check(self) -> None:
        """Raise WorkerDied if an actor is known to be dead."""
