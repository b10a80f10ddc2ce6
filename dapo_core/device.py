"""The one place that knows cpu, cuda and npu apart."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dapo_core.errors import ConfigError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Device:
    """What the rest needs to know of a kind of device."""

    kind: str  # torch device type
    backend: str  # torch.distributed collective backend
    ray_resource: str  # what one policy rank or engine asks Ray for, one each
    low_precision: str  # compute dtype that `auto` means

    def torch_device(self) -> torch.device:
        """The process's device; Ray shows each worker only its own, so it is number 0."""
        import torch

        return torch.device("cpu") if self.kind == "cpu" else torch.device(self.kind, 0)

    def resolve_dtype(self, name: str) -> torch.dtype:
        """The torch dtype of a configured name; `auto` is float32 on a CPU, bfloat16 elsewhere."""
        import torch

        return getattr(torch, self.low_precision if name == "auto" else name)

    def require(self) -> None:
        """Raise ConfigError when this machine has no such device."""
        import torch

        if self.kind == "npu":
            _import_torch_npu()
        if self.kind != "cpu" and not getattr(torch, self.kind).is_available():
            raise ConfigError(
                f"train.device={self.kind}, but torch {torch.__version__} sees no such device here; "
                "set train.device=cpu or run on a node that has one"
            )

    def memory_metrics(self) -> dict[str, float]:
        """Peak memory of this process, in GiB, under the field's metric names."""
        if self.kind == "cpu":
            import resource

            peak_kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return {"perf/max_rss_gb": peak_kilobytes / 1024**2}
        import torch

        module = getattr(torch, self.kind)
        return {
            "perf/max_memory_allocated_gb": module.max_memory_allocated() / 1024**3,
            "perf/max_memory_reserved_gb": module.max_memory_reserved() / 1024**3,
        }


_DEVICES = {
    "cpu": Device("cpu", "gloo", "CPU", "float32"),
    "cuda": Device("cuda", "nccl", "GPU", "bfloat16"),
    "npu": Device("npu", "hccl", "NPU", "bfloat16"),
}


def device_for(kind: str) -> Device:
    """The device of a configured kind."""
    return _DEVICES[kind]


def _import_torch_npu() -> None:
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"train.device=npu, but torch_npu cannot be imported: {error}; install requirements/npu and source "
            "CANN's set_env.sh, or set train.device=cpu"
        ) from None
