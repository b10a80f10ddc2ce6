"""How processes reach each other: memory that those of one machine map, and a group of torch.distributed."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing  # teaches ForkingPickler to send tensors

from dapo_core.errors import RolloutError
from dapo_core.weight_transfer.plan import NUM_SLOTS, WeightPlan

STALL_SECONDS = 1800.0  # as torch's collectives; a dead process is noticed earlier, by the trainer
POLL_SECONDS = 0.0005
COUNTER_BYTES = 8
HANDLE_BYTES = 4096  # room for the handle of a tensor


@dataclass(frozen=True)
class Link:
    """Where a process of an engine receives weights."""

    is_shared: bool  # in shared memory; else by broadcasts
    address: str  # of the memory, or where the group meets
    number: int  # of this process: among the readers of the memory, or in the group, where the sender is 0
    size: int  # readers, or processes in the group
    on_device: bool = False  # the shared memory has handles of tensors on a device that both processes are on


class SharedMemory:
    """Counters, and slots for buckets, in anonymous memory: no name, size limit or leftovers in /dev/shm.

    The sender counts the buckets sent, and each reader those it took. A count is written after the bytes it stands
    for: the pause of `wait_until` in between is a system call and orders memory.
    """

    def __init__(self, file: int, num_readers: int, slot_numel: int, dtype: torch.dtype, num_slots: int) -> None:
        slot_bytes = slot_numel * dtype.itemsize
        page = mmap.ALLOCATIONGRANULARITY
        self._header_bytes = -(-COUNTER_BYTES * (1 + num_readers) // page) * page
        self._stride = -(-slot_bytes // page) * page
        size = self._header_bytes + num_slots * self._stride
        if os.fstat(file).st_size == 0:
            os.ftruncate(file, size)  # pages are allocated when they are first written
        self._file = file
        self._map = mmap.mmap(file, size)
        self._counters = torch.frombuffer(self._map, dtype=torch.int64, count=1 + num_readers)
        self.slots = [
            torch.frombuffer(
                self._map, dtype=dtype, count=slot_numel, offset=self._header_bytes + number * self._stride
            )
            for number in range(num_slots if slot_numel else 0)
        ]

    @classmethod
    def create(cls, num_readers: int, slot_numel: int, dtype: torch.dtype, num_slots: int) -> SharedMemory:
        """New memory, which this process keeps open."""
        return cls(os.memfd_create("dapo-weights"), num_readers, slot_numel, dtype, num_slots)

    @classmethod
    def open(
        cls, address: str, num_readers: int, slot_numel: int, dtype: torch.dtype, num_slots: int
    ) -> SharedMemory:
        """Another process's memory on this machine; raises RolloutError if it cannot be opened."""
        try:
            file = os.open(address, os.O_RDWR)
        except OSError as error:
            raise RolloutError(
                f"an engine cannot open the shared memory of a policy rank on its node: {error}; run the "
                "training's processes as one user, without containers of their own"
            ) from error
        return cls(file, num_readers, slot_numel, dtype, num_slots)

    @property
    def address(self) -> str:
        """The path at which other processes of this machine open it, while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def publish(self, number: int) -> None:
        """Let readers see that this many buckets are sent."""
        time.sleep(0)
        self._counters[0] = number

    def num_sent(self) -> int:
        """Buckets sent so far."""
        return int(self._counters[0])

    def take(self, reader: int, number: int) -> None:
        """Let the sender see that a reader has taken this many buckets."""
        time.sleep(0)
        self._counters[1 + reader] = number

    def num_taken(self) -> int:
        """Buckets that every reader has taken."""
        readers = self._counters[1:]
        return int(readers.min()) if len(readers) else self.num_sent()

    def free_slots(self) -> None:
        """Give the slots' pages back to the system; they are zero when used again."""
        if self.slots:
            self._map.madvise(mmap.MADV_REMOVE, self._header_bytes, len(self._map) - self._header_bytes)


def new_slots(plan: WeightPlan, device: torch.device) -> list[torch.Tensor]:
    """Room for the plan's buckets on the device; on a CPU in huge pages, if the system has any.

    To be given a GiB in small pages takes 0.6 s, four times as long as to copy one.
    """
    count = min(NUM_SLOTS, len(plan.buckets))
    if device.type != "cpu":
        return [torch.empty(plan.slot_numel, dtype=plan.dtype, device=device) for _ in range(count)]
    maps = [mmap.mmap(-1, plan.slot_numel * plan.dtype.itemsize, flags=mmap.MAP_PRIVATE) for _ in range(count)]
    for each in maps:
        each.madvise(mmap.MADV_HUGEPAGE)
    return [torch.frombuffer(each, dtype=plan.dtype) for each in maps]


def write_handle(tensor: torch.Tensor, room: torch.Tensor) -> None:
    """Write what another process of the machine needs to open the tensor, once: CUDA's or the NPU's IPC handle."""
    handle = bytearray(ForkingPickler.dumps(tensor))
    assert len(handle) < HANDLE_BYTES, f"a handle of {len(handle)} bytes has no room"
    room[: len(handle)] = torch.frombuffer(handle, dtype=torch.uint8)


def open_handle(room: torch.Tensor) -> torch.Tensor:
    """The tensor of another process whose handle is in the room, on the same memory."""
    return ForkingPickler.loads(bytes(room.tolist()))


def wait_until(is_true: Callable[[], bool], what: str) -> None:
    """Return once the condition is true; raises RolloutError after STALL_SECONDS."""
    began = time.monotonic()
    while not is_true():
        if time.monotonic() - began > STALL_SECONDS:
            raise RolloutError(
                f"waited {STALL_SECONDS:.0f} s for {what}: a process of the training hangs; start it again, which "
                "continues from the last checkpoint"
            )
        time.sleep(POLL_SECONDS)
    time.sleep(0)


def join_group(address: str, rank: int, size: int, backend: str) -> Any:
    """A group of torch.distributed beside the process's default one, if it has one. Collective.

    torch has no public function for a group whose processes have different default groups; OpenRLHF and verl use
    the same private one. tests/integration/test_tensor_parallel.py fails when it moves.
    """
    from torch.distributed.distributed_c10d import Backend, _new_process_group_helper
    from torch.distributed.rendezvous import rendezvous

    timeout = timedelta(seconds=STALL_SECONDS)
    store, rank, size = next(iter(rendezvous(address, rank, size, timeout=timeout)))
    store.set_timeout(timeout)
    group, _ = _new_process_group_helper(
        size,
        rank,
        [],
        Backend(backend),
        store,
        group_name=f"weights {address}",  # type: ignore[arg-type]
        timeout=timeout,
    )
    return group
