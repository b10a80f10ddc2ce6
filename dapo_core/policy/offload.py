"""Offloading: moves a rank's state between its device, host memory and files."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import nn

from dapo_core.machine.device import Device
from dapo_core.memory.holdings import GRADIENTS, OPTIMIZER, WEIGHTS
from dapo_core.model.sharding import local_part
from dapo_core.policy.model import HOST, reshard

if TYPE_CHECKING:
    from dapo_core.config.train import TrainConfig


class Offloader:
    """Moves weights, gradients and optimizer state off a rank's device and back."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        device: Device,
        train: TrainConfig,
    ) -> None:
        self.models = models
        self.optimizer = optimizer
        self.device = device
        self.train = train
        self.transfers = Transfers(device)
        self._spills: dict[str, Spill] = {}  # by name; only on a CPU

    def onload(self, names: Collection[str]) -> None:
        """Copy the named state back to the device.

        Computation waits for weights; moments may still be copying until AdamW steps.
        """
        for name in names:
            if name in self._spills:
                self._spills.pop(name).restore()
        self.transfers.finish()
        self._move(names, self.device.torch_device())
        if WEIGHTS in names:
            self.transfers.join()

    def offload(self, names: Collection[str]) -> None:
        """Free gradients, and move weights or optimizer state off the device.

        The target is host memory, or a file if ranks and engines share a CPU. On a dedicated
        accelerator, moments are copied in the background until the next `onload` or save.
        """
        if GRADIENTS in names:
            self.optimizer.zero_grad(set_to_none=True)
        if self.device.has_own_memory or not self.train.takes_turns:
            self._move(names, HOST)
            if WEIGHTS in names or self.train.takes_turns:
                self.transfers.release()
            return
        for model in self.models:
            reshard(model)
        for name in (WEIGHTS, OPTIMIZER):
            if name in names and name not in self._spills:
                self._spills[name] = Spill(self.local_tensors(name))

    def require_loaded(self, *names: str) -> None:
        """Assert that none of the named state is in a file."""
        spilled = self._spills.keys() & set(names)
        assert not spilled, (
            f"{', '.join(sorted(spilled))} of this rank are in a file: the step's phases are out "
            "of order"
        )

    @contextmanager
    def readable(self) -> Iterator[None]:
        """Keep all state in memory inside the block."""
        spilled = list(self._spills)
        self.onload(spilled)
        yield
        self.offload(spilled)

    def local_tensors(self, name: str) -> list[torch.Tensor]:
        """Return this rank's shards of all weights, or of the optimizer state."""
        tensors: list[Any] = [each for model in self.models for each in model.parameters()]
        if name == OPTIMIZER:
            tensors = [value for state in self.optimizer.state.values() for value in state.values()]
        return [local_part(tensor) for tensor in tensors]

    def _move(self, names: Collection[str], device: torch.device) -> None:
        if self.train.offload_shards:  # always in host memory
            return
        if OPTIMIZER in names:
            move_optimizer(self.optimizer, device, self.transfers)
        if WEIGHTS in names:
            for model in self.models:
                move_model(model, device, self.transfers)


def move_model(model: nn.Module, device: torch.device, transfers: Transfers) -> None:
    """Move an FSDP2 model's shards. Parameters stay the same objects, as the optimizer requires.

    Copies to the host are complete on return; copies to a device are complete after
    `transfers.join()`.
    """
    with transfers.queued():
        moved = {
            id(parameter): transfers.moved(parameter.detach(), device)
            for parameter in model.parameters()
        }
        if device == HOST:
            transfers.finish()  # FSDP2 pads uneven shards on the host right away

        def place(tensor: torch.Tensor) -> torch.Tensor:
            return moved.pop(id(tensor)) if id(tensor) in moved else tensor.to(device)

        model._apply(place)  # private: what model.to(device) calls, so FSDP2 takes the shards


def move_optimizer(
    optimizer: torch.optim.Optimizer, device: torch.device, transfers: Transfers
) -> None:
    """Move AdamW's moments; complete after `transfers.join()`. Step counts stay on the host."""
    with transfers.queued():
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    state[name] = transfers.moved(value, device)


class Transfers:
    """Copies between a device and pinned host memory on a separate stream, overlapping computation.

    Copies start after the work queued so far. Do not read one before `join` or `finish`. On a CPU,
    nothing moves.
    """

    def __init__(self, device: Device) -> None:
        self._module: Any = device.module()
        self._stream = None if self._module is None else self._module.Stream()
        self._sources: list[torch.Tensor] = []  # kept alive while their copies may still run

    @contextmanager
    def queued(self) -> Iterator[None]:
        """Run the operations in the block on the copy stream, after the work queued so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            yield

    def moved(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return the tensor on the device (on the host, pinned). Call it inside `queued`."""
        copy = tensor.to(device, non_blocking=True)
        if copy is not tensor:
            self._sources.append(tensor)
        return copy

    def join(self) -> None:
        """Make later computation wait for the copies, without blocking the process."""
        if self._stream is not None:
            self._module.current_stream().wait_stream(self._stream)

    def finish(self) -> None:
        """Wait for the copies and free their sources."""
        if self._stream is not None:
            self._stream.synchronize()
        self._sources.clear()

    def release(self) -> None:
        """Wait for the copies and return free device memory to other processes."""
        self.finish()
        if self._module is not None:
            self._module.empty_cache()


class Spill:
    """Tensors in an unnamed temporary file in TMPDIR, which goes with the process.

    Tensors and their views stay the same objects. Their elements must not be accessed until
    `restore`.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Write the tensors and free their memory; raises OSError if the disk is full."""
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - open until `restore`
        self._spilled: list[tuple[torch.UntypedStorage, int]] = []
        for storage in {tensor.data_ptr(): tensor.untyped_storage() for tensor in tensors}.values():
            num_bytes = storage.nbytes()
            if num_bytes:
                self._file.write(_elements(storage, num_bytes))
                self._spilled.append((storage, num_bytes))
                storage.resize_(0)
        self._file.flush()
        # malloc keeps freed blocks below its dynamic threshold.
        ctypes.CDLL(None).malloc_trim(0)

    def restore(self) -> None:
        """Read the tensors back and delete the file."""
        self._file.seek(0)
        for storage, num_bytes in self._spilled:
            storage.resize_(num_bytes)
            self._file.readinto(_elements(storage, num_bytes))  # type: ignore[attr-defined]
        self._file.close()


def _elements(storage: torch.UntypedStorage, num_bytes: int) -> Any:
    """Return the storage's memory as a buffer, which, unlike numpy, lets it be resized."""
    return (ctypes.c_char * num_bytes).from_address(storage.data_ptr())
