"""Memory sizes and peak rates of devices, by the names that `train.device_model` accepts."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from dapo_core.errors import ConfigError
from dapo_core.machine.device import peak_flops

MIB, GIB = 1024**2, 1024**3
# maximum that CUDA reserves of nvidia-smi's total: 0.75 GiB on A100, 0.54 on H100
DRIVER_BYTES = 768 * MIB
NPU_BYTES = int(3.04 * GIB)  # npu-smi reports 64 GiB on Atlas A2, torch_npu sees 60.96


def describe_bytes(num_bytes: int) -> str:
    """Format a size in GiB, or in MiB if below 1 GiB."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"


@dataclass(frozen=True)
class Rates:
    """Peak rates of one device, and the fixed time per layer of a decoding step."""

    flops: float  # dense bfloat16 matrix products, per second
    memory: float  # bytes per second
    network: float  # bytes per second to other nodes
    inside: float  # bytes per second to devices on the same node
    node_devices: int
    layer_seconds: float  # per decoding step: launches, and two all-reduces of split layers

    @property
    def node_network(self) -> float:
        """Bytes per second that all devices of a node receive from other nodes."""
        return self.node_devices * self.network


@dataclass(frozen=True)
class DeviceModel:
    """One device as torch sees it; on Atlas A3 a device is a die."""

    kind: str  # train.device
    num_bytes: int
    rates: Rates


@dataclass(frozen=True)
class Limit:
    """Memory limit of the training's devices."""

    name: str  # where the number comes from
    num_bytes: int | None  # None: unknown


TRAINING_SHARE = 0.28  # of peak flops, including recomputation; the published log has 0.21 and 0.33
DECODING_SHARE = 0.6  # of the memory bandwidth
NETWORK_SHARE = 0.7  # of the network bandwidth
# weights into engines, per second: verl reports 5.3e9 over HCCL, the published log has 7.6e9
SYNC_BYTES = 7e9
# Seconds per layer and decoding step. NPU: the longest sequences in the published log take 64 ms
# per token, 25 of them for memory traffic; CUDA: graphs, without gaps between kernels.
NPU_LAYER, CUDA_LAYER, CPU_LAYER = 0.5e-3, 0.05e-3, 0.3e-3


def _npu(gibibytes: float, chip: str, node_devices: int) -> DeviceModel:
    """A device with 200 Gb/s to other nodes."""
    flops = peak_flops(chip)
    assert flops is not None
    rates = Rates(flops, 1.6e12, 25e9, 196e9, node_devices, NPU_LAYER)
    return DeviceModel("npu", int(gibibytes * GIB), rates)


def _nvidia(total_mib: int, flops: float, memory: float, inside: float) -> DeviceModel:
    """A device with nvidia-smi's total, in nodes of eight with 400 Gb/s each to other nodes."""
    rates = Rates(flops, memory, 50e9, inside, 8, CUDA_LAYER)
    return DeviceModel("cuda", total_mib * MIB - DRIVER_BYTES, rates)


_A100, _H100 = 312e12, 989.4e12
# Sizes: [1] total capacity in torch_npu's errors: vllm-ascend issues 1127 and 5020, sglang issue
# 29838 (a die of A3); [2] nvidia-smi totals in github.com/modal-labs/modal-client/pull/2797; [3]
# the same chip with slower links; [4] NVIDIA data sheet; [5] github.com/noonghunna/club-3090; [6]
# vllm issue 7553. Rates: vendors' data sheets; consumer cards: dense bfloat16 with float32
# accumulation, from white papers.
DEVICES = {
    "Atlas 800T A2": _npu(60.96, "Ascend910B2", 8),  # [1]
    "Atlas 800I A2": _npu(60.96, "Ascend910B2", 8),  # [1]
    "Atlas 800T A3": _npu(61.27, "Ascend910_9391", 16),  # [1]
    "Atlas 800I A3": _npu(61.27, "Ascend910_9391", 16),  # [1]
    "A100 40GB": _nvidia(40960, _A100, 1.555e12, 300e9),  # [2]
    "A100 80GB": _nvidia(81920, _A100, 2.039e12, 300e9),  # [2]
    "A800 80GB": _nvidia(81920, _A100, 2.039e12, 200e9),  # [3]
    "H100": _nvidia(81559, _H100, 3.35e12, 450e9),  # [2]
    "H800": _nvidia(81559, _H100, 3.35e12, 200e9),  # [3]
    "H200": _nvidia(143771, _H100, 4.8e12, 450e9),  # [4] 141 GB
    "H20": _nvidia(97871, 148e12, 4.0e12, 450e9),  # [4] 96 GB
    "L40S": _nvidia(46068, 362.05e12, 0.864e12, 32e9),  # [2]
    "L4": _nvidia(23034, 121e12, 0.3e12, 32e9),  # [2]
    "A10": _nvidia(23028, 125e12, 0.6e12, 32e9),  # [2]
    "RTX 3090": _nvidia(24576, 71e12, 0.936e12, 16e9),  # [5] 24 GB
    "RTX 4090": _nvidia(24564, 165.2e12, 1.008e12, 32e9),  # [6]
    "RTX 5090": _nvidia(32607, 209.5e12, 1.792e12, 64e9),  # [5] 32 GB
}
CPU_FLOPS, CPU_MEMORY = 60e9, 10e9  # per core, float32: a guess until a run's metrics calibrate it


def cpu_rates(num_threads: int) -> Rates:
    """Return the assumed rates of that many cores."""
    memory = CPU_MEMORY * num_threads
    return Rates(CPU_FLOPS * num_threads, memory, memory, memory, 1, CPU_LAYER)


def usable_bytes(kind: str, total: int) -> int:
    """Return the memory that torch sees, given the total in the vendor's tool."""
    return total - {"cuda": DRIVER_BYTES, "npu": NPU_BYTES}[kind]


def find_device(name: str) -> DeviceModel:
    """Return the device, vendor optional; raises ConfigError with the closest names."""
    known = {_plain(title): device for title, device in DEVICES.items()}
    known |= {_plain(title.removeprefix("RTX ")): device for title, device in DEVICES.items()}
    if (found := known.get(_plain(name))) is not None:
        return found
    same_start = [title for title in DEVICES if _plain(title).startswith(_plain(name))]
    near = same_start or difflib.get_close_matches(name, DEVICES, n=2, cutoff=0.5)
    raise ConfigError(
        f"train.device_model={name} is not in the device table; "
        + (f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(DEVICES)}.")
        + " For another device: dapo plan CONFIG --memory --device-gigabytes N"
    )


def _plain(name: str) -> str:
    words = name.lower().replace("-", " ").split()
    return "".join(word for word in words if word not in ("nvidia", "geforce", "huawei", "ascend"))
