"""A training's roles without Ray: one policy rank and one rollout worker, in a process each."""

from __future__ import annotations

import math
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from dapo_core.checkpoint.shards import seed_generators
from dapo_core.cluster.interface import Cluster
from dapo_core.cluster.policy_group import PolicyGroup
from dapo_core.cluster.rollout_group import RolloutGroup
from dapo_core.config.training import TrainingConfig
from dapo_core.draw.rollout import RolloutWorker
from dapo_core.engines.factory import build_engine, engine_settings
from dapo_core.errors import WorkerDied
from dapo_core.machine.device import device_for
from dapo_core.model.pretrained import load_model_config, load_tokenizer
from dapo_core.policy.rank import Policy
from dapo_core.policy.requirements import require_averages
from dapo_core.weights.transfer import WeightTransfer


class Actor:
    """An object in a process of its own, whose methods are called one after the other."""

    def __init__(self, build: Callable[[], Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, build))
        self._process.start()
        theirs.close()
        self._thread = ThreadPoolExecutor(1)
        self.is_built: Future[Any] = self._thread.submit(self._receive)

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *values: self._thread.submit(self._call, name, values))

    def end(self) -> None:
        """End the process, also in the middle of a call."""
        self._process.kill()
        self._process.join()
        self._thread.shutdown()

    def _call(self, name: str, values: Sequence[Any]) -> Any:
        given = [value.result() if isinstance(value, Future) else value for value in values]
        self._pipe.send((name, given))
        return self._receive()

    def _receive(self) -> Any:
        try:
            result, error, trace = self._pipe.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            raise WorkerDied(f"the process ended with exit status {code}") from None
        if error is not None:
            raise error from RuntimeError(trace)
        return result


def _serve(pipe: Connection, build: Callable[[], Any]) -> None:
    """Build the object, then answer calls until the other end is gone."""
    built: list[Any] = []
    pipe.send(_answer(lambda: built.append(build())))
    with suppress(EOFError):
        while True:
            name, values = pipe.recv()
            pipe.send(_answer(partial(getattr(built[0], name), *values)))
    os._exit(0)  # its threads may hang


def _answer(call: Callable[[], Any]) -> tuple[Any, BaseException | None, str]:
    """The call's result, or its error with the traceback."""
    try:
        return call(), None, ""
    except Exception as error:  # noqa: BLE001 - raised again by the process that asked
        return None, error, traceback.format_exc()


class Calls:
    """dapo_core.cluster.calls.Calls of these actors."""

    def get(self, references: Any, max_seconds: float = math.inf) -> Any:
        seconds = None if max_seconds == math.inf else max_seconds
        if isinstance(references, Future):
            return references.result(seconds)
        return [reference.result(seconds) for reference in references]

    def put(self, value: Any) -> Any:
        return value

    def wait(self, references: Sequence[Any], max_seconds: float) -> list[Any]:
        return list(wait(references, max_seconds, FIRST_COMPLETED).done)

    def check(self) -> None:
        """A dead process fails its calls at once."""


@contextmanager
def start_processes(
    config: TrainingConfig,
    model_path: Path,
    *_: object,
    build_rank: Callable[..., Any] | None = None,
    build_worker: Callable[..., Any] | None = None,
) -> Iterator[Cluster]:
    """As dapo_core.cluster.start.start_cluster, with both roles on the same device.

    `build_rank` and `build_worker` replace the roles' constructors.
    """
    assert config.train.num_ranks == config.rollout.num_workers == 1
    device = device_for(config.train.device)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        arguments = model_path, config
        rank = Actor(partial(build_rank or policy_rank, f"{folder}/meet", *arguments))
        stack.callback(rank.end)
        worker = Actor(partial(build_worker or rollout_worker, *arguments))
        stack.callback(worker.end)
        calls = Calls()
        calls.get([rank.is_built, worker.is_built])
        hidden_size = load_model_config(model_path).get_text_config().hidden_size
        weights = WeightTransfer([rank], [[worker]], calls.get)
        weights.connect([True], str, device.has_own_memory)
        yield Cluster(
            PolicyGroup([rank], config, calls, hidden_size),
            RolloutGroup([worker], config.sampler.max_seconds_without_kept, calls),
            weights,
            config,
        )


def join_alone(meeting_point: str, config: TrainingConfig) -> None:
    """Make this process the only rank of a process group on the configuration's device."""
    device = device_for(config.train.device)
    device.require()
    torch.set_num_threads(config.threads_per_rank)
    seed_generators(config.run.seed, 0, num_optimizer_steps=0)
    backends = device.backends(True)
    address = f"file://{meeting_point}"
    torch.distributed.init_process_group(backends, init_method=address, rank=0, world_size=1)
    require_averages(device.torch_device())


def policy_rank(meeting_point: str, model_path: Path, config: TrainingConfig) -> Policy:
    """Build the rank, as PolicyRank.start does."""
    join_alone(meeting_point, config)
    return Policy(model_path, config)


def rollout_worker(model_path: Path, config: TrainingConfig) -> RolloutWorker:
    """Build the worker, as RolloutRank.start does."""
    device = device_for(config.train.device)
    device.require()
    settings = engine_settings(config, device)
    engine = config.rollout.engine, model_path, settings, config.run.seed
    build = partial(build_engine, *engine, str(device.torch_device()))
    return RolloutWorker(build, load_tokenizer(model_path), config)
