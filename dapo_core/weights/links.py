"""Connections between processes: shared memory on one machine, and a torch.distributed group."""

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
import torch.multiprocessing  # registers tensors with ForkingPickler

from dapo_core.errors import RolloutError
from dapo_core.weights.plan import NUM_SLOTS, WeightPlan

# The guides' HCCL_EXEC_TIMEOUT. The trainer detects dead processes earlier.
STALL_SECONDS = 3600.0
POLL_SECONDS = 0.0005
COUNTER_BYTES = 8
HANDLE_BYTES = 4096  # space for a tensor's IPC handle


@dataclass(frozen=True)
class Link:
    """How an engine process receives weights."""

    is_shared: bool  # through shared memory, otherwise by broadcasts
    address: str  # of the shared memory, or rendezvous address of the group
    number: int  # of this process among the readers, or its rank in the group (the sender is 0)
    size: int  # number of readers, or size of the group
    on_device: bool = False  # the shared memory holds IPC handles of tensors on a shared device


class SharedMemory:
    """Counters and bucket slots in anonymous memory, without names or leftovers in /dev/shm.

    The sender counts buckets sent, and each reader counts buckets taken. A count is written after
    the bytes it covers; the sleep in between is a system call, which orders memory accesses.
    """

    def __init__(
        self, file: int, num_readers: int, slot_numel: int, dtype: torch.dtype, num_slots: int
    ) -> None:
        slot_bytes = slot_numel * dtype.itemsize
        page = mmap.ALLOCATIONGRANULARITY
        self._header_bytes = -(-COUNTER_BYTES * (1 + num_readers) // page) * page
        self._stride = -(-slot_bytes // page) * page
        size = self._header_bytes + num_slots * self._stride
        if os.fstat(file).st_size == 0:
            os.ftruncate(file, size)  # pages are allocated on first write
        self._file = file
        self._map = mmap.mmap(file, size)
        self._counters = torch.frombuffer(self._map, dtype=torch.int64, count=1 + num_readers)
        self.slots = [
            torch.frombuffer(self._map, dtype=dtype, count=slot_numel, offset=offset)
            for offset in range(self._header_bytes, size, self._stride or page)
        ]

    @classmethod
    def create(
        cls, num_readers: int, slot_numel: int, dtype: torch.dtype, num_slots: int
    ) -> SharedMemory:
        """Create memory that this process keeps open."""
        return cls(os.memfd_create("dapo-weights"), num_readers, slot_numel, dtype, num_slots)

    @classmethod
    def open(
        cls, address: str, num_readers: int, slot_numel: int, dtype: torch.dtype, num_slots: int
    ) -> SharedMemory:
        """Open another process's memory on this machine; raises RolloutError on failure."""
        try:
            file = os.open(address, os.O_RDWR)
        except OSError as error:
            raise RolloutError(
                f"an engine cannot open the shared memory of a policy rank on its node: {error}; "
                "run all processes of the training as one user, not in separate containers"
            ) from error
        return cls(file, num_readers, slot_numel, dtype, num_slots)

    @property
    def address(self) -> str:
        """Path at which other processes on this machine can open it while this process lives."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def publish(self, number: int) -> None:
        """Tell readers that `number` buckets have been sent."""
        time.sleep(0)
        self._counters[0] = number

    def num_sent(self) -> int:
        """Return the number of buckets sent so far."""
        return int(self._counters[0])

    def take(self, reader: int, number: int) -> None:
        """Tell the sender that a reader has taken `number` buckets."""
        time.sleep(0)
        self._counters[1 + reader] = number

    def num_taken(self) -> int:
        """Return the number of buckets that every reader has taken."""
        readers = self._counters[1:]
        return int(readers.min()) if len(readers) else self.num_sent()

    def free_slots(self) -> None:
        """Return the slots' pages to the system; they read as zero afterwards."""
        if self.slots:
            size = len(self._map) - self._header_bytes
            self._map.madvise(mmap.MADV_REMOVE, self._header_bytes, size)


def new_slots(plan: WeightPlan, device: torch.device) -> list[torch.Tensor]:
    """Allocate slots for the plan's buckets on the device; on a CPU in huge pages if available.

    Allocating a GiB in small pages takes 0.6 s, four times as long as copying it.
    """
    count = min(NUM_SLOTS, len(plan.buckets))
    if device.type != "cpu":
        return [torch.empty(plan.slot_numel, dtype=plan.dtype, device=device) for _ in range(count)]
    size = plan.slot_numel * plan.dtype.itemsize
    maps = [mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE) for _ in range(count)]
    for memory in maps:
        memory.madvise(mmap.MADV_HUGEPAGE)
    return [torch.frombuffer(memory, dtype=plan.dtype) for memory in maps]


def write_handle(tensor: torch.Tensor, slot: torch.Tensor) -> None:
    """Write the tensor's CUDA or NPU IPC handle, which another process can open once."""
    handle = bytearray(ForkingPickler.dumps(tensor))
    assert len(handle) < HANDLE_BYTES, f"a handle of {len(handle)} bytes does not fit"
    slot[: len(handle)] = torch.frombuffer(handle, dtype=torch.uint8)


def open_handle(slot: torch.Tensor) -> torch.Tensor:
    """Return another process's tensor, on the same memory, from the handle in the slot."""
    return ForkingPickler.loads(bytes(slot.tolist()))


def wait_until(is_true: Callable[[], bool], description: str) -> None:
    """Return once the condition is true; raises RolloutError after STALL_SECONDS."""
    started = time.monotonic()
    while not is_true():
        if time.monotonic() - started > STALL_SECONDS:
            raise RolloutError(
                f"waited {STALL_SECONDS:.0f} s for {description}: a process of the training "
                "hangs; start the training again to continue from the last checkpoint"
            )
        time.sleep(POLL_SECONDS)
    time.sleep(0)


def meet(group: Any, device: torch.device) -> None:
    """Return once all processes of the group have called this.

    Without a device, torch asks for a barrier on the CPU, which groups of HCCL do not have.
    """
    options = torch.distributed.BarrierOptions()
    options.device = device
    group.barrier(options).wait()


def join_group(address: str, rank: int, size: int, backend: str) -> Any:
    """Create a torch.distributed group independent of the process's default group. Collective.

    torch has no public function for a group of processes with different default groups; OpenRLHF
    and verl use the same private one. tests/integration/test_tensor_parallel.py fails if it
    changes.
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
