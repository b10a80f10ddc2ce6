"""How fast devices are, by the names of the device table: data sheets' peaks, and the shares assumed of them."""

from __future__ import annotations

from dataclasses import dataclass

from dapo_core.device import peak_flops


@dataclass(frozen=True)
class Rates:
    """What one device does at most, and the time a layer costs however little it computes."""

    flops: float  # of dense bfloat16 matrix products a second
    memory: float  # bytes a second
    network: float  # bytes a second that it sends to other nodes
    inside: float  # bytes a second that it sends to the devices of its node
    node_devices: int
    layer_seconds: float  # of a decoding step: launches, and two all-reduces under tensor parallelism

    @property
    def node_network(self) -> float:
        """Bytes a second that all devices of a node receive from others."""
        return self.node_devices * self.network


TRAINING_SHARE = 0.28  # of the peak, with what checkpointing computes again; the published log: 0.21 and 0.33
DECODING_SHARE = 0.6  # of the memory's bytes a second
NETWORK_SHARE = 0.7  # of the network's
SYNC_BYTES = 7e9  # a second, of weights into engines: verl reports 5.3e9 over HCCL, the published log has 7.6e9
# Seconds of a decoding step in a layer. NPU: the published log's longest sequences take 64 ms a token, of which
# the memory explains 25; CUDA: graphs, without gaps between kernels.
NPU_LAYER, CUDA_LAYER, CPU_LAYER = 0.5e-3, 0.05e-3, 0.3e-3


def _npu(chip: str) -> Rates:
    """Nodes with 200 Gb/s a device between them."""
    flops = peak_flops(chip)
    assert flops is not None
    return Rates(flops, 1.6e12, 25e9, 196e9, 16 if chip.startswith("Ascend910_") else 8, NPU_LAYER)


def _cuda(flops: float, memory: float, inside: float) -> Rates:
    """Nodes of eight, with 400 Gb/s a device between them."""
    return Rates(flops, memory, 50e9, inside, 8, CUDA_LAYER)


_A2, _A3 = _npu("Ascend910B2"), _npu("Ascend910_9391")
_A100, _H100 = 312e12, 989.4e12
# Vendors' data sheets; consumer cards: dense bfloat16 with float32 sums, from the architectures' white papers.
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
CPU_FLOPS, CPU_MEMORY = 60e9, 10e9  # of a core, in float32: a guess until a run's metrics calibrate it


def cpu_rates(num_threads: int) -> Rates:
    """What that many cores are taken for."""
    memory = CPU_MEMORY * num_threads
    return Rates(CPU_FLOPS * num_threads, memory, memory, memory, 1, CPU_LAYER)
