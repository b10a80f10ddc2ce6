"""Device memory sizes by the names that `train.device_model` accepts."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from dapo_core.errors import ConfigError

MIB, GIB = 1024**2, 1024**3
DRIVER_BYTES = 768 * MIB  # maximum that CUDA reserves of nvidia-smi's total: 0.75 GiB on A100, 0.54 on H100
NPU_BYTES = int(3.04 * GIB)  # npu-smi reports 64 GiB on Atlas A2, torch_npu sees 60.96


def describe_bytes(num_bytes: int) -> str:
    """Format a size in GiB, or in MiB if below 1 GiB."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"


@dataclass(frozen=True)
class DeviceSize:
    """Memory of one device as torch sees it; on Atlas A3 a device is a die."""

    kind: str  # train.device
    num_bytes: int
    source: str


@dataclass(frozen=True)
class Limit:
    """Memory limit of the training's devices."""

    name: str  # where the number comes from
    num_bytes: int | None  # None: unknown


def _nvidia(total_mib: int, source: str) -> DeviceSize:
    return DeviceSize("cuda", total_mib * MIB - DRIVER_BYTES, f"nvidia-smi: {total_mib} MiB, {source}")


_TOTALS = "github.com/modal-labs/modal-client/pull/2797"
_A2 = DeviceSize("npu", int(60.96 * GIB), "total capacity in torch_npu's errors, vllm-ascend issues 1127 and 5020")
_A3 = DeviceSize("npu", int(61.27 * GIB), "total capacity of a die in torch_npu's errors, sglang issue 29838")
DEVICES = {
    "Atlas 800T A2": _A2,
    "Atlas 800I A2": _A2,
    "Atlas 800T A3": _A3,
    "Atlas 800I A3": _A3,
    "A100 40GB": _nvidia(40960, _TOTALS),
    "A100 80GB": _nvidia(81920, _TOTALS),
    "A800 80GB": _nvidia(81920, "an A100 with slower links"),
    "H100": _nvidia(81559, _TOTALS),
    "H800": _nvidia(81559, "an H100 with slower links"),
    "H200": _nvidia(143771, "NVIDIA H200 data sheet: 141 GB"),
    "H20": _nvidia(97871, "NVIDIA H20 data sheet: 96 GB"),
    "L40S": _nvidia(46068, _TOTALS),
    "L4": _nvidia(23034, _TOTALS),
    "A10": _nvidia(23028, _TOTALS),
    "RTX 3090": _nvidia(24576, "24 GB; github.com/noonghunna/club-3090"),
    "RTX 4090": _nvidia(24564, "vllm issue 7553"),
    "RTX 5090": _nvidia(32607, "32 GB; github.com/noonghunna/club-3090"),
}


def usable_bytes(kind: str, total: int) -> int:
    """Return the memory that torch sees, given the total in the vendor's tool."""
    return total - {"cuda": DRIVER_BYTES, "npu": NPU_BYTES}[kind]


def find_device(name: str) -> DeviceSize:
    """Return the device with that name, vendor optional; raises ConfigError with the closest names."""
    known = {_plain(device): size for device, size in DEVICES.items()}
    known |= {
        _plain(device.split(" ", 1)[1]): size for device, size in DEVICES.items() if device.startswith("RTX ")
    }
    if (size := known.get(_plain(name))) is not None:
        return size
    same_start = [device for device in DEVICES if _plain(device).startswith(_plain(name))]
    near = same_start or difflib.get_close_matches(name, DEVICES, n=2, cutoff=0.5)
    raise ConfigError(
        f"train.device_model={name} is not in the device table; "
        + (f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(DEVICES)}.")
        + " For another device: dapo plan CONFIG --memory --device-gigabytes N"
    )


def _plain(name: str) -> str:
    words = name.lower().replace("-", " ").split()
    return "".join(word for word in words if word not in ("nvidia", "geforce", "huawei", "ascend"))
