"""Device abstraction: the only file that distinguishes cpu, cuda and npu."""

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
    backend: ClassVar[str]  # torch.distributed backend
    ray_resource: ClassVar[str]  # Ray resource; ranks and engines request one each
    low_precision: ClassVar[str]  # compute dtype for `auto`
    visible_variable: ClassVar[str] = ""  # environment variable that lists the visible devices
    sleep_level: ClassVar[int | None] = None  # of vLLM's sleep mode; None: not supported
    has_own_memory: ClassVar[bool]  # separate from host memory
    graph_mode: ClassVar[str | None] = None  # of vLLM's captured graphs; None: vLLM's default
    shares_key_heads: ClassVar[bool]  # fused attention supports GQA without repeating key heads
    seeds_responses: ClassVar[bool] = True  # a seed per response does not slow vLLM down
    group_bytes: ClassVar[int] = 0  # buffers of each group of processes, outside torch's allocator

    @abstractmethod
    def torch_device(self) -> torch.device:
        """Return this process's device. Ray shows each worker only its own, so it is number 0."""

    @abstractmethod
    def require(self) -> None:
        """Raise ConfigError if this machine has no such device."""

    @abstractmethod
    def module(self) -> Any:
        """Return torch's module for the device, such as torch.cuda; None for a CPU."""

    @abstractmethod
    def name(self) -> str:
        """Return the vendor's name of the device: `NVIDIA H100 80GB HBM3` or `Ascend910B3`."""

    @abstractmethod
    def visible(self, environment: Mapping[str, str]) -> list[str]:
        """Return the devices visible with this environment, in the form of `visible_variable`."""

    @abstractmethod
    def memory_bytes(self) -> int | None:
        """Return the memory of the first device, on a CPU all usable memory; None without one."""

    def variables(self, is_shared: bool) -> dict[str, str]:
        """Return variables for ranks and engines; `is_shared`: two processes per device."""
        return {}

    @abstractmethod
    def prepare(self, environment: MutableMapping[str, str], is_shared: bool) -> None:
        """Set environment variables for ranks and engines before torch or vLLM read them.

        Raises ConfigError for a setting that would make engine weights stale or keep sleep from
        freeing memory.
        """

    @abstractmethod
    def take_memory(self) -> dict[str, float]:
        """Return the node's used memory and this process's peaks since the last call, in GiB.

        On an accelerator, also the device memory used by all processes. Without
        /proc/self/clear_refs, host memory peaks are since process start.
        """

    def backends(self, has_host_tensors: bool) -> str:
        """Return the collective backends; `has_host_tensors` adds gloo for host memory."""
        is_mixed = has_host_tensors and self.has_own_memory
        return f"cpu:gloo,{self.kind}:{self.backend}" if is_mixed else self.backend

    def resolve_dtype(self, name: str) -> torch.dtype:
        """Return the torch dtype of a name; for `auto` on a CPU see model/precision.py."""
        import torch

        return getattr(torch, self.low_precision if name == "auto" else name)

    def item_bytes(self, name: str) -> int:
        """Return the bytes per number of a configured dtype."""
        return 4 if (self.low_precision if name == "auto" else name) == "float32" else 2

    def fused_kernels(self) -> Mapping[str, Callable[..., torch.Tensor]]:
        """Return fused kernels by operation, with the signatures in policy/kernels.py."""
        return {}

    def profiler(self) -> Any:
        """Return a profiler with torch's interface: `start`, `stop`, `export_chrome_trace`."""
        from torch.profiler import profile

        return profile()

    def synchronize(self) -> None:
        """Wait for all work that this process has queued on the device."""
        if (module := self.module()) is not None:
            module.synchronize()

    def saving_on_host(self) -> AbstractContextManager[object]:
        """Return a context in which autograd keeps tensors in pinned host memory."""
        import torch

        return torch.autograd.graph.save_on_cpu(
            pin_memory=self.has_own_memory, device_type=self.kind
        )


class Cpu(Device):
    """All CPU cores of the machine, as one device."""

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

        return min(int(psutil.virtual_memory().total), *memory_limits())

    def prepare(self, environment: MutableMapping[str, str], is_shared: bool) -> None:
        pass

    def take_memory(self) -> dict[str, float]:
        status = dict(
            line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()
        )
        if _PEAK_RESET.exists():
            _PEAK_RESET.write_text("5")
        return {**_node_memory(), "perf/max_rss_gb": int(status["VmHWM"].split()[0]) / 1024**2}


def memory_limits(
    process: Path = Path("/proc/self"), root: Path = Path("/sys/fs/cgroup")
) -> list[int]:
    """Return the bytes that the cgroups of a process allow it, as in a container or a SLURM job."""
    limits = []
    for line in (process / "cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers in ("", "memory"):  # cgroups of version 2 and 1
            place = root / controllers / group.lstrip("/")
            name = "memory.limit_in_bytes" if controllers else "memory.max"
            # in a container, only its own group is there, at the root
            files = (folder / name for folder in (place, *place.parents))
            texts = [file.read_text().strip() for file in files if file.is_file()]
            limits += [int(text) for text in texts if text.isdigit()]
    return limits


class Accelerator(Device):
    """A device with its own memory and streams, and a torch module."""

    low_precision = "bfloat16"
    has_own_memory, shares_key_heads = True, True
    allocator_variables: ClassVar[tuple[str, ...]]  # environment variables of torch's allocator

    def torch_device(self) -> torch.device:
        import torch

        return torch.device(self.kind, 0)

    def require(self) -> None:
        import torch

        module = self.module()
        if not module.is_available():
            try:
                module.init()
                reason = ""
            except (AssertionError, RuntimeError) as error:  # such as a driver that is too old
                reason = f" ({str(error).partition(chr(10))[0]})"
            raise ConfigError(
                f"train.device={self.kind}, but torch {torch.__version__} finds no such device on "
                f"this machine{reason}; set train.device=cpu, or run on a node that has one"
            )

    def module(self) -> Any:
        import torch

        return getattr(torch, self.kind)

    def name(self) -> str:
        return str(self.module().get_device_name(0))

    def visible(self, environment: Mapping[str, str]) -> list[str]:
        value = environment.get(self.visible_variable)
        if value is not None:
            names = [name.strip() for name in value.split(",")]
            # CUDA ignores everything from the first invalid name on: "-1" hides all.
            end = next(
                (index for index, name in enumerate(names) if name in ("", "-1")), len(names)
            )
            return names[:end]
        return [str(number) for number in range(self.module().device_count())]

    def memory_bytes(self) -> int | None:
        try:
            self.require()
        except ConfigError:
            return None
        # mem_get_info would leave a CUDA context of half a GiB in this process
        return int(self.module().get_device_properties(0).total_memory)

    def prepare(self, environment: MutableMapping[str, str], is_shared: bool) -> None:
        for name in self.allocator_variables if is_shared else ():
            if "expandable_segments:true" in environment.get(name, "").lower():
                raise ConfigError(
                    f"{name}={environment[name]} contradicts train.placement=colocated: engines "
                    "cannot free expandable segments; remove expandable_segments, or set "
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

    def require(self) -> None:
        import torch

        super().require()
        # torch prefers cuDNN's attention on Hopper and Blackwell, which takes about a second for
        # each new shape; packed rows have new shapes all the time. vLLM turns it off, too.
        torch.backends.cuda.enable_cudnn_sdp(False)


class Npu(Accelerator):
    """One die of an Ascend NPU, through torch_npu."""

    kind, backend, ray_resource = "npu", "hccl", "NPU"
    visible_variable = "ASCEND_RT_VISIBLE_DEVICES"
    # Keeps weights in host memory: level 2 produced wrong tokens with expert parallelism (verl
    # 7086, vllm-ascend 12651).
    sleep_level = 1
    graph_mode = "FULL_DECODE_ONLY"
    group_bytes = 2 * 200 * 1024**2  # to send and to receive; HCCL_BUFFSIZE is 200 by default
    seeds_responses = False  # vllm-ascend 0.23 loops over them for each token
    allocator_variables = ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

    def require(self) -> None:
        _import_torch_npu()
        super().require()

    def visible(self, environment: Mapping[str, str]) -> list[str]:
        if self.visible_variable not in environment:
            _import_torch_npu()
        return super().visible(environment)

    def fused_kernels(self) -> Mapping[str, Callable[..., torch.Tensor]]:
        torch_npu = _import_torch_npu()

        def rms_norm(states: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
            return torch_npu.npu_rms_norm(states, weight, epsilon=epsilon)[0]

        return {
            "rms_norm": rms_norm,
            "swiglu": torch_npu.npu_swiglu,  # halves the last dimension, as asked
            "rotary": torch_npu.npu_rotary_mul,
            "experts": _experts_kernel(torch_npu),
        }

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
                f"VLLM_ASCEND_ENABLE_NZ={environment['VLLM_ASCEND_ENABLE_NZ']}: engines cannot "
                "load new weights "
                "in the NZ layout, but every step sends some; set it to 0 or unset it"
            )


def is_bfloat16_faster(hidden_size: int, head_dim: int) -> bool:
    """Return whether this CPU runs a model faster in bfloat16 than in float32, and can run it.

    Below a hidden size of 256 a backward pass is slower: 0.86 times as fast at 128, 1.6 times at
    320. vLLM's bfloat16 attention on a CPU needs a head dimension divisible by 32.
    """
    return hidden_size >= 256 and head_dim % 32 == 0 and cpu_multiplies_bfloat16()


def cpu_multiplies_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """True if this CPU has bfloat16 instructions (AVX512_BF16 or AMX on x86, BF16 on Arm)."""
    if not cpuinfo.is_file():  # no Linux
        return False
    words = set(cpuinfo.read_text().lower().split())
    return not words.isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})


_DEVICES: dict[str, Device] = {device.kind: device for device in (Cpu(), Cuda(), Npu())}
_PEAK_RESET = Path("/proc/self/clear_refs")

# Dense bfloat16 FLOP/s by torch device name; half of what data sheets list "with sparsity".
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
# (cube cores, MHz) of one torch device (on Atlas A3, one die): cube_core_cnt and cube_freq in
# Huawei's CANN, src/platform/platform_config in github.com/hicann/runtime. A core does 16 x 16 x 16
# multiply-adds per cycle.
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
    """Return the peak dense bfloat16 FLOP/s; None for an unknown device.

    Names must match exactly: a MIG slice or a custom part with a similar name has a different peak.
    """
    if device_name in _ASCEND_CUBES:
        cores, megahertz = _ASCEND_CUBES[device_name]
        return 2.0 * 16**3 * cores * megahertz * 1e6
    return _NVIDIA_PEAKS.get(device_name)


def device_for(kind: str) -> Device:
    """Return the device of a configured kind."""
    return _DEVICES[kind]


def accelerators() -> list[Accelerator]:
    """Return the accelerators to look for: NPU if torch_npu is installed, and CUDA."""
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
            f"train.device=npu, but torch_npu cannot be imported: {error}; source CANN's "
            "set_env.sh and run `make npu`, which installs requirements/npu-newest.txt, or set "
            "train.device=cpu"
        ) from None


def _experts_kernel(torch_npu: Any) -> Callable[..., torch.Tensor]:
    """Return npu_grouped_matmul for policy/experts.py, with gradients, which it lacks."""
    import torch

    def multiply(
        left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor, group_type: int = 0
    ) -> torch.Tensor:
        """Multiply groups of rows of `left`; with group_type 2, of its columns."""
        results: list[torch.Tensor] = torch_npu.npu_grouped_matmul(
            [left], [right], group_list=ends, split_item=3, group_type=group_type
        )
        return results[0]

    class Multiply(torch.autograd.Function):
        @staticmethod
        def forward(
            context: Any, rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor
        ) -> torch.Tensor:
            context.save_for_backward(rows, weight, ends)
            return multiply(rows, weight.transpose(1, 2), ends)

        @staticmethod
        def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            rows, weight, ends = context.saved_tensors
            gradient = gradients[0].contiguous()
            return multiply(gradient, weight, ends), multiply(gradient.T, rows, ends, 2), None

    def fused(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = Multiply.apply(rows.to(weight.dtype), weight, ends.long())
        return product

    return fused
