"""States of devices and links, common to all vendors. None: the tool does not report it."""

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
    """A process that uses a device."""

    pid: int
    name: str
    num_bytes: int | None


@dataclass(frozen=True)
class DeviceState:
    """One device as torch counts them; on Atlas A3, a die."""

    label: str  # the tool's name for it, such as `NPU 3 device 7`
    number: str  # its index in ASCEND_RT_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES
    health: str | None
    used_bytes: int | None
    total_bytes: int | None
    processes: tuple[DeviceProcess, ...] = ()
    uuid: str = ""


@dataclass(frozen=True)
class DevicesFound:
    """A tool's report on a machine: its devices, the driver version, and unparsed lines."""

    tool: str
    driver: str | None = None
    devices: tuple[DeviceState, ...] = ()
    unread: tuple[str, ...] = ()

    def named(self, *names: str) -> tuple[DeviceState, ...]:
        """Return the devices with these numbers, or beginnings of UUIDs."""
        return tuple(
            device
            for device in self.devices
            if device.number in names or (device.uuid and device.uuid.startswith(names))
        )


@dataclass(frozen=True)
class LinkState:
    """The network port of an NPU."""

    label: str
    link: str | None
    health: str | None
    tls: str | None  # `0` or `1`
    address: str | None


def call(name: str, arguments: Sequence[str], folders: Iterable[str] = ()) -> tuple[str, str]:
    """Run a tool of PATH or `folders`; returns its output and why it failed ("" if it did not)."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *folders])
    if (program := shutil.which(name, path=path)) is None:
        return "", f"{name} is not installed here"
    command = [program, *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TOOL_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return "", f"{Path(program).name} did not answer within {TOOL_SECONDS:.0f} s"
    except OSError as error:
        return "", f"{program} cannot be started: {error.strerror}"
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()
        return done.stdout, f"{name} exited with status {done.returncode}: {lines[-1].strip()}"
    return done.stdout, ""


def number_of(text: str) -> int | None:
    """Parse a whole number; None for NA, -, [N/A] and the like."""
    return int(text) if text.strip().isdigit() else None
