"""Sends weight buckets from a policy rank, through two slots that buckets are gathered into."""

from __future__ import annotations

from typing import Any

import torch

from dapo_core.machine.device import Device
from dapo_core.weights.links import (
    HANDLE_BYTES,
    SharedMemory,
    join_group,
    meet,
    new_slots,
    wait_until,
    write_handle,
)
from dapo_core.weights.plan import NUM_SLOTS, WeightPlan


class Outbox:
    """Sends the buckets of a plan in order; a slot is reused once every process has taken it."""

    def __init__(
        self, plan: WeightPlan, device: Device, num_local: int, on_device: bool = False
    ) -> None:
        """`num_local` processes read the slots, in shared memory or `on_device`."""
        self._plan = plan
        self._device = device
        self._writes_handles = on_device and num_local > 0
        self._has_own_slots = on_device or num_local == 0
        room = (HANDLE_BYTES, torch.uint8) if self._has_own_slots else (plan.slot_numel, plan.dtype)
        self._memory = SharedMemory.create(num_local, *room, NUM_SLOTS)
        self._slots: list[torch.Tensor] = []
        self._group: Any = None
        self._works: list[Any] = []  # broadcasts in flight, oldest first
        self._number = 0  # buckets sent in all syncs

    @property
    def address(self) -> str:
        """Path at which processes on this machine open the slots."""
        return self._memory.address

    def join(self, address: str, size: int, backend: str) -> None:
        """Join the processes on other machines as rank 0 of `size`. Collective."""
        self._group = join_group(address, 0, size, backend)

    def slot(self) -> torch.Tensor:
        """Return the slot for the next bucket, [plan.slot_numel], to be overwritten."""
        if not self._slots:
            self._slots = self._memory.slots
            if self._has_own_slots:
                self._slots = new_slots(self._plan, self._device.torch_device())
        while len(self._works) >= NUM_SLOTS:
            self._works.pop(0).wait()
        self._wait_taken(self._number + 1 - NUM_SLOTS)
        return self._current()

    def send(self, numel: int) -> None:
        """Send the slot's first `numel` elements; returns before they arrive."""
        if self._writes_handles:
            self._device.synchronize()
            write_handle(self._current(), self._memory.slots[self._number % NUM_SLOTS])
        if self._group is not None:
            options = torch.distributed.BroadcastOptions()
            self._works.append(self._group.broadcast([self._current()[:numel]], options))
        self._number += 1
        self._memory.publish(self._number)

    def finish(self) -> None:
        """Wait until every process has taken every bucket, then free the slots."""
        for work in self._works:
            work.wait()
        self._works.clear()
        if self._group is not None:
            meet(self._group, self._device.torch_device())
        self._wait_taken(self._number)
        self._slots = []
        self._memory.free_slots()

    def _current(self) -> torch.Tensor:
        return self._slots[self._number % len(self._slots)]

    def _wait_taken(self, number: int) -> None:
        wait_until(
            lambda: self._memory.num_taken() >= number, "an engine to take a bucket of weights"
        )
