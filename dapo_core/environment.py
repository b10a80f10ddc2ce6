"""Variables that a training sets for its own processes, beside those of its device (`Device.variables`)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dapo_core.device import device_for

if TYPE_CHECKING:
    from dapo_core.config.training import TrainingConfig

RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_COLOR_PREFIX": "0"}
# Set for the whole job, so that Ray can use the worker processes that it starts in advance.
WORKERS = {
    "OMP_WAIT_POLICY": "PASSIVE",  # ranks and engines take turns: spinning threads would starve each other
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}  # all ranks are on this machine
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # read when cuBLAS starts
VLLM_IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # so that weights need not be sent
VLLM_QUIET = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
VLLM_PARTS_ON_CPU = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # else vLLM looks for a NUMA node for each part
MLFLOW = {"MLFLOW_DISABLE_TELEMETRY": "true"}  # read when it is imported


@dataclass(frozen=True)
class Given:
    """Variables that child processes get."""

    children: str
    values: Mapping[str, str]
    is_default: bool = False  # a value that is set already stays


def set_defaults(values: Mapping[str, str]) -> None:
    """Set variables in this process, but for those that are set."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def given_by_training(config: TrainingConfig) -> Iterator[Given]:
    """What `dapo train` of our own core sets for the processes of the configuration."""
    train, rollout = config.train, config.rollout
    is_private = train.ray_address is None
    where = "" if is_private else ", unless their node sets it"
    yield Given("training and Ray", RAY, is_default=True)
    if "mlflow" in train.trackers:
        yield Given("training", MLFLOW, is_default=True)
    yield Given("Ray's workers", WORKERS | (LOOPBACK if is_private else {}))
    own = device_for(train.device).variables(train.is_colocated)
    yield Given(f"policy ranks and rollout workers{where}", own, is_default=is_private)
    if config.run.deterministic:
        yield Given(f"policy ranks{where}", DETERMINISTIC, is_default=is_private)
    if rollout.engine == "vllm":
        yield Given("rollout workers", VLLM_IN_PROCESS)
        has_parts = train.device == "cpu" and rollout.tensor_parallel * rollout.pipeline_parallel > 1
        own = VLLM_QUIET | (VLLM_PARTS_ON_CPU if has_parts else {})
        yield Given(f"rollout workers{where}", own, is_default=is_private)
