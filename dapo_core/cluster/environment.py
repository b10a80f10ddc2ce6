"""Environment variables that training sets for each kind of its processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dapo_core.machine.device import device_for
from dapo_core.machine.environment import (
    BATCH_INVARIANT,
    DETERMINISTIC,
    LOOPBACK,
    RAY,
    VLLM_IN_PROCESS,
    VLLM_PARTS_ON_CPU,
    VLLM_QUIET,
    WORKERS,
    jemalloc,
)

if TYPE_CHECKING:
    from dapo_core.config.train import TrainConfig
    from dapo_core.config.training import TrainingConfig


@dataclass(frozen=True)
class Given:
    """Environment variables that training sets for some of its processes."""

    children: str
    values: Mapping[str, str]
    is_default: bool = False  # existing values take precedence


def private_workers(train: TrainConfig) -> dict[str, str]:
    """Return the variables of a private Ray's workers.

    Ranks that take turns free memory for the engines, which needs a malloc that returns it.
    """
    is_kept = train.device == "cpu" and not train.takes_turns
    return WORKERS | LOOPBACK | (jemalloc() if is_kept else {})


def given_by_training(config: TrainingConfig) -> Iterator[Given]:
    """Yield the variables that `dapo train` sets."""
    train, rollout = config.train, config.rollout
    is_private = train.ray_address is None
    where = "" if is_private else ", unless their node sets it"
    yield Given("training and Ray", RAY, is_default=True)
    yield Given("Ray's workers", private_workers(train) if is_private else WORKERS)
    own = device_for(train.device).variables(train.is_colocated)
    yield Given(f"policy ranks and rollout workers{where}", own, is_default=is_private)
    if config.run.deterministic:
        yield Given(f"policy ranks{where}", DETERMINISTIC, is_default=is_private)
    if rollout.engine == "vllm":
        invariant = BATCH_INVARIANT if rollout.batch_invariant else {}
        yield Given("rollout workers", VLLM_IN_PROCESS | invariant)
        has_parts = (
            train.device == "cpu" and rollout.tensor_parallel * rollout.pipeline_parallel > 1
        )
        own = VLLM_QUIET | (VLLM_PARTS_ON_CPU if has_parts else {})
        yield Given(f"rollout workers{where}", own, is_default=is_private)
