"""Receives weight buckets and turns them into named, checksummed tensors for an engine's loader."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from dapo_core.weights.links import (
    HANDLE_BYTES,
    Link,
    SharedMemory,
    join_group,
    meet,
    new_slots,
    open_handle,
    wait_until,
)
from dapo_core.weights.plan import NUM_SLOTS, WeightPlan, bucket_numel
from dapo_core.weights.proof import Checksums, checksums

if TYPE_CHECKING:
    from dapo_core.machine.device import Device


class Inbox(ABC):
    """Receives the buckets that an Outbox sends to this process."""

    def __init__(self, plan: WeightPlan) -> None:
        self.plan = plan

    @abstractmethod
    def buckets(self) -> Iterator[torch.Tensor]:
        """Yield each bucket of a sync as a flat tensor, valid until the next one is requested."""


def open_inbox(link: Link, plan: WeightPlan, device: Device) -> Inbox:
    """Open the link's inbox; collective over all processes that use its address."""
    if link.is_shared:
        return _SharedInbox(link, plan, device)
    return _CollectiveInbox(link, plan, device)


class Delivery:
    """The tensors of one sync in order; a checksum is taken when the next one is requested."""

    def __init__(self, inbox: Inbox, copies: bool) -> None:
        """Set `copies` if the loader keeps tensors after requesting the next one."""
        self.checksums: Checksums = {}
        self._plan = inbox.plan
        self._copies = copies
        self._buckets = inbox.buckets()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for bucket in self._plan.buckets:
            values = next(self._buckets)
            for planned in bucket:
                tensor = values[planned.offset : planned.offset + planned.numel].view(planned.shape)
                if self._copies:
                    tensor = tensor.clone()
                yield planned.name, tensor
                self.checksums[planned.name] = checksums(tensor, planned)
            # before the inbox calls the bucket taken: else torch keeps the sender's device memory
            del values, tensor
        self.drain()

    def drain(self) -> None:
        """Receive the buckets that the loader did not take: others wait for them."""
        for _ in self._buckets:
            pass


class _SharedInbox(Inbox):
    """Reads the slots of a sender on this machine, or through IPC handles on this device."""

    def __init__(self, link: Link, plan: WeightPlan, device: Device) -> None:
        super().__init__(plan)
        self._device = device
        self._on_device = link.on_device
        self._number = 0  # buckets taken in all syncs
        self._reader = link.number
        room = (HANDLE_BYTES, torch.uint8) if link.on_device else (plan.slot_numel, plan.dtype)
        self._memory = SharedMemory.open(link.address, link.size, *room, NUM_SLOTS)

    def buckets(self) -> Iterator[torch.Tensor]:
        for bucket in self.plan.buckets:
            wait_until(
                lambda: self._memory.num_sent() > self._number,
                "a bucket of weights from a policy rank",
            )
            slot = self._memory.slots[self._number % NUM_SLOTS]
            yield (open_handle(slot) if self._on_device else slot)[: bucket_numel(bucket)]
            self._device.synchronize()  # until the loader has read it
            self._number += 1
            self._memory.take(self._reader, self._number)


class _CollectiveInbox(Inbox):
    """Receives broadcasts: the next bucket arrives while the current one is loaded."""

    def __init__(self, link: Link, plan: WeightPlan, device: Device) -> None:
        super().__init__(plan)
        self._device = device.torch_device()
        self._group = join_group(link.address, link.number, link.size, device.backend)

    def buckets(self) -> Iterator[torch.Tensor]:
        slots = new_slots(self.plan, self._device)
        arriving = [
            slots[n % NUM_SLOTS][: bucket_numel(bucket)]
            for n, bucket in enumerate(self.plan.buckets)
        ]
        works = [self._receive(bucket) for bucket in arriving[:1]]
        for number, bucket in enumerate(arriving):
            works += [self._receive(later) for later in arriving[number + 1 : number + 2]]
            works[number].wait()
            yield bucket
        meet(self._group, self._device)

    def _receive(self, bucket: torch.Tensor) -> torch.distributed.Work:
        return self._group.broadcast([bucket], torch.distributed.BroadcastOptions())
