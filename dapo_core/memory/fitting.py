"""Finds the smallest change of keys that makes a training fit its devices."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from dapo_core.memory.devices import GIB
from dapo_core.memory.engine import engine_memory, longest_sequence

if TYPE_CHECKING:
    from dapo_core.config.training import TrainingConfig
    from dapo_core.memory.plan import MemoryPlan
    from dapo_core.memory.shape import ModelShape

Change = Mapping[str, Any]  # new values by key
Root = TypeVar("Root", bound="TrainingConfig")
UTILIZATIONS = (0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
NUM_PASSES = 2
CPU_CACHE_FACTOR = 1.1  # times the KV cache of one sequence of maximum length


def smallest_change(
    config: TrainingConfig, shape: ModelShape, plan: Callable[[TrainingConfig], MemoryPlan]
) -> Change | None:
    """Return a change with few keys that makes the plan fit, or None if no change does.

    Tries each lever alone first, cheapest in time first. Then combines levers in order, those that
    need more devices last, and drops the ones that turn out to be unnecessary.
    """

    def excess(change: Change) -> int:
        return _excess(plan(changed(config, change)))

    def is_allowed(change: Change) -> bool:
        try:
            type(config).model_validate(changed(config, change).model_dump())
        except ValidationError:
            return False
        return True

    levers = [
        [_new(config, change) for change in lever(config, shape)]
        for lever in (*_LEVERS, *_MORE_DEVICES)
    ]
    options = [[change for change in lever if is_allowed(change)] for lever in levers]
    for option in (option for lever in options[: len(_LEVERS)] for option in lever):
        if excess(option) == 0:
            return option
    taken: list[Change] = []
    for lever in options * NUM_PASSES:  # an early choice may turn out to be too much
        left = [(excess(_merged([*taken, option])), number) for number, option in enumerate(lever)]
        best = next((number for over, number in left if over == 0), min(left, default=(0, 0))[1])
        if (
            left
            and left[best][0] < excess(_merged(taken))
            and is_allowed(_merged([*taken, lever[best]]))
        ):
            taken.append(lever[best])
    if excess(_merged(taken)):
        return None
    for option in list(taken):
        others = [other for other in taken if other is not option]
        if excess(_merged(others)) == 0:
            taken = others
    return _merged(taken)


def changed(config: Root, change: Change) -> Root:
    """Return the configuration with the new values, without validation."""
    for name, value in change.items():
        section, _, key = name.partition(".")
        part = getattr(config, section).model_copy(update={key: value})
        config = config.model_copy(update={section: part})
    return config


def describe(change: Change) -> str:
    """Format the change as command line options."""
    return " ".join(f"--set {name}={str(value).lower()}" for name, value in change.items())


def _new(config: TrainingConfig, change: Change) -> Change:
    """Return only the values that differ from the configuration."""
    return {name: value for name, value in change.items() if attrgetter(name)(config) != value}


def _merged(changes: list[Change]) -> Change:
    return {name: value for change in changes for name, value in change.items()}


def _excess(plan: MemoryPlan) -> int:
    """Return the bytes that do not fit, over all kinds of devices; 0 if everything fits."""
    over = sum(
        max(load.peak_bytes - load.limit_bytes, 0)
        for load in plan.loads
        if load.limit_bytes is not None
    )
    cache = plan.engine.cache
    return over + (0 if cache is None else max(plan.engine.sequence_bytes - cache, 0))


def _switches(config: TrainingConfig, shape: ModelShape) -> Iterator[Change]:
    for key in ("gradient_checkpointing", "reshard_after_forward"):
        if not getattr(config.train, key):
            yield {f"train.{key}": True}


def _logits(config: TrainingConfig, shape: ModelShape) -> Iterator[Change]:
    for tokens in (512, 256, 128):
        if tokens < config.train.logits_chunk_tokens:
            yield {"train.logits_chunk_tokens": tokens}


def _micro_batch(config: TrainingConfig, shape: ModelShape) -> Iterator[Change]:
    train = config.train
    longest = -(-longest_sequence(config) // train.sequence_parallel)
    for num_sequences in (8, 4, 3, 2, 1):
        if num_sequences * longest < train.micro_batch_tokens:
            yield {"train.micro_batch_tokens": num_sequences * longest}


def _utilization(config: TrainingConfig, shape: ModelShape) -> Iterator[Change]:
    rollout = config.rollout
    if config.train.device == "cpu":
        # Only vLLM's cache has a fixed size; the Hugging Face engine's grows with its sequences.
        sequence_bytes = engine_memory(config, shape, None).sequence_bytes
        yield {
            "rollout.memory_gigabytes": round(sequence_bytes * CPU_CACHE_FACTOR / GIB + 0.005, 2)
        }
        return
    nearest = sorted(UTILIZATIONS, key=lambda share: abs(share - rollout.memory_utilization))
    for share in nearest:
        if share != rollout.memory_utilization:
            yield {"rollout.memory_utilization": share}


def _sequences(config: TrainingConfig, shape: ModelShape) -> Iterator[Change]:
    for number in (128, 64, 32, 16, 8):
        if number < config.rollout.max_num_seqs:
            yield {"rollout.max_num_seqs": number}


def _offload(config: TrainingConfig, shape: ModelShape) -> Iterator[Change]:
    states = () if config.train.is_colocated else ("offload_optimizer", "offload_parameters")
    keys = ("offload_activations", *states)
    for key in keys:
        if not getattr(config.train, key) and config.train.device != "cpu":
            yield {f"train.{key}": True}


def _offload_shards(config: TrainingConfig, shape: ModelShape) -> Iterator[Change]:
    if not config.train.offload_shards and config.train.device != "cpu":
        yield {
            "train.offload_shards": True,
            "train.offload_parameters": False,
            "train.offload_optimizer": False,
        }


def _sequence_parallel(config: TrainingConfig, shape: ModelShape) -> Iterator[Change]:
    train, parts = config.train, config.train.sequence_parallel
    for number in (2 * parts, 4 * parts, 8 * parts):
        if train.num_ranks % number == 0 and shape.heads % number == 0:
            tokens = min(train.micro_batch_tokens, -(-longest_sequence(config) // number))
            yield {"train.sequence_parallel": number, "train.micro_batch_tokens": tokens}


def _tensor_parallel(config: TrainingConfig, shape: ModelShape) -> Iterator[Change]:
    """Give each engine more devices, with the same number of devices in total."""
    rollout = config.rollout
    for factor, change in _wider_engines(config, shape):
        if rollout.num_workers % factor == 0:
            yield {**change, "rollout.num_workers": rollout.num_workers // factor}


def _wider_engines(config: TrainingConfig, shape: ModelShape) -> Iterator[tuple[int, Change]]:
    """Yield factors 2, 4 and 8 for the devices per engine, with the current and other memory
    shares.
    """
    rollout = config.rollout
    shares = (rollout.memory_utilization, *UTILIZATIONS)
    for factor, share in itertools.product(
        (2, 4, 8), shares if config.train.device != "cpu" else shares[:1]
    ):
        parts = rollout.tensor_parallel * factor
        if rollout.engine == "vllm" and shape.heads % parts == 0:
            yield factor, {"rollout.tensor_parallel": parts, "rollout.memory_utilization": share}


def _own_devices(config: TrainingConfig, shape: ModelShape) -> Iterator[Change]:
    if config.train.placement == "colocated":
        yield {"train.placement": "separate"}


def _more_ranks(config: TrainingConfig, shape: ModelShape) -> Iterator[Change]:
    if config.train.device == "cpu":
        return
    for factor in (2, 4, 8, 16, 32):
        yield {"train.num_ranks": config.train.num_ranks * factor}


def _more_engine_devices(config: TrainingConfig, shape: ModelShape) -> Iterator[Change]:
    if config.train.device != "cpu":
        yield from (change for _, change in _wider_engines(config, shape))


# Cheapest in time first.
_LEVERS = (
    _switches,
    _logits,
    _micro_batch,
    _utilization,
    _sequences,
    _offload,
    _sequence_parallel,
    _tensor_parallel,
    _offload_shards,
)
_MORE_DEVICES = (_own_devices, _more_ranks, _more_engine_devices)
