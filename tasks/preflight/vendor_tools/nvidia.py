"""`nvidia-smi --query-...`: GPUs with memory errors, memory and processes."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace

from tasks.preflight.vendor_tools.states import (
    MIB,
    DeviceProcess,
    DevicesFound,
    DeviceState,
    call,
    number_of,
)

FIELDS = ("index", "uuid", "name", "driver_version", "memory.total", "memory.used")
NEWER = ("mig.mode.current", "ecc.errors.uncorrected.volatile.total")  # unknown to old drivers
FORMAT = "--format=csv,noheader,nounits"


def devices() -> DevicesFound:
    """Return the GPUs of this machine."""
    text, reason = call("nvidia-smi", [f"--query-gpu={','.join((*FIELDS, *NEWER))}", FORMAT])
    if "not a valid field" in text or "not a valid field" in reason:
        text, reason = call("nvidia-smi", [f"--query-gpu={','.join(FIELDS)}", FORMAT])
    if reason and not text:
        return DevicesFound("nvidia-smi", unread=(reason,))
    apps, unread = call(
        "nvidia-smi", ["--query-compute-apps=gpu_uuid,pid,process_name,used_memory", FORMAT]
    )
    found = parse(text, apps)
    return replace(found, unread=(*filter(None, (reason, unread)), *found.unread))


def parse(gpus: str, apps: str = "") -> DevicesFound:
    """Parse rows of FIELDS, with or without NEWER, and of gpu_uuid, pid, process_name, used_memory.

    Drivers print [N/A], [Not Supported], [Insufficient Permissions] or ERR! for a missing number,
    and report no memory for a whole GPU under MIG. A GPU that fell off the bus is a sentence
    instead of a row.
    """
    unread: list[str] = []
    processes: dict[str, list[DeviceProcess]] = {}
    for cells in _rows(apps):
        if len(cells) == 4 and (pid := number_of(cells[1])) is not None:
            num_mib = number_of(cells[3])
            process = DeviceProcess(pid, cells[2], None if num_mib is None else num_mib * MIB)
            processes.setdefault(cells[0], []).append(process)
    found, driver = [], None
    for cells in _rows(gpus):
        if len(cells) not in (len(FIELDS), len(FIELDS) + len(NEWER)) or number_of(cells[0]) is None:
            unread.append(", ".join(cells))
            continue
        index, uuid, _, driver, total, used = cells[: len(FIELDS)]
        mig, errors = cells[len(FIELDS) :] or ("", "")
        is_split = mig == "Enabled"
        total_mib, used_mib = (None, None) if is_split else (number_of(total), number_of(used))
        found.append(
            DeviceState(
                f"GPU {index}{' (MIG)' if is_split else ''}",
                index,
                _health(errors, (total, used)),
                None if used_mib is None else used_mib * MIB,
                None if total_mib is None else total_mib * MIB,
                tuple(processes.get(uuid, ())),
                uuid,
            )
        )
    if not found and not unread:
        unread.append("nvidia-smi shows no GPU")
    return DevicesFound("nvidia-smi", driver, tuple(found), tuple(unread))


def _rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.strip()]
    return [[cell.strip() for cell in row] for row in csv.reader(lines, skipinitialspace=True)]


def _health(errors: str, others: Sequence[str]) -> str:
    """OK, or a description of the fault."""
    if any(
        cell.strip("[]") in ("ERR!", "Unknown Error", "GPU is lost") for cell in (errors, *others)
    ):
        return "Critical: the driver reads errors from it"
    count = number_of(errors)
    return f"Warning: {count} uncorrected memory errors since the driver started" if count else "OK"
