"""The state of a device and of its link, as any vendor's tool gives it; None is what the tool does not say."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

MIB = 1024**2
TOOL_SECONDS = 30.0  # npu-smi takes seconds on a node of 16 dies


@dataclass(frozen=True)
class DeviceProcess:
    """A process that holds memory of a device."""

    pid: int
    name: str
    num_bytes: int | None


@dataclass(frozen=True)
class DeviceState:
    """One device as torch counts them: on Atlas A3 a die."""

    label: str  # as the tool names it, such as `NPU 3 device 7`
    number: str  # as the vendor's variable of visible devices takes it
    health: str | None
    used_bytes: int | None
    total_bytes: int | None
    processes: tuple[DeviceProcess, ...] = ()
    uuid: str = ""


@dataclass(frozen=True)
class DevicesFound:
    """What a tool says of a machine: its devices, the driver, and lines that could not be understood."""

    tool: str
    driver: str | None = None
    devices: tuple[DeviceState, ...] = ()
    unread: tuple[str, ...] = ()

    def visible(self, named: str | None) -> tuple[DeviceState, ...]:
        """The devices that a variable such as CUDA_VISIBLE_DEVICES leaves; all without one."""
        if named is None or not named.strip():
            return self.devices
        wanted = [name.strip() for name in named.split(",")]
        return tuple(
            device
            for device in self.devices
            if device.number in wanted or (device.uuid and any(device.uuid.startswith(name) for name in wanted))
        )


@dataclass(frozen=True)
class LinkState:
    """The network port of an NPU."""

    label: str
    link: str | None
    health: str | None
    tls: str | None  # `0` or `1`
    address: str | None


def call(name: str, arguments: Sequence[str], places: Iterable[str] = ()) -> tuple[str, str]:
    """What a tool prints, and why nothing can be read from it: "" when it ran.

    `places` are folders to look in beside PATH.
    """
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *places])
    if (program := shutil.which(name, path=path)) is None:
        return "", f"{name} is not installed here"
    command = [program, *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TOOL_SECONDS, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "", f"{Path(program).name} did not answer within {TOOL_SECONDS:.0f} s"
    except OSError as error:
        return "", f"{program} cannot be started: {error.strerror}"
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()
        return done.stdout, f"{name} ended with status {done.returncode} and said: {lines[-1].strip()}"
    return done.stdout, ""


def number_of(text: str) -> int | None:
    """The whole number of a cell; None for NA, -, [N/A] and the like."""
    return int(text) if text.strip().isdigit() else None
