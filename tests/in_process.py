"""A cluster of threads in this process, for trainings in which neither Ray nor a death is what is
tested.

Policy, engine and scoring are the real ones; a training takes seconds, where Ray and two processes
that import torch and transformers take twenty.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dapo_core.checkpoint.shards import seed_generators
from dapo_core.cluster import start
from dapo_core.cluster.interface import Cluster
from dapo_core.cluster.policy_group import PolicyGroup
from dapo_core.cluster.rollout_group import RolloutGroup
from dapo_core.config.training import TrainingConfig
from dapo_core.draw.rollout import RolloutWorker
from dapo_core.engines.factory import build_engine, engine_settings
from dapo_core.machine.device import device_for
from dapo_core.memory.holdings import OF_RANKS
from dapo_core.model.pretrained import load_model_config, load_tokenizer
from dapo_core.policy.rank import Policy
from dapo_core.weights.transfer import WeightTransfer


class _Reference:
    """A result to come; like Ray's, it is the same one when it is copied."""

    def __init__(self, future: Future[Any]) -> None:
        self.future = future

    def __deepcopy__(self, memo: dict[int, Any]) -> _Reference:
        return self


class _Actor:
    """Calls of an object's methods one after the other on a thread, with copies of arguments and
    results.
    """

    def __init__(self, build: Callable[[], Any]) -> None:
        self.executor = ThreadPoolExecutor(1)
        self.target = self.executor.submit(build).result()

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: self._submit(name, arguments))

    def _submit(self, name: str, arguments: tuple[Any, ...]) -> _Reference:
        values = [
            _get(each) if isinstance(each, _Reference) else copy.deepcopy(each)
            for each in arguments
        ]
        method = getattr(self.target, name)
        return _Reference(self.executor.submit(lambda: copy.deepcopy(method(*values))))


def _get(references: Any, timeout: float | None = None) -> Any:
    if isinstance(references, _Reference):
        return references.future.result(timeout)
    return [reference.future.result(timeout) for reference in references]


class Threads:
    """Calls of these actors."""

    def get(self, references: Any, max_seconds: float = math.inf) -> Any:
        return _get(references, None if max_seconds == math.inf else max_seconds)

    def put(self, value: Any) -> Any:
        future: Future[Any] = Future()
        future.set_result(copy.deepcopy(value))
        return _Reference(future)

    def wait(self, references: Sequence[Any], max_seconds: float) -> list[Any]:
        futures = [reference.future for reference in references]
        done = wait(futures, max_seconds, FIRST_COMPLETED).done
        return [each for each in references if each.future in done]

    def check(self) -> None:
        """Threads do not die."""


@contextmanager
def _start_cluster(config: TrainingConfig, model_path: Path, *_: object) -> Iterator[Cluster]:
    """As dapo_core.cluster.start.start_cluster, with one rank and one worker."""
    assert config.train.num_ranks == config.rollout.num_workers == 1
    device = device_for("cpu")

    def build_policy() -> Policy:
        seed_generators(config.run.seed, 0, num_optimizer_steps=0)
        return Policy(model_path, config)

    def build_worker() -> RolloutWorker:
        settings = engine_settings(config, device)
        return RolloutWorker(
            lambda: build_engine(config.rollout.engine, model_path, settings, config.run.seed),
            load_tokenizer(model_path),
            config,
        )

    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1
        )
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        started: list[_Actor] = []
        try:
            started.append(_Actor(build_policy))
            if config.train.is_colocated:
                _get(started[0].offload.remote(OF_RANKS))
            started.append(_Actor(build_worker))
            policy, worker = started
            calls = Threads()
            hidden_size = load_model_config(model_path).get_text_config().hidden_size
            weights = WeightTransfer([policy], [[worker]], calls.get)
            weights.connect([True], str)
            yield Cluster(
                PolicyGroup([policy], config, calls, hidden_size),
                RolloutGroup([worker], config.sampler.max_seconds_without_kept, calls),
                weights,
                config,
            )
        finally:
            if len(started) == 2:
                _get(started[1].close.remote())
            for actor in started:
                actor.executor.shutdown()
            torch.use_deterministic_algorithms(is_deterministic)
            if torch.distributed.is_initialized():  # else vLLM destroyed it
                torch.distributed.destroy_process_group()


@contextmanager
def without_ray() -> Iterator[None]:
    """Trainings inside the block run in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "start_cluster", _start_cluster)
        yield
