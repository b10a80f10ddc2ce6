"""Environment variables that training sets for its processes, in addition to `Device.variables`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dapo_core.machine.device import device_for

if TYPE_CHECKING:
    from dapo_core.config.training import TrainingConfig

RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_COLOR_PREFIX": "0",
}
# Set job-wide, so that Ray can use its prestarted worker processes.
WORKERS = {
    # ranks and engines take turns; spinning threads would starve each other
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}  # all ranks are on this machine
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # read when cuBLAS starts
VLLM_IN_PROCESS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0"
}  # avoids sending weights to another process
VLLM_QUIET = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
VLLM_PARTS_ON_CPU = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind"
}  # else vLLM requires a NUMA node per part
MLFLOW = {"MLFLOW_DISABLE_TELEMETRY": "true"}  # read on import


@dataclass(frozen=True)
class Given:
    """Environment variables that training sets for some of its processes."""

    children: str
    values: Mapping[str, str]
    is_default: bool = False  # existing values take precedence


def set_defaults(values: Mapping[str, str]) -> None:
    """Set variables in this process unless they are already set."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def given_by_training(config: TrainingConfig) -> Iterator[Given]:
    """Yield the variables that `dapo train` sets with the built-in backend."""
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
        has_parts = (
            train.device == "cpu" and rollout.tensor_parallel * rollout.pipeline_parallel > 1
        )
        own = VLLM_QUIET | (VLLM_PARTS_ON_CPU if has_parts else {})
        yield Given(f"rollout workers{where}", own, is_default=is_private)
