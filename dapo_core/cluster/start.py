"""Starts Ray, and policy ranks and rollout workers as its actors."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch
from ray._private import services
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dapo_core.checkpoint.shards import seed_generators
from dapo_core.cluster.actors import Actors
from dapo_core.cluster.policy_group import PolicyGroup
from dapo_core.cluster.rollout_group import RolloutGroup
from dapo_core.device import Device, device_for
from dapo_core.engines.base import EngineSettings, build_engine
from dapo_core.errors import ConfigError
from dapo_core.policy.rank import Policy
from dapo_core.pretrained import load_model_config, load_tokenizer
from dapo_core.rollout import RolloutWorker

if TYPE_CHECKING:
    from dapo_core.config.training import TrainingConfig

logger = logging.getLogger(__name__)

PLACEMENT_SECONDS = 300.0
CLOSE_SECONDS = 5.0
# Set for the whole job, so that Ray can use the worker processes that it starts in advance.
WORKER_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",  # ranks and engines take turns: spinning threads would starve each other
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


@dataclass(frozen=True)
class Cluster:
    """The roles of a training run, ready for calls."""

    policy: PolicyGroup
    rollouts: RolloutGroup


@contextmanager
def start_cluster(config: TrainingConfig, model_path: str | Path) -> Iterator[Cluster]:
    """Policy ranks and rollout workers with the model loaded; all of them end on exit.

    Starts a private Ray on this machine unless train.ray_address names a running one. Raises ConfigError if the
    cluster lacks the devices, and WorkerDied if a process dies while it starts. After WorkerDied the same process
    can start another cluster.
    """
    started = time.monotonic()
    if config.train.ray_address is None:  # all devices are this machine's
        device_for(config.train.device).require()
    groups: list[PlacementGroup] = []
    ranks: list[Any] = []
    workers: list[Any] = []
    try:
        _connect(config)
        logger.info("Ray is up after %.0f s", time.monotonic() - started)
        device = device_for(config.train.device)
        ranks += _place(_PolicyRank, config.train.num_ranks, config.train.threads_per_rank, device, groups)
        workers += _place(
            _RolloutRank, config.rollout.num_workers, config.rollout.threads_per_worker, device, groups
        )
        actors = Actors()
        actors.add("policy rank", ranks)
        actors.add("rollout worker", workers)
        address = actors.get(ranks[0].rendezvous.remote())
        starting = [
            rank.start.remote(number, len(ranks), address, str(model_path), config)
            for number, rank in enumerate(ranks)
        ]
        starting += [worker.start.remote(str(model_path), config) for worker in workers]
        actors.get(starting)
        counts, seconds = (len(ranks), len(workers)), time.monotonic() - started
        logger.info("%d policy ranks and %d rollout workers are ready after %.0f s", *counts, seconds)
        hidden_size = load_model_config(model_path, config.model.trust_remote_code).get_text_config().hidden_size
        limit = config.sampler.max_seconds_without_kept
        yield Cluster(PolicyGroup(ranks, config, actors, hidden_size), RolloutGroup(workers, limit, actors))
    finally:
        _end(ranks, workers, groups if config.train.ray_address else [])


def _end(ranks: Sequence[Any], workers: Sequence[Any], groups: Sequence[PlacementGroup]) -> None:
    """End all processes, even hanging ones, remove the placement groups of a shared Ray, and disconnect."""
    for rank in ranks:  # first: a worker may be waiting for weights that a rank will never send
        ray.kill(rank)
    closing = [worker.close.remote() for worker in workers]
    if closing:  # a hanging worker is killed, and its scoring processes end with it
        ray.wait(closing, num_returns=len(closing), timeout=CLOSE_SECONDS)
    for worker in workers:
        ray.kill(worker)
    for group in groups:
        remove_placement_group(group)
    ray.shutdown()


def _connect(config: TrainingConfig) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    common: dict[str, Any] = {
        "logging_level": "warning",
        "log_to_driver": True,
        "runtime_env": {"env_vars": WORKER_ENVIRONMENT},
    }
    if config.train.ray_address:
        with _keep_signal_handling():
            ray.init(address=config.train.ray_address, **common)
        return
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a private Ray on loopback; writes no token file
    num_cpus = (
        config.train.num_ranks * config.train.threads_per_rank
        + config.rollout.num_workers * config.rollout.threads_per_worker
    )
    with _keep_signal_handling():
        ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, **common)


@contextmanager
def _keep_signal_handling() -> Iterator[None]:
    """Keep this process's SIGTERM handler while Ray starts, and Ray's processes alive on signals to the group.

    A stopped training needs them for its last checkpoint. Ray has no public way for either: it installs its own
    handler, and shields its processes only from SIGINT (test_stopping.py fails when these parts move).
    """
    popen = services.ConsolePopen
    services.ConsolePopen = partial(popen, start_new_session=True)  # type: ignore[assignment,misc]
    handler = signal.getsignal(signal.SIGTERM)
    is_main = threading.current_thread() is threading.main_thread()
    try:
        yield
    except SystemExit as error:  # raised by Ray's handler
        if is_main and error.code == signal.SIGTERM and callable(handler):
            handler(signal.SIGTERM, None)
        raise
    finally:
        services.ConsolePopen = popen  # type: ignore[misc]
        if is_main:
            signal.signal(signal.SIGTERM, handler)


def _place(actor_class: type, count: int, threads: int, device: Device, groups: list[PlacementGroup]) -> list[Any]:
    """Starts `count` actors in a new placement group, which is appended to `groups`."""
    bundle: dict[str, float] = {"CPU": threads}
    if device.kind != "cpu":
        bundle[device.ray_resource] = 1
    group = placement_group([bundle] * count, strategy="PACK")
    groups.append(group)
    if not group.wait(PLACEMENT_SECONDS):
        raise ConfigError(
            f"Ray has no room for {count} workers of {bundle} within {PLACEMENT_SECONDS:.0f} s; it has "
            f"{ray.cluster_resources()}, of which {ray.available_resources()} are free: lower train.num_ranks, "
            "rollout.num_workers or the threads, or add nodes"
        )
    options: dict[str, Any] = {"num_cpus": threads}
    if device.ray_resource == "GPU":
        options["num_gpus"] = 1
    elif device.ray_resource != "CPU":
        options["resources"] = {device.ray_resource: 1}
    return [
        ray.remote(actor_class)
        .options(
            **options,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
        )
        .remote()
        for number in range(count)
    ]


class _Process:
    """A process of a training."""

    def place(self) -> str:
        """Where the process runs; also called as a ping."""
        return f"pid {os.getpid()} on {ray.util.get_node_ip_address()}"


class _PolicyRank(_Process, Policy):
    """A policy rank as an actor, constructed by `start` because that is collective."""

    def __init__(self) -> None:
        pass

    def rendezvous(self) -> str:
        """The address at which all ranks meet."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def start(self, rank: int, num_ranks: int, address: str, model_path: str, config: TrainingConfig) -> None:
        """Join the other ranks and load this rank's part of the model."""
        device = device_for(config.train.device)
        device.require()
        torch.set_num_threads(config.train.threads_per_rank)
        seed_generators(config.run.seed, rank, num_optimizer_steps=0)
        torch.distributed.init_process_group(device.backend, init_method=address, rank=rank, world_size=num_ranks)
        super().__init__(model_path, config)


class _RolloutRank(_Process, RolloutWorker):
    """A rollout worker as an actor, constructed by `start`."""

    def __init__(self) -> None:
        pass

    def start(self, model_path: str, config: TrainingConfig) -> None:
        """Load the model into the engine and start the scoring processes."""
        device = device_for(config.train.device)
        device.require()
        torch.set_num_threads(config.rollout.threads_per_worker)
        engine = build_engine(
            config.rollout.engine,
            model_path,
            engine_settings(config, device),
            seed=config.run.seed,
            device=str(device.torch_device()),
        )
        super().__init__(engine, load_tokenizer(model_path, config.model.trust_remote_code), config)


def engine_settings(config: TrainingConfig, device: Device) -> EngineSettings:
    """The settings of a rollout worker's engine."""
    return EngineSettings(
        dtype=str(device.resolve_dtype(config.rollout.dtype)).removeprefix("torch."),
        max_model_tokens=config.data.max_prompt_tokens + config.rollout.max_response_tokens,
        max_response_tokens=config.rollout.max_response_tokens,
        max_num_seqs=config.rollout.max_num_seqs,
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        top_k=config.rollout.top_k,
        memory_bytes=int(config.rollout.memory_gigabytes * 1024**3),
        memory_utilization=config.rollout.memory_utilization,
        threads=config.rollout.threads_per_worker,
        trust_remote_code=config.model.trust_remote_code,
    )
