"""Ascend: devices from `npu-smi`, network ports from `hccn_tool`, versions from files."""

from __future__ import annotations

import platform
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from tasks.preflight.vendor_tools.states import (
    MIB,
    DeviceProcess,
    DevicesFound,
    DeviceState,
    LinkState,
    call,
    number_of,
)

ROOT = Path("/usr/local/Ascend")
SMI_FOLDERS = ("/usr/local/bin", "/usr/local/sbin")
HCCN_FOLDERS = ("/usr/local/Ascend/driver/tools",)
MAX_CALLS = 8  # of hccn_tool at a time
QUERIES = {
    "link": re.compile(r"^\s*link status\s*:\s*(\S+)", re.IGNORECASE | re.MULTILINE),
    "net_health": re.compile(r"net health status\s*:\s*(\S.*?)\s*$", re.IGNORECASE | re.MULTILINE),
    "tls": re.compile(r"tls switch\s*\[\s*([01])\s*\]", re.IGNORECASE),
    "ip": re.compile(r"ipaddr\s*:\s*([0-9A-Fa-f.:]+)", re.IGNORECASE),
}
_SMI_VERSION = re.compile(r"npu-smi\s+\S+\s+Version:\s*(\S+)")
_PAIR = re.compile(r"(\d+)\s*/\s*(\d+)")
_FAILURE = re.compile(r"fail|error|warning|no such|not found|unknown", re.IGNORECASE)
_FILE_VERSION = re.compile(r"^\s*version\s*=\s*(\S+)", re.IGNORECASE | re.MULTILINE)

Chip = tuple[str, str]  # NPU and chip, as npu-smi numbers them


def devices() -> DevicesFound:
    """Return the devices of this machine."""
    text, reason = call("npu-smi", ["info"], SMI_FOLDERS)
    found = parse_devices(text)
    return replace(found, unread=(reason, *found.unread)) if reason else found


def parse_devices(text: str) -> DevicesFound:
    """Parse the table of `npu-smi info`: two lines per chip, then the processes.

    A3 has two chips per NPU and prints the physical ID beside the chip; 310P prints a device number
    there and has no HBM column; the 950 has no chip.
    """
    version = _SMI_VERSION.search(text)
    states: list[tuple[Chip, DeviceState]] = []
    processes: dict[Chip, list[DeviceProcess]] = {}
    unread = [
        line.strip()
        for line in text.splitlines()
        if not line.strip().startswith(("|", "+")) and _FAILURE.search(line)
    ]
    first: list[str] | None = None
    in_processes = False
    for cells in _rows(text):
        if "Process id" in cells[1]:
            in_processes = True
        elif in_processes:
            if process := _process(cells):
                processes.setdefault(process[0], []).append(process[1])
        elif first is None:
            first = cells
        else:
            states.append(_device(first, cells))
            first = None
    num_chips = Counter(npu for (npu, _), _ in states)
    found = tuple(
        replace(
            state,
            label=f"NPU {chip[0]}" + (f" device {state.number}" if num_chips[chip[0]] > 1 else ""),
            processes=tuple(processes.pop(chip, ())),
        )
        for chip, state in states
    )
    if not found and not unread:
        unread = ["npu-smi info shows no device"]
    return DevicesFound("npu-smi", version[1] if version else None, found, tuple(unread))


def _rows(text: str) -> Iterator[list[str]]:
    """Yield the cells of rows with values, and the header of the process table."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.strip().startswith("|") or len(cells) < 3:
            continue
        is_header = cells[0].startswith(("NPU", "Chip")) or "Bus-Id" in cells or not any(cells)
        if not is_header or "Process id" in cells[1]:
            yield cells


def _device(first: list[str], second: list[str]) -> tuple[Chip, DeviceState]:
    npu = first[0].split()[0]
    health = first[2 if len(first) > 3 else 1]  # the 950 has a column for the NPU and its name
    chip, number = [*second[0].split(), "", ""][:2]
    pairs = [(int(used), int(total)) for used, total in _PAIR.findall(second[-1]) if int(total)]
    used, total = pairs[-1] if pairs else (None, None)  # HBM is the last column if the model has it
    return (npu, chip or "0"), DeviceState(
        "",
        number or npu,
        health if health not in ("", "-", "NA") else None,
        None if used is None else used * MIB,
        None if total is None else total * MIB,
    )


def _process(cells: list[str]) -> tuple[Chip, DeviceProcess] | None:
    """A process and its chip; None for the row of an NPU without processes."""
    if len(cells) < 4 or (pid := number_of(cells[1])) is None:
        return None
    npu, chip = [*cells[0].split(), "0"][:2]
    num_mib = number_of(cells[3])
    return (npu, chip or "0"), DeviceProcess(
        pid, cells[2], None if num_mib is None else num_mib * MIB
    )


def links(numbers: Sequence[str]) -> tuple[list[LinkState], str]:
    """Return the network port of each device, and why none could be read ("" if some were)."""
    if not numbers:
        return [], "no NPU to ask about"
    reason = call("hccn_tool", ["-i", numbers[0], "-link", "-g"], HCCN_FOLDERS)[1]
    if "not installed" in reason or "not answer" in reason:
        return [], reason
    calls = [(number, query) for number in numbers for query in QUERIES]
    with ThreadPoolExecutor(MAX_CALLS) as pool:
        words = [["-i", number, f"-{query}", "-g"] for number, query in calls]
        outputs = pool.map(lambda each: call("hccn_tool", each, HCCN_FOLDERS)[0], words)
    texts = dict(zip(calls, outputs, strict=True))
    found = {number: {query: texts[number, query] for query in QUERIES} for number in numbers}
    return [parse_link(number, each) for number, each in found.items()], ""


def parse_link(number: str, texts: Mapping[str, str]) -> LinkState:
    """Parse the port of one device, from the output of each query."""
    link, health, tls, address = (
        match[1] if (match := QUERIES[query].search(texts.get(query, ""))) else None
        for query in QUERIES
    )
    return LinkState(f"NPU {number}", link.upper() if link else None, health, tls, address)


def cann_version(environment: Mapping[str, str], root: Path = ROOT) -> str | None:
    """Return the version of the CANN toolkit of the environment, else of the one in `root`."""
    named = (environment.get(name) for name in ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH"))
    usual = (root / "cann", root / "ascend-toolkit" / "latest")
    for folder in (*map(Path, filter(None, named)), *usual):
        file = folder / f"{platform.machine()}-linux" / "ascend_toolkit_install.info"
        if file.is_file():
            return _version_in(file)
    return None


def driver_version(root: Path = ROOT) -> str | None:
    """Return the driver's version; None if its version file is missing."""
    file = root / "driver" / "version.info"
    return _version_in(file) if file.is_file() else None


def _version_in(file: Path) -> str | None:
    match = _FILE_VERSION.search(file.read_text(encoding="utf-8", errors="replace"))
    return match[1] if match else None
