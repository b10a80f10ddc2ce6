"""The one place that knows cpu, cuda and npu apart."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dapo_core.errors import ConfigError

if TYPE_CHECKING:
    import torch


class Device(ABC):
    """One kind of device: its names, limits and environment."""

    kind: ClassVar[str]  # torch device type
    backend: ClassVar[str]  # torch.distributed collective backend
    ray_resource: ClassVar[str]  # what one policy rank or engine asks Ray for, one each
    low_precision: ClassVar[str]  # compute dtype that `auto` means
    visible_variable: ClassVar[str] = ""  # environment variable that names the devices a process may use
    sleep_level: ClassVar[int | None] = None  # of vLLM's sleep mode, where engines give a device's memory back
    has_own_memory: ClassVar[bool]  # beside the host's
    graph_mode: ClassVar[str | None] = None  # of vLLM's captured graphs; None: its default
    shares_key_heads: ClassVar[bool]  # its fused attention reads each key head once for all its query heads

    @abstractmethod
    def torch_device(self) -> torch.device:
        """The process's device; Ray shows each worker only its own, so it is number 0."""

    @abstractmethod
    def require(self) -> None:
        """Raise ConfigError when this machine has no such device."""

    @abstractmethod
    def module(self) -> Any:
        """torch's module of the device's streams and memory, such as torch.cuda; None for a CPU."""

    @abstractmethod
    def name(self) -> str:
        """What the vendor calls the process's device, such as `NVIDIA H100 80GB HBM3` or `Ascend910B3`."""

    @abstractmethod
    def visible(self, environment: Mapping[str, str]) -> list[str]:
        """Names of the devices that a process with this environment may use, as `visible_variable` takes them."""

    @abstractmethod
    def memory_bytes(self) -> int | None:
        """Memory of this machine's first device, of a CPU all that processes may use; None where there is none."""

    def variables(self, is_shared: bool) -> dict[str, str]:
        """What ranks and engines need set, unless it is set; `is_shared`: two processes on one device."""
        return {}

    @abstractmethod
    def prepare(self, environment: MutableMapping[str, str], is_shared: bool) -> None:
        """Set what ranks and engines need, before torch or vLLM read it; `is_shared`: two processes on one device.

        Raises ConfigError for a setting under which an engine's weights go stale or its sleep frees nothing.
        """

    @abstractmethod
    def take_memory(self) -> dict[str, float]:
        """Memory in use on the node, and this process's peaks since the last call, in GiB by metric name.

        On an accelerator also what all processes use of the device now. Where the kernel has no
        /proc/self/clear_refs, peaks of host memory are since the process began.
        """

    def backends(self, has_host_tensors: bool) -> str:
        """The collective backends of ranks; with gloo for tensors that stay in host memory beside the device's."""
        is_mixed = has_host_tensors and self.has_own_memory
        return f"cpu:gloo,{self.kind}:{self.backend}" if is_mixed else self.backend

    def resolve_dtype(self, name: str) -> torch.dtype:
        """The torch dtype of a configured name; `auto` is float32 on a CPU, bfloat16 elsewhere."""
        import torch

        return getattr(torch, self.low_precision if name == "auto" else name)

    def item_bytes(self, name: str) -> int:
        """Bytes of a number in a configured precision."""
        return 4 if (self.low_precision if name == "auto" else name) == "float32" else 2

    def fused_kernels(self) -> Mapping[str, Callable[..., torch.Tensor]]:
        """The device's own kernels, by the operation in policy/kernels.py whose arguments they take."""
        return {}

    def profiler(self) -> Any:
        """A profiler of the process and its device: `start`, `stop`, `export_chrome_trace`, as torch's."""
        from torch.profiler import profile

        return profile()

    def synchronize(self) -> None:
        """Wait for what this process has queued on the device."""
        if (module := self.module()) is not None:
            module.synchronize()

    def saving_on_host(self) -> AbstractContextManager[object]:
        """A context in which autograd keeps what it saves in pinned host memory; on a CPU, where it is."""
        import torch

        return torch.autograd.graph.save_on_cpu(pin_memory=self.has_own_memory, device_type=self.kind)


class Cpu(Device):
    """The cores of the machine, as one device."""

    kind, backend, ray_resource, low_precision = "cpu", "gloo", "CPU", "float32"
    has_own_memory, shares_key_heads = False, False

    def torch_device(self) -> torch.device:
        import torch

        return torch.device("cpu")

    def require(self) -> None:
        pass

    def module(self) -> None:
        return None

    def name(self) -> str:
        return "cpu"

    def visible(self, environment: Mapping[str, str]) -> list[str]:
        return ["0"]

    def memory_bytes(self) -> int | None:
        import psutil

        total = int(psutil.virtual_memory().total)
        limit = Path("/sys/fs/cgroup/memory.max")  # of a container
        allowed = limit.read_text().strip() if limit.exists() else "max"
        return min(total, int(allowed)) if allowed.isdigit() else total

    def prepare(self, environment: MutableMapping[str, str], is_shared: bool) -> None:
        pass

    def take_memory(self) -> dict[str, float]:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        if _PEAK_RESET.exists():
            _PEAK_RESET.write_text("5")
        return {**_node_memory(), "perf/max_rss_gb": int(status["VmHWM"].split()[0]) / 1024**2}


class Accelerator(Device):
    """A device with memory and streams of its own, which torch has a module for."""

    low_precision = "bfloat16"
    has_own_memory, shares_key_heads = True, True
    allocator_variables: ClassVar[tuple[str, ...]]  # settings of torch's allocator

    def torch_device(self) -> torch.device:
        import torch

        return torch.device(self.kind, 0)

    def require(self) -> None:
        import torch

        if not self.module().is_available():
            raise ConfigError(
                f"train.device={self.kind}, but torch {torch.__version__} sees no such device here; "
                "set train.device=cpu or run on a node that has one"
            )

    def module(self) -> Any:
        import torch

        return getattr(torch, self.kind)

    def name(self) -> str:
        return str(self.module().get_device_name(0))

    def visible(self, environment: Mapping[str, str]) -> list[str]:
        named = environment.get(self.visible_variable)
        if named is not None:
            names = [name.strip() for name in named.split(",")]
            # From the first name that is no device on, CUDA ignores the rest: "-1" hides all.
            end = next((place for place, name in enumerate(names) if name in ("", "-1")), len(names))
            return names[:end]
        return [str(number) for number in range(self.module().device_count())]

    def memory_bytes(self) -> int | None:
        try:
            self.require()
        except ConfigError:
            return None
        return int(self.module().mem_get_info(0)[1])

    def prepare(self, environment: MutableMapping[str, str], is_shared: bool) -> None:
        for name in self.allocator_variables if is_shared else ():
            if "expandable_segments:true" in environment.get(name, "").lower():
                raise ConfigError(
                    f"{name}={environment[name]} contradicts train.placement=colocated: engines cannot give "
                    "memory of expandable segments back; remove expandable_segments, or set "
                    "train.placement=separate"
                )

    def take_memory(self) -> dict[str, float]:
        module = self.module()
        free, total = module.mem_get_info()
        memory = {
            **_node_memory(),
            "perf/device_memory_used_gb": (total - free) / 1024**3,
            "perf/max_memory_allocated_gb": module.max_memory_allocated() / 1024**3,
            "perf/max_memory_reserved_gb": module.max_memory_reserved() / 1024**3,
        }
        module.reset_peak_memory_stats()
        return memory


class Cuda(Accelerator):
    """An NVIDIA GPU."""

    kind, backend, ray_resource = "cuda", "nccl", "GPU"
    visible_variable = "CUDA_VISIBLE_DEVICES"
    sleep_level = 2  # discards the weights
    allocator_variables = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


class Npu(Accelerator):
    """A die of an Ascend NPU, through torch_npu."""

    kind, backend, ray_resource = "npu", "hccl", "NPU"
    visible_variable = "ASCEND_RT_VISIBLE_DEVICES"
    # Weights stay in host memory: level 2 has given wrong tokens with expert parallelism (verl 7086, vllm-ascend
    # 12651).
    sleep_level = 1
    graph_mode = "FULL_DECODE_ONLY"
    allocator_variables = ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

    def require(self) -> None:
        _import_torch_npu()
        super().require()

    def visible(self, environment: Mapping[str, str]) -> list[str]:
        if self.visible_variable not in environment:
            _import_torch_npu()
        return super().visible(environment)

    def fused_kernels(self) -> Mapping[str, Callable[..., torch.Tensor]]:
        import torch

        torch_npu = _import_torch_npu()

        def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            return torch_npu.npu_swiglu(torch.cat([gate, up], dim=-1), dim=-1)

        def rms_norm(states: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
            return torch_npu.npu_rms_norm(states, weight, epsilon=epsilon)[0]

        return {"rms_norm": rms_norm, "swiglu": swiglu, "rotary": torch_npu.npu_rotary_mul}

    def profiler(self) -> Any:
        torch_npu = _import_torch_npu()
        return torch_npu.profiler.profile()

    def variables(self, is_shared: bool) -> dict[str, str]:
        ports = {"HCCL_HOST_SOCKET_PORT_RANGE": "auto", "HCCL_NPU_SOCKET_PORT_RANGE": "auto"}
        return {"VLLM_ASCEND_ENABLE_NZ": "0", **(ports if is_shared else {})}

    def prepare(self, environment: MutableMapping[str, str], is_shared: bool) -> None:
        super().prepare(environment, is_shared)
        for name, value in self.variables(is_shared).items():
            environment.setdefault(name, value)
        if environment["VLLM_ASCEND_ENABLE_NZ"] != "0":
            raise ConfigError(
                f"VLLM_ASCEND_ENABLE_NZ={environment['VLLM_ASCEND_ENABLE_NZ']}: engines cannot take new "
                "weights in the NZ layout, which every step gives them; set it to 0 or unset it"
            )


_DEVICES: dict[str, Device] = {device.kind: device for device in (Cpu(), Cuda(), Npu())}
_PEAK_RESET = Path("/proc/self/clear_refs")

# FLOP/s of dense bfloat16 matrix products by the name torch gives; half of what data sheets print "with sparsity".
_NVIDIA_PEAKS = {
    # NVIDIA A100 Tensor Core GPU data sheet: BFLOAT16 312 TFLOPS
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    # NVIDIA H100 Tensor Core GPU Architecture, white paper, table 2: SXM5 989.4, PCIe 756
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H100 PCIe": 756e12,
    # NVIDIA H200 data sheet: SXM 1,979 with sparsity; its compute is the H100's
    "NVIDIA H200": 989.4e12,
    # NVIDIA H20 data sheet: BFLOAT16 148 TFLOPS dense
    "NVIDIA H20": 148e12,
    # A100 and H100 with slower links between devices
    "NVIDIA A800-SXM4-80GB": 312e12,
    "NVIDIA A800 80GB PCIe": 312e12,
    "NVIDIA H800": 989.4e12,
    # NVIDIA L40S data sheet: BFLOAT16 362.05
    "NVIDIA L40S": 362.05e12,
    # NVIDIA HGX B200 data sheet: 36 PFLOPS with sparsity for 8
    "NVIDIA B200": 2250e12,
}
# (cube cores, MHz) of what torch sees as one device, on Atlas A3 a die: cube_core_cnt and cube_freq of Huawei's
# CANN, src/platform/platform_config in github.com/hicann/runtime. A core does 16 x 16 x 16 multiply-adds a cycle.
_ASCEND_CUBES = {
    "Ascend910B1": (24, 1850),
    "Ascend910B2": (24, 1800),
    "Ascend910B2C": (24, 1800),
    "Ascend910B3": (20, 1800),
    "Ascend910B4": (20, 1500),
    "Ascend910B4-1": (20, 1500),
    "Ascend910_9391": (24, 1850),
    "Ascend910_9392": (24, 1850),
    "Ascend910_9381": (24, 1800),
    "Ascend910_9382": (24, 1800),
    "Ascend910_9372": (20, 1800),
    "Ascend910_9362": (20, 1500),
}


def peak_flops(device_name: str) -> float | None:
    """FLOP/s of dense bfloat16 matrix products at most; None for a device that is not in the vendors' tables.

    Names count whole: a MIG slice or a custom part called almost like a known device has another peak.
    """
    if device_name in _ASCEND_CUBES:
        cores, megahertz = _ASCEND_CUBES[device_name]
        return 2.0 * 16**3 * cores * megahertz * 1e6
    return _NVIDIA_PEAKS.get(device_name)


def device_for(kind: str) -> Device:
    """The device of a configured kind."""
    return _DEVICES[kind]


def accelerators() -> list[Accelerator]:
    """The accelerators that this environment can look for: NPUs where torch_npu is installed, and CUDA."""
    kinds: list[Accelerator] = [Npu()] if importlib.util.find_spec("torch_npu") else []
    return [*kinds, Cuda()]


def _node_memory() -> dict[str, float]:
    import psutil

    return {"perf/cpu_memory_used_gb": psutil.virtual_memory().used / 1024**3}


def _import_torch_npu() -> Any:
    try:
        return importlib.import_module("torch_npu")
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"train.device=npu, but torch_npu cannot be imported: {error}; install requirements/npu and source "
            "CANN's set_env.sh, or set train.device=cpu"
        ) from None
