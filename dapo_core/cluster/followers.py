"""Repeats an engine's calls on its other parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray


class Followers:
    """Repeats calls on an engine's other parts; raises their earlier errors."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = parts
        self._calls: list[Any] = []

    def __call__(self, name: str, arguments: Sequence[Any]) -> None:
        if self._calls:
            done, self._calls = ray.wait(self._calls, num_returns=len(self._calls), timeout=0)
            ray.get(done)
        self._calls += [part.make_call.remote(name, arguments) for part in self._parts]

    def wait(self) -> None:
        """Wait for all calls."""
        calls, self._calls = self._calls, []
        ray.get(calls)
