"""Peak rates of devices from data sheets, by device name, and the shares assumed to be reached."""

from __future__ import annotations

from dataclasses import dataclass

from dapo_core.device import peak_flops


@dataclass(frozen=True)
class Rates:
    """Peak rates of one device, and the fixed time per layer of a decoding step."""

    flops: float  # dense bfloat16 matrix products, per second
    memory: float  # bytes per second
    network: float  # bytes per second to other nodes
    inside: float  # bytes per second to devices on the same node
    node_devices: int
    layer_seconds: float  # per decoding step: launches, and two all-reduces under tensor parallelism

    @property
    def node_network(self) -> float:
        """Bytes per second that all devices of a node receive from other nodes."""
        return self.node_devices * self.network


TRAINING_SHARE = 0.28  # of peak flops, including recomputation; the published log has 0.21 and 0.33
DECODING_SHARE = 0.6  # of the memory bandwidth
NETWORK_SHARE = 0.7  # of the network bandwidth
SYNC_BYTES = 7e9  # weights into engines, per second: verl reports 5.3e9 over HCCL, the published log has 7.6e9
# Seconds per layer and decoding step. NPU: the longest sequences in the published log take 64 ms per token, 25 of
# them for memory traffic; CUDA: graphs, without gaps between kernels.
NPU_LAYER, CUDA_LAYER, CPU_LAYER = 0.5e-3, 0.05e-3, 0.3e-3


def _npu(chip: str) -> Rates:
    """Rates with 200 Gb/s per device between nodes."""
    flops = peak_flops(chip)
    assert flops is not None
    return Rates(flops, 1.6e12, 25e9, 196e9, 16 if chip.startswith("Ascend910_") else 8, NPU_LAYER)


def _cuda(flops: float, memory: float, inside: float) -> Rates:
    """Rates for nodes of eight devices with 400 Gb/s per device between nodes."""
    return Rates(flops, memory, 50e9, inside, 8, CUDA_LAYER)


_A2, _A3 = _npu("Ascend910B2"), _npu("Ascend910_9391")
_A100, _H100 = 312e12, 989.4e12
# From vendors' data sheets; consumer cards: dense bfloat16 with float32 accumulation, from white papers.
RATES = {
    "Atlas 800T A2": _A2,
    "Atlas 800I A2": _A2,
    "Atlas 800T A3": _A3,
    "Atlas 800I A3": _A3,
    "A100 40GB": _cuda(_A100, 1.555e12, 300e9),
    "A100 80GB": _cuda(_A100, 2.039e12, 300e9),
    "A800 80GB": _cuda(_A100, 2.039e12, 200e9),
    "H100": _cuda(_H100, 3.35e12, 450e9),
    "H800": _cuda(_H100, 3.35e12, 200e9),
    "H200": _cuda(_H100, 4.8e12, 450e9),
    "H20": _cuda(148e12, 4.0e12, 450e9),
    "L40S": _cuda(362.05e12, 0.864e12, 32e9),
    "L4": _cuda(121e12, 0.3e12, 32e9),
    "A10": _cuda(125e12, 0.6e12, 32e9),
    "RTX 3090": _cuda(71e12, 0.936e12, 16e9),
    "RTX 4090": _cuda(165.2e12, 1.008e12, 32e9),
    "RTX 5090": _cuda(209.5e12, 1.792e12, 64e9),
}
CPU_FLOPS, CPU_MEMORY = 60e9, 10e9  # per core, float32: a guess until a run's metrics calibrate it


def cpu_rates(num_threads: int) -> Rates:
    """Return the assumed rates of that many cores."""
    memory = CPU_MEMORY * num_threads
    return Rates(CPU_FLOPS * num_threads, memory, memory, memory, 1, CPU_LAYER)
