"""`npu-smi info`: Ascend devices with health, memory and processes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tasks.preflight.vendor_tools.states import (
    MIB,
    DeviceProcess,
    DevicesFound,
    DeviceState,
    call,
    number_of,
)

PLACES = ("/usr/local/bin", "/usr/local/sbin")
_VERSION = re.compile(r"npu-smi\s+\S+\s+Version:\s*(\S+)")
_PAIR = re.compile(r"(\d+)\s*/\s*(\d+)")
_FAILURE = re.compile(r"fail|error|warning|no such|not found|unknown", re.IGNORECASE)


@dataclass(frozen=True)
class _Place:
    npu: str
    chip: str


def devices() -> DevicesFound:
    """The devices of this machine."""
    text, reason = call("npu-smi", ["info"], PLACES)
    found = parse(text)
    return replace(found, unread=(reason, *found.unread)) if reason else found


def parse(text: str) -> DevicesFound:
    """The table of `npu-smi info`: two lines a chip, then the processes.

    Drivers 23 to 26 and models 910A to A3 and 310P differ in columns: A3 has two chips in an NPU with their
    physical ID beside the chip, 310P has a device number there and no HBM column, the 950 has no chip.
    """
    version = _VERSION.search(text)
    states: list[tuple[_Place, DeviceState]] = []
    processes: dict[_Place, list[DeviceProcess]] = {}
    unread = [
        line.strip()
        for line in text.splitlines()
        if not line.strip().startswith(("|", "+")) and _FAILURE.search(line)
    ]
    first: list[str] | None = None
    is_of_processes = False
    for cells in _rows(text):
        if "Process id" in cells[1]:
            is_of_processes = True
        elif is_of_processes:
            if process := _process(cells):
                processes.setdefault(process[0], []).append(process[1])
        elif first is None:
            first = cells
        else:
            states.append(_device(first, cells))
            first = None
    chips = Counter(place.npu for place, _ in states)
    found = tuple(
        replace(
            state,
            label=f"NPU {place.npu}" + (f" device {state.number}" if chips[place.npu] > 1 else ""),
            processes=tuple(processes.pop(place, ())),
        )
        for place, state in states
    )
    if not found and not unread:
        unread = ["npu-smi info shows no device"]
    return DevicesFound("npu-smi", version[1] if version else None, found, tuple(unread))


def _rows(text: str) -> Iterator[list[str]]:
    """The cells of rows with values, and of the header of processes."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.strip().startswith("|") or len(cells) < 3:
            continue
        is_header = cells[0].startswith(("NPU", "Chip")) or "Bus-Id" in cells or not any(cells)
        if not is_header or "Process id" in cells[1]:
            yield cells


def _device(first: list[str], second: list[str]) -> tuple[_Place, DeviceState]:
    npu = first[0].split()[0]
    health = first[2 if len(first) > 3 else 1]  # the 950 has a column for the NPU and one for the name
    chip, number = [*second[0].split(), "", ""][:2]
    pairs = [(int(used), int(total)) for used, total in _PAIR.findall(second[-1]) if int(total)]
    used, total = pairs[-1] if pairs else (None, None)  # HBM is the last column where it exists
    return _Place(npu, chip or "0"), DeviceState(
        "",
        number or npu,
        health if health not in ("", "-", "NA") else None,
        None if used is None else used * MIB,
        None if total is None else total * MIB,
    )


def _process(cells: list[str]) -> tuple[_Place, DeviceProcess] | None:
    """A process and its chip; None for the line of an NPU without processes."""
    if len(cells) < 4 or (pid := number_of(cells[1])) is None:
        return None
    npu, chip = [*cells[0].split(), "0"][:2]
    num_mib = number_of(cells[3])
    return _Place(npu, chip or "0"), DeviceProcess(pid, cells[2], None if num_mib is None else num_mib * MIB)
