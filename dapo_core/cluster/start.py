"""Starts Ray, and the policy ranks and rollout workers as Ray actors."""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch
from ray.util.placement_group import PlacementGroup, remove_placement_group

from dapo_core.checkpoint.shards import seed_generators
from dapo_core.cluster.actors import Actors
from dapo_core.cluster.connection import connected_to_ray
from dapo_core.cluster.placement import LOST_NODE_SECONDS, PLACEMENT_SECONDS, Places, place_roles
from dapo_core.cluster.policy_group import PolicyGroup
from dapo_core.cluster.rollout_group import RolloutGroup
from dapo_core.cluster.shared_files import require_shared
from dapo_core.cluster.shrink import place_what_is_left
from dapo_core.draw.rollout import RolloutWorker
from dapo_core.engines.base import Engine, EnginePart, EngineSettings, build_engine
from dapo_core.errors import DapoError, counted
from dapo_core.machine.device import Device, device_for
from dapo_core.machine.ports import meeting_point
from dapo_core.machine.versions import require_versions
from dapo_core.model.pretrained import load_model_config, load_tokenizer
from dapo_core.policy.rank import Policy
from dapo_core.policy.requirements import require_averages
from dapo_core.turns import OF_RANKS
from dapo_core.weights.inbox import open_inbox
from dapo_core.weights.links import Link
from dapo_core.weights.proof import Loaded, merge_checksums, require_arrived

if TYPE_CHECKING:
    from dapo_core.config.training import TrainingConfig
    from dapo_core.weights.plan import WeightPlan

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0


class WeightTransfer:
    """Sends weights from policy rank 0 to every process of every engine.

    On CPUs, processes on rank 0's node read its shared memory. On accelerators, the process that
    shares rank 0's device uses IPC handles, since an NCCL or HCCL group may not contain a device
    twice. All others get broadcasts.
    """

    def __init__(
        self, ranks: Sequence[Any], engines: Sequence[Sequence[Any]], actors: Actors
    ) -> None:
        """`engines` lists the parts of each engine; the first part is the rollout worker."""
        self.ranks = ranks
        self.workers = [parts[0] for parts in engines]
        self.parts = [part for parts in engines for part in parts]
        self.names = [
            f"rollout worker {worker} of {len(engines)}"
            + (f", part {part} of {len(parts)}" if part else "")
            for worker, parts in enumerate(engines)
            for part in range(len(parts))
        ]
        self.actors = actors
        self.plan = actors.get(ranks[0].weight_plan.remote())

    def connect(
        self, is_local: Sequence[bool], meeting_point: Callable[[], str], on_device: bool = False
    ) -> None:
        """Open the connections. `is_local` tells for each engine process whether it shares rank 0's
        memory.

        That memory is the device's if `on_device`, else the node's. `meeting_point` returns a
        rendezvous address for rank 0 and the other processes.
        """
        memory = self.actors.get(self.ranks[0].open_outbox.remote(sum(is_local), on_device))
        size = 1 + is_local.count(False)
        address = meeting_point() if size > 1 else ""
        links = [
            Link(True, memory, sum(is_local[:number]), sum(is_local), on_device)
            if local
            else Link(False, address, 1 + is_local[:number].count(False), size)
            for number, local in enumerate(is_local)
        ]
        calls = [
            part.connect.remote(link, self.plan)
            for part, link in zip(self.parts, links, strict=True)
        ]
        if size > 1:
            calls.append(self.ranks[0].join_receivers.remote(address, size))
        self.actors.get(calls)

    def send(self, policy_version: int) -> None:
        """Load the policy's weights into every engine.

        Raises RolloutError unless every engine process loaded all of them exactly as sent, and
        WorkerDied if a process dies.
        """
        sending = [rank.send_weights.remote() for rank in self.ranks]
        receiving = [worker.receive_weights.remote(policy_version) for worker in self.workers]
        sent = self.actors.get(sending + receiving)[: len(sending)]
        loaded: list[Loaded] = self.actors.get(
            [part.loaded_weights.remote() for part in self.parts]
        )
        require_arrived(
            self.plan,
            merge_checksums(sent),
            dict(zip(self.names, loaded, strict=True)),
            policy_version,
        )


@dataclass(frozen=True)
class Cluster:
    """The started roles of a training."""

    policy: PolicyGroup
    rollouts: RolloutGroup
    weights: WeightTransfer
    config: TrainingConfig  # with the actual number of ranks and engines


@contextmanager
def start_cluster(
    config: TrainingConfig,
    model_path: str | Path,
    output_dir: Path | None = None,
    is_restart: bool = False,
) -> Iterator[Cluster]:
    """Start policy ranks and rollout workers with the model loaded; all of them end on exit.

    Starts a private Ray on this machine unless train.ray_address names a running cluster, whose
    nodes must see the model and `output_dir`. A restart after a dead process follows
    train.on_lost_node. Raises ConfigError if the cluster lacks devices, and WorkerDied if a process
    dies during startup; this process can then start another cluster.
    """
    started = time.monotonic()
    require_versions()
    train = config.train
    device = device_for(train.device)
    if train.ray_address is None:  # all devices are on this machine
        device.require()
    groups: list[PlacementGroup] = []
    ranks: list[Any] = []
    engines: list[list[Any]] = []  # parts of each engine; the first is the rollout worker
    with connected_to_ray(train, config.num_cpus) as folder:
        logger.info("Ray is up after %.0f s", time.monotonic() - started)
        try:
            if is_restart and train.ray_address is not None and train.on_lost_node == "shrink":
                config, places = place_what_is_left(config, device, groups, Path(model_path))
            else:
                seconds = LOST_NODE_SECONDS if is_restart else PLACEMENT_SECONDS
                places = place_roles(config, device, groups, seconds)
            if output_dir is not None:
                require_shared(places.nodes, config, Path(model_path), output_dir)
            ranks += [place.start(_PolicyRank) for place in places.ranks]
            engines += [
                [
                    place.start(_EngineRank if number else _RolloutRank)
                    for number, place in enumerate(parts)
                ]
                for parts in places.engines
            ]
            workers = [parts[0] for parts in engines]
            actors = _watched(ranks, engines)
            address = _meeting_point(folder, ranks[0], actors)
            starting = [
                rank.start.remote(number, len(ranks), address, str(model_path), config)
                for number, rank in enumerate(ranks)
            ]
            model_config = load_model_config(model_path, config.model.trust_remote_code)
            policy = PolicyGroup(ranks, config, actors, model_config.get_text_config().hidden_size)
            if train.is_colocated:  # engines measure their devices' free memory
                actors.get(starting)
                policy.offload(OF_RANKS)
            for parts in engines:
                place = _meeting_point(folder, parts[-1], actors) if len(parts) > 1 else ""
                starting += _start_parts(parts, place, str(model_path), config)
            actors.get(starting)
            actors.get(
                [parts[0].unlink_shared_memory.remote() for parts in engines if len(parts) > 1]
            )
            weights = WeightTransfer(ranks, engines, actors)
            meeting_point = partial(_meeting_point, folder, ranks[0], actors)
            weights.connect(
                _reads_memory(places, device), meeting_point, on_device=device.has_own_memory
            )
            counts = counted(len(ranks), "policy rank"), counted(len(workers), "rollout worker")
            logger.info("%s and %s ready after %.0f s", *counts, time.monotonic() - started)
            rollouts = RolloutGroup(workers, config.sampler.max_seconds_without_kept, actors)
            yield Cluster(policy, rollouts, weights, config)
        finally:
            _end(ranks, engines, groups if train.ray_address else [])


def _start_parts(
    parts: Sequence[Any], place: str, model_path: str, config: TrainingConfig
) -> list[Any]:
    """Load an engine whose parts rendezvous at `place`; returns the calls' references."""
    first, *others = parts
    return [
        first.start.remote(model_path, config, EnginePart(0, place), others),
        *(
            part.start.remote(model_path, config, EnginePart(number, place))
            for number, part in enumerate(others, 1)
        ),
    ]


def _reads_memory(places: Places, device: Device) -> list[bool]:
    """For each engine part, return whether it shares rank 0's memory: its node on CPUs, else its
    device.
    """
    home = places.ranks[0]
    parts = [place for parts in places.engines for place in parts]
    if not device.has_own_memory:
        return [place.node == home.node for place in parts]
    return [(place.group, place.bundle) == (home.group, home.bundle) for place in parts]


def _watched(ranks: Sequence[Any], engines: Sequence[list[Any]]) -> Actors:
    actors = Actors()
    actors.add("policy rank", ranks)
    actors.add("rollout worker", [parts[0] for parts in engines])
    actors.add("engine part", [part for parts in engines for part in parts[1:]])
    return actors


def _end(
    ranks: Sequence[Any], engines: Sequence[list[Any]], groups: Sequence[PlacementGroup]
) -> None:
    """End all processes, even hanging ones, and remove the placement groups of a shared cluster."""
    for (
        rank
    ) in ranks:  # first, since a worker may be waiting for weights that a rank will never send
        ray.kill(rank)
    closing = [parts[0].close.remote() for parts in engines]
    if closing:  # a worker that hangs is killed below, and its scoring processes end with it
        ray.wait(closing, num_returns=len(closing), timeout=CLOSE_SECONDS)
    for part in (part for parts in engines for part in parts):
        ray.kill(part)
    for group in groups:
        remove_placement_group(group)


def _meeting_point(folder: Path | None, actor: Any, actors: Actors) -> str:
    """Return a rendezvous address: in the private folder, which opens no port, or else on the
    actor's node.
    """
    if folder is None:
        return str(actors.get(actor.rendezvous.remote()))
    return f"file://{folder}/{secrets.token_hex(8)}"  # the last component names shared memory


class _Process:
    """A process of a training."""

    def place(self) -> str:
        """Return pid and node of the process; also used as a ping."""
        return f"pid {os.getpid()} on {ray.util.get_node_ip_address()}"

    def rendezvous(self) -> str:
        """Return a rendezvous address on this node."""
        return meeting_point(ray.util.get_node_ip_address())


class _PolicyRank(_Process, Policy):
    """A policy rank as an actor; `start` constructs it, since that is collective."""

    def __init__(self) -> None:
        pass

    def start(
        self, rank: int, num_ranks: int, address: str, model_path: str, config: TrainingConfig
    ) -> None:
        """Join the other ranks and load this rank's part of the model."""
        device = _own_device(config, config.train.threads_per_rank)
        seed_generators(config.run.seed, rank, num_optimizer_steps=0)
        torch.distributed.init_process_group(
            device.backends(config.train.offload_shards),
            init_method=address,
            rank=rank,
            world_size=num_ranks,
        )
        require_averages(device.torch_device())
        super().__init__(model_path, config)


class _RolloutRank(_Process, RolloutWorker):
    """A rollout worker as an actor; `start` constructs it."""

    def __init__(self) -> None:
        pass

    def start(
        self, model_path: str, config: TrainingConfig, part: EnginePart, followers: Sequence[Any]
    ) -> None:
        """Load the model into the engine and start the scoring processes."""
        self._part = part
        self._followers = _Followers(followers)
        super().__init__(
            lambda: _load_engine(model_path, config, part, self._followers),
            load_tokenizer(model_path, config.model.trust_remote_code),
            config,
        )

    def sleep(self) -> None:
        """Return once all parts of the engine have freed their device memory."""
        super().sleep()
        self._followers.wait()

    def unlink_shared_memory(self) -> None:
        """Unlink vLLM's shared memory on a CPU, which it may leave behind; all parts have it open."""
        for path in Path("/dev/shm").glob(f"{re.split('[/:]', self._part.address)[-1]}-tp*"):
            path.unlink(missing_ok=True)


class _EngineRank(_Process):
    """A further engine part as an actor, which repeats the rollout worker's engine calls."""

    def start(self, model_path: str, config: TrainingConfig, part: EnginePart) -> None:
        """Load this part of the model."""
        self._device = device_for(config.train.device)
        self._engine = _load_engine(model_path, config, part)

    def connect(self, link: Link, plan: WeightPlan) -> None:
        """Open the inbox for weights; collective over all processes that use the link's address."""
        self._engine.inbox = open_inbox(link, plan, self._device)

    def loaded_weights(self) -> Loaded:
        """Return what this part loaded in the last sync."""
        return self._engine.loaded

    def make_call(self, name: str, arguments: Sequence[Any]) -> None:
        """Call the engine. An error that only this part raises ends the process, since the others
        wait for it.
        """
        try:
            getattr(self._engine, name)(*arguments)
        except DapoError:  # raised by every part
            raise
        except BaseException:
            logger.exception("a part of an engine failed in %s", name)
            os._exit(1)


class _Followers:
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


def _own_device(config: TrainingConfig, num_threads: int) -> Device:
    """Prepare this process's device and limit its CPU threads."""
    device = device_for(config.train.device)
    device.prepare(os.environ, config.train.is_colocated)
    device.require()
    torch.set_num_threads(num_threads)
    return device


def _load_engine(
    model_path: str, config: TrainingConfig, part: EnginePart, followers: _Followers | None = None
) -> Engine:
    device = _own_device(config, config.rollout.threads_per_worker)
    settings = engine_settings(config, device)
    if settings.num_parts > 1:
        from dapo_core.engines.vllm_engine import TensorParallelEngine

        return TensorParallelEngine(model_path, settings, config.run.seed, part, followers)
    torch_device = str(device.torch_device())
    return build_engine(
        config.rollout.engine, model_path, settings, seed=config.run.seed, device=torch_device
    )


def engine_settings(config: TrainingConfig, device: Device) -> EngineSettings:
    """Return the settings of a rollout worker's engine."""
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
        tensor_parallel=config.rollout.tensor_parallel,
        pipeline_parallel=config.rollout.pipeline_parallel,
        expert_parallel=config.rollout.expert_parallel,
        engine_args=config.rollout.engine_args,
        sleep_level=device.sleep_level if config.train.is_colocated else None,
    )
