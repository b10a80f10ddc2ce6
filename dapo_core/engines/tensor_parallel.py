"""One vLLM engine over several processes: each holds a part of every weight and makes the same calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from dapo_core.engines.base import EnginePart, EngineSettings, GenerationRequest, Response
from dapo_core.engines.vllm_engine import VllmEngine

Tell = Callable[[str, Sequence[Any]], None]  # a method's name and its arguments


class TensorParallelEngine(VllmEngine):
    """The part of an engine that its first process holds; `tell` has the other parts make each call as well.

    With vLLM's external launcher every part schedules for itself, and equal calls in equal order keep them alike.
    """

    def __init__(
        self,
        model_path: str | Path,
        settings: EngineSettings,
        seed: int,
        part: EnginePart,
        tell: Tell | None = None,
    ) -> None:
        """Blocks until all parts are constructed. `tell` is None in the processes that follow the first."""
        self._tell = tell or _tell_no_one
        super().__init__(model_path, settings, seed, part)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._tell("submit", [requests])
        super().submit(requests)

    def step(self) -> list[Response]:
        if self._rows:
            self._tell("step", [])
        return super().step()

    def abort(self, request_ids: Sequence[str]) -> list[Response]:
        self._tell("abort", [request_ids])
        return super().abort(request_ids)

    def receive_weights(self, policy_version: int) -> None:
        self._tell("receive_weights", [policy_version])
        super().receive_weights(policy_version)

    def sleep(self) -> None:
        self._tell("sleep", [])
        super().sleep()

    def wake(self, what: Collection[str]) -> None:
        self._tell("wake", [what])
        super().wake(what)

    def close(self) -> None:
        self._tell("close", [])
        super().close()

    def log_probs(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        self._tell("log_probs", [sequences])
        return super().log_probs(sequences)


def _tell_no_one(name: str, arguments: Sequence[Any]) -> None:
    pass
