"""A vLLM engine over two processes: this one, and a child that repeats its calls."""

import multiprocessing
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from dapo_core.engines.base import EnginePart, EngineSettings
from dapo_core.engines.vllm_engine import TensorParallelEngine
from dapo_core.errors import RolloutError


class _First(TensorParallelEngine):
    """Also forwards settings that tests change, and copies of weights, to the child."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "settings" and "settings" in self.__dict__:
            self._broadcast("__setattr__", [name, value])
        super().__setattr__(name, value)

    def load_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int
    ) -> None:
        copies = [(name, tensor.detach().clone()) for name, tensor in weights]
        self._broadcast("load_weights", [copies, policy_version])
        super().load_weights(copies, policy_version)


def _follow(
    connection: Connection, model_path: Path, settings: EngineSettings, address: str
) -> None:
    engine = TensorParallelEngine(model_path, settings, 0, EnginePart(1, address))
    name = ""
    while name != "close":
        name, arguments = connection.recv()
        with suppress(RolloutError):  # the first process raises it too
            getattr(engine, name)(*arguments)


@contextmanager
def engine_of_two_processes(
    model_path: Path, settings: EngineSettings, folder: Path
) -> Iterator[TensorParallelEngine]:
    """Yield the first part of an engine whose `settings` have two parts."""
    address = f"file://{folder}/{folder.parent.name}-{folder.name}-meeting"
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_follow, args=(theirs, model_path, settings, address))
    child.start()
    try:
        engine = _First(
            model_path, settings, 0, EnginePart(0, address), lambda *call: ours.send(call)
        )
        yield engine
        engine.close()
        child.join(300)
        assert child.exitcode == 0
    finally:
        child.kill()
        child.join()
        for path in Path("/dev/shm").glob(f"{Path(address).name}*"):
            path.unlink(missing_ok=True)
