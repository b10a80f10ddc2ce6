"""Environment variables that training sets for its processes, in addition to `Device.variables`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_COLOR_PREFIX": "0",
}
# On a CPU: OpenMP threads that spin while they wait starve other processes on shared cores, and
# waking a thread that sleeps takes longer than many operations of a small model. libgomp spins for
# about 10 us and then sleeps; other libraries sleep at once.
BRIEF_SPINNING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}
# Set job-wide, so that Ray can use its prestarted worker processes.
WORKERS = {**BRIEF_SPINNING, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}  # all ranks are on this machine
# Freed blocks are used again, large ones too, and never returned to the system.
KEEP_FREED_MEMORY = {"MALLOC_CONF": "dirty_decay_ms:-1,oversize_threshold:0"}
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # read when cuBLAS starts
# avoids sending weights to another process
VLLM_IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
SOCKETS_VARIABLE = "VLLM_RPC_BASE_PATH"  # folder of a vLLM server's sockets
READY_VARIABLE = "DAPO_SERVER_READY"  # URL of a vLLM server, and the line to print once it answers
VLLM_QUIET = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
BATCH_INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}  # rollout.batch_invariant
# else vLLM requires a NUMA node per part
VLLM_PARTS_ON_CPU = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def set_defaults(values: Mapping[str, str]) -> None:
    """Set variables in this process unless they are already set."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def brief_spinning(environment: Mapping[str, str]) -> dict[str, str]:
    """Return BRIEF_SPINNING, or nothing if the environment says how OpenMP threads wait."""
    return {} if BRIEF_SPINNING.keys() & environment.keys() else dict(BRIEF_SPINNING)


def jemalloc() -> dict[str, str]:
    """Return the variables that load the jemalloc of Ray's package; none if LD_PRELOAD is set.

    On a CPU, glibc's malloc leaves holes of up to half a rank's tensors between blocks of many
    sizes (docs/memory.md).
    """
    ray = importlib.util.find_spec("ray")
    library = Path(str(ray and ray.origin)).parent / "core" / "libjemalloc.so"
    if "LD_PRELOAD" in os.environ or not library.is_file():
        return {}
    return {"LD_PRELOAD": str(library), **KEEP_FREED_MEMORY}
