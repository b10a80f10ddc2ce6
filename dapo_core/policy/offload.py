"""Where a rank keeps weights and optimizer state: on its device, in host memory, or in files."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dapo_core.device import Device
from dapo_core.policy.model import HOST, local_part, reshard
from dapo_core.policy.spill import Spill
from dapo_core.policy.transfers import Transfers
from dapo_core.turns import GRADIENTS, OPTIMIZER, WEIGHTS

if TYPE_CHECKING:
    from dapo_core.config.training import TrainConfig


class Offloader:
    """Moves weights, gradients and optimizer state, as named in `turns`, off a rank's device and back."""

    def __init__(
        self, models: Sequence[nn.Module], optimizer: torch.optim.Optimizer, device: Device, train: TrainConfig
    ) -> None:
        self.models = models
        self.optimizer = optimizer
        self.device = device
        self.train = train
        self.transfers = Transfers(device)
        self._spills: dict[str, Spill] = {}  # of what is offloaded, where the device is the host

    def onload(self, what: Collection[str]) -> None:
        """Bring it back to the device.

        It is copied beside the computation, which waits for weights at once and for moments where AdamW steps.
        """
        for name in what:
            if name in self._spills:
                self._spills.pop(name).restore()
        self.transfers.finish()
        self._move(what, self.device.torch_device())
        if WEIGHTS in what:
            self.transfers.join()

    def offload(self, what: Collection[str]) -> None:
        """Free gradients, and move weights or the optimizer's state off the device.

        They go to host memory; where that is the device's own and ranks and engines share it, to a file. Moments
        of a rank with a device of its own are copied beside the computation, until the next `onload` or a save.
        """
        if GRADIENTS in what:
            self.optimizer.zero_grad(set_to_none=True)
        if self.device.has_own_memory or not self.train.is_colocated:
            self._move(what, HOST)
            if WEIGHTS in what or self.train.is_colocated:
                self.transfers.give_back()
            return
        for model in self.models:
            reshard(model)
        for name in (WEIGHTS, OPTIMIZER):
            if name in what and name not in self._spills:
                self._spills[name] = Spill(self.local_tensors(name))

    def require_here(self, *what: str) -> None:
        """Check that none of it is in a file."""
        away = self._spills.keys() & set(what)
        assert not away, (
            f"{', '.join(sorted(away))} of this rank are in a file: the step's phases are out of order"
        )

    @contextmanager
    def readable(self) -> Iterator[None]:
        """What is in files, or on its way to the host, is in memory inside the block."""
        away = list(self._spills)
        self.onload(away)
        yield
        self.offload(away)

    def local_tensors(self, what: str) -> list[torch.Tensor]:
        """This rank's shards of all weights, or of the optimizer's state."""
        tensors: list[Any] = [parameter for model in self.models for parameter in model.parameters()]
        if what == OPTIMIZER:
            tensors = [value for state in self.optimizer.state.values() for value in state.values()]
        return [local_part(tensor) for tensor in tensors]

    def _move(self, what: Collection[str], device: torch.device) -> None:
        if self.train.offload_shards:  # they are in host memory all the time
            return
        if OPTIMIZER in what:
            move_optimizer(self.optimizer, device, self.transfers)
        if WEIGHTS in what:
            for model in self.models:
                move_model(model, device, self.transfers)


def move_model(model: nn.Module, device: torch.device, transfers: Transfers) -> None:
    """Move the shards of an FSDP2 model; its parameters remain the same objects, as the optimizer needs.

    On the host they are there at once, on another device when the transfers are joined.
    """
    with transfers.queued():
        moved = {id(parameter): transfers.moved(parameter.detach(), device) for parameter in model.parameters()}
        if device == HOST:
            transfers.finish()  # FSDP2 copies uneven shards on the host at once, to pad them

        def place(tensor: torch.Tensor) -> torch.Tensor:
            return moved.pop(id(tensor)) if id(tensor) in moved else tensor.to(device)

        model._apply(place)  # as model.to(device), by which FSDP2 takes up its shards


def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device, transfers: Transfers) -> None:
    """Move AdamW's moments, there when the transfers are joined; step counts stay where they are, on the host."""
    with transfers.queued():
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    state[name] = transfers.moved(value, device)
