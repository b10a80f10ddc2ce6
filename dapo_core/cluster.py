"""Ray: where policy ranks and rollout workers run, and how the trainer calls them. Nothing else knows Ray."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dapo_core.batch import Batch, RankShare, split_batch
from dapo_core.data import load_tokenizer
from dapo_core.device import Device, device_for
from dapo_core.engines import EngineSettings, build_engine
from dapo_core.errors import ConfigError, DapoError, RolloutError
from dapo_core.loss import LossTotals
from dapo_core.policy import Policy, UpdateSums
from dapo_core.rollout import Group, GroupRequest, Progress, RolloutWorker

if TYPE_CHECKING:
    import numpy as np

    from dapo_core.config import Config, TrainConfig

logger = logging.getLogger(__name__)

PLACEMENT_SECONDS = 300.0
POLL_SECONDS = 0.25  # after which a worker says how far it is
SILENCE_SECONDS = 1.0  # after which the trainer looks at the clock though no worker has answered
CLOSE_SECONDS = 10.0
# Of the whole job, so that the workers which Ray starts in advance have it and are used.
WORKER_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",  # ranks and engines take turns; spinning threads would starve each other
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


@dataclass(frozen=True)
class Cluster:
    """The roles of a training run, ready to be called."""

    policy: PolicyGroup
    rollouts: RolloutGroup


@contextmanager
def start_cluster(config: Config, model_path: str | Path) -> Iterator[Cluster]:
    """Policy ranks and rollout workers with the model loaded; everything is ended on leaving.

    Starts a private Ray on this machine unless train.ray_address names a running one, of which only the
    actors started here are then ended. Raises ConfigError when the cluster never has the devices.
    """
    started = time.monotonic()
    if config.train.ray_address is None:  # all devices are this machine's
        device_for(config.train.device).require()
    _connect(config)
    logger.info("Ray is up after %.0f s", time.monotonic() - started)
    groups: list[PlacementGroup] = []
    actors: list[Any] = []
    workers: list[Any] = []
    try:
        device = device_for(config.train.device)
        ranks = _place(_PolicyRank, config.train.num_ranks, config.train.threads_per_rank, device, groups)
        actors += ranks
        workers = _place(
            _RolloutRank, config.rollout.num_workers, config.rollout.threads_per_worker, device, groups
        )
        actors += workers
        address = _get(ranks[0].rendezvous.remote())
        starting = [
            rank.start.remote(number, len(ranks), address, str(model_path), config)
            for number, rank in enumerate(ranks)
        ]
        starting += [worker.start.remote(str(model_path), config) for worker in workers]
        _get(starting)
        counts, seconds = (len(ranks), len(workers)), time.monotonic() - started
        logger.info("%d policy ranks and %d rollout workers are ready after %.0f s", *counts, seconds)
        limit = config.sampler.max_seconds_without_kept
        yield Cluster(PolicyGroup(ranks, config.train), RolloutGroup(workers, limit))
    finally:
        if workers:  # one that hangs is killed, and its scoring processes end with it
            closing = [worker.close.remote() for worker in workers]
            ray.wait(closing, num_returns=len(workers), timeout=CLOSE_SECONDS)
        for actor in actors:
            ray.kill(actor)
        for group in groups:
            remove_placement_group(group)
        ray.shutdown()


def _connect(config: Config) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    common: dict[str, Any] = {
        "logging_level": "warning",
        "log_to_driver": True,
        "runtime_env": {"env_vars": WORKER_ENVIRONMENT},
    }
    if config.train.ray_address:
        ray.init(address=config.train.ray_address, **common)
        return
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a private Ray on loopback; writes no token file
    num_cpus = (
        config.train.num_ranks * config.train.threads_per_rank
        + config.rollout.num_workers * config.rollout.threads_per_worker
    )
    ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, **common)


def _place(actor_class: type, count: int, threads: int, device: Device, groups: list[PlacementGroup]) -> list[Any]:
    """`count` actors in a placement group of their own, which is appended to `groups`."""
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


class _PolicyRank:
    """The process of one policy rank."""

    def rendezvous(self) -> str:
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def start(self, rank: int, num_ranks: int, address: str, model_path: str, config: Config) -> None:
        device = device_for(config.train.device)
        device.require()
        torch.set_num_threads(config.train.threads_per_rank)
        torch.manual_seed(config.run.seed)
        torch.distributed.init_process_group(device.backend, init_method=address, rank=rank, world_size=num_ranks)
        self.policy = Policy(model_path, config)

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self.policy, method)(*arguments)


class _RolloutRank:
    """The process of one rollout worker."""

    def start(self, model_path: str, config: Config) -> None:
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
        self.worker = RolloutWorker(engine, load_tokenizer(model_path), config)

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self.worker, method)(*arguments)

    def close(self) -> None:
        """End what the worker started."""
        self.worker.close()

    def load_weights(self, buckets: list[Any], policy_version: int) -> int:
        """Buckets are object references, fetched one after the other, so that one is held at a time."""
        weights = (pair for bucket in buckets for pair in ray.get(bucket).items())
        return self.worker.load_weights(weights, policy_version)


def engine_settings(config: Config, device: Device) -> EngineSettings:
    """The engine's settings that a configuration means."""
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
    )


def _get(references: Any, max_seconds: float | None = None) -> Any:
    """Results of the calls; an error of ours that a worker raised arrives as itself, not as Ray's copy of it."""
    try:
        return ray.get(references, timeout=max_seconds)
    except RayTaskError as error:
        if isinstance(error.cause, DapoError):
            raise error.cause from error
        raise


class PolicyGroup:
    """All policy ranks, called as one; train.sequence_parallel consecutive ranks are given the same share."""

    def __init__(self, ranks: Sequence[Any], train: TrainConfig) -> None:
        self.ranks = ranks
        self.num_data_ranks = train.num_data_ranks
        self.sequence_parallel = train.sequence_parallel
        self.max_tokens = train.micro_batch_tokens * train.sequence_parallel  # of a micro-batch
        self.hidden_size: int = _get(ranks[0].call.remote("hidden_size"))

    def log_probs(self, batch: Batch, temperature: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropy at the response tokens: two [B, R] float32, in the batch's order."""
        shares, indices = self._split(batch)
        parts = self._call_shares("log_probs", shares, temperature)
        log_probs, entropy = zip(*parts[:: self.sequence_parallel], strict=True)
        return _rows(batch, indices, log_probs), _rows(batch, indices, entropy)

    def ref_log_probs(self, batch: Batch) -> torch.Tensor:
        """Log-probs of the response tokens under the reference model: [B, R] float32, in the batch's order."""
        shares, indices = self._split(batch)
        return _rows(batch, indices, self._call_shares("ref_log_probs", shares)[:: self.sequence_parallel])

    def update(self, mini_batch: Batch) -> tuple[UpdateSums, list[np.ndarray]]:
        """One optimizer step on the mini-batch: sums over all ranks, and the rows of each data-parallel rank."""
        totals = LossTotals(mini_batch.num_loss_tokens, mini_batch.num_loss_responses, self.num_data_ranks)
        shares, indices = self._split(mini_batch)
        return UpdateSums.over_ranks(self._call_shares("update", shares, totals)), indices

    def onload(self) -> None:
        """Weights to the devices, where train.offload_parameters keeps them away between phases."""
        self._call_each("onload", [()] * len(self.ranks))

    def offload(self) -> None:
        """Weights and optimizer state to the hosts, as far as the train.offload keys say so."""
        self._call_each("offload", [()] * len(self.ranks))

    def weight_sizes(self) -> dict[str, int]:
        """Bytes of each parameter by name."""
        return _get(self.ranks[0].call.remote("weight_sizes"))

    def gather_weights(self, names: list[str]) -> Any:
        """A reference to {name: whole tensor}, which stays in Ray's object store until it is dropped."""
        references = [rank.call.remote("gather_weights", names) for rank in self.ranks]
        _get(references[1:])
        return references[0]

    def save(self, folder: str) -> None:
        """Write every rank's shards of model and optimizer into the folder."""
        self._call_each("save", [(folder,)] * len(self.ranks))

    def load(self, folder: str) -> None:
        """Continue from the shards in the folder, written by any number of ranks."""
        self._call_each("load", [(folder,)] * len(self.ranks))

    def device_name(self) -> str:
        """What the vendor calls the first rank's device."""
        return _get(self.ranks[0].call.remote("device_name"))

    def memory_metrics(self) -> dict[str, float]:
        """Memory in GiB by metric name, the largest over ranks."""
        ranks = self._call_each("memory_metrics", [()] * len(self.ranks))
        return {name: max(rank[name] for rank in ranks) for name in ranks[0]}

    def _split(self, batch: Batch) -> tuple[list[RankShare], list[np.ndarray]]:
        return split_batch(batch, self.num_data_ranks, self.max_tokens, self.hidden_size)

    def _call_shares(self, method: str, shares: Sequence[RankShare], *others: Any) -> list[Any]:
        """Results of all ranks; a share travels once for the ranks of its group."""
        references = [ray.put(share) for share in shares]
        return self._call_each(
            method, [(references[rank // self.sequence_parallel], *others) for rank in range(len(self.ranks))]
        )

    def _call_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        calls = zip(self.ranks, arguments, strict=True)
        return _get([rank.call.remote(method, *own) for rank, own in calls])


def _rows(batch: Batch, indices: Sequence[np.ndarray], parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts' rows in the batch's order: [B, R] from [b, R] of each share."""
    values = torch.zeros(batch.response_mask.shape)
    for rows, part in zip(indices, parts, strict=True):
        values[rows, : part.shape[1]] = part[: len(rows)]
    return values


class RolloutGroup:
    """All rollout workers, seen as one source of groups (sampler.GroupSource).

    A worker answers within an engine's step; RolloutError when one does not within `max_seconds`.
    """

    def __init__(self, workers: Sequence[Any], max_seconds: float) -> None:
        self.workers = workers
        self.max_seconds = max_seconds
        self._in_flight = [0] * len(workers)  # groups
        self._tokens = [0] * len(workers)  # of these, as of the last poll
        self._reward_seconds = [0.0] * len(workers)
        self._polls: dict[Any, int] = {}  # reference of a running poll -> worker number

    @property
    def num_in_flight(self) -> int:
        return sum(self._in_flight)

    @property
    def num_tokens_in_flight(self) -> int:
        return sum(self._tokens)

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Give each group to the worker that has the fewest."""
        shares: list[list[GroupRequest]] = [[] for _ in self.workers]
        for request in requests:
            number = self._in_flight.index(min(self._in_flight))
            shares[number].append(request)
            self._in_flight[number] += 1
        calls = zip(self.workers, shares, strict=True)
        self._answers([worker.call.remote("submit", share) for worker, share in calls if share])

    def finished(self) -> list[tuple[int, Group]]:
        """Groups that a worker finished; empty when none did within about a second."""
        for number, worker in enumerate(self.workers):
            if self._in_flight[number] and number not in self._polls.values():
                self._polls[worker.call.remote("poll", POLL_SECONDS)] = number
        if not self._polls:
            return []
        ready, _ = ray.wait(list(self._polls), num_returns=1, timeout=SILENCE_SECONDS)
        return [finished for reference in ready for finished in self._take(reference)]

    def abort(self) -> tuple[list[tuple[int, Group]], int, int]:
        """Groups that finished meanwhile, and the number of groups and response tokens dropped."""
        late, dropped = self._stop("abort")
        return late, sum(groups for groups, _ in dropped), sum(tokens for _, tokens in dropped)

    def suspend(self) -> tuple[list[tuple[int, Group]], list[GroupRequest]]:
        """Groups that finished meanwhile, and the requests that continue those which did not, oldest first."""
        late, requests = self._stop("suspend")
        return late, sorted((request for own in requests for request in own), key=lambda own: own.group_id)

    def take_reward_seconds(self) -> float:
        """Seconds since the last call in which a worker waited for scores alone, of the worker with the most."""
        most = max(self._reward_seconds)
        self._reward_seconds = [0.0] * len(self.workers)
        return most

    def load_weights(self, buckets: list[Any], policy_version: int) -> list[int]:
        """Load the referenced weights into every engine; returns the policy version that each then holds."""
        return _get([worker.load_weights.remote(buckets, policy_version) for worker in self.workers])

    def log_probs(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[list[float]]]:
        """Each engine's log-probs of (prompt_ids, response_ids) pairs at temperature 1."""
        return _get([worker.call.remote("log_probs", sequences) for worker in self.workers])

    def _stop(self, method: str) -> tuple[list[tuple[int, Group]], list[Any]]:
        """What the polls under way bring, then what `method` gives on each worker that has groups left."""
        late = [finished for reference in list(self._polls) for finished in self._take(reference)]
        busy = [worker for worker, count in zip(self.workers, self._in_flight, strict=True) if count]
        results = self._answers([worker.call.remote(method) for worker in busy])
        self._in_flight = [0] * len(self.workers)
        self._tokens = [0] * len(self.workers)
        return late, results

    def _take(self, reference: Any) -> list[tuple[int, Group]]:
        number = self._polls.pop(reference)
        progress: Progress = self._answers(reference)
        self._in_flight[number] -= len(progress.groups)
        self._tokens[number] = progress.num_open_tokens
        self._reward_seconds[number] += progress.reward_seconds
        return progress.groups

    def _answers(self, references: Any) -> Any:
        try:
            return _get(references, self.max_seconds)
        except GetTimeoutError:
            raise RolloutError(
                f"a rollout worker did not answer within {self.max_seconds:g} s: its engine hangs (try another "
                "rollout.engine), or a step takes that long (raise sampler.max_seconds_without_kept)"
            ) from None
