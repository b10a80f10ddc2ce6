"""Copies between a device and pinned host memory, beside the computation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from dapo_core.device import Device


class Transfers:
    """Copies on a stream of their own, while the device computes.

    They begin after what is computed so far. Nothing may read a copy before `join` or `finish`. On a CPU tensors
    are where they belong: none is copied, and nothing waits.
    """

    def __init__(self, device: Device) -> None:
        self._module: Any = device.module()
        self._stream = None if self._module is None else self._module.Stream()
        self._sources: list[torch.Tensor] = []  # of copies that may still run

    @contextmanager
    def queued(self) -> Iterator[None]:
        """Copies and other operations inside run in their order, after what is computed so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            yield

    def moved(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The tensor on the device, to be called inside `queued`; in pinned memory if that is the host."""
        copy = tensor.to(device, non_blocking=True)
        if copy is not tensor:
            self._sources.append(tensor)
        return copy

    def join(self) -> None:
        """Have what is computed from now on wait for the copies; the process goes on."""
        if self._stream is not None:
            self._module.current_stream().wait_stream(self._stream)

    def finish(self) -> None:
        """Wait for the copies and free their sources."""
        if self._stream is not None:
            self._stream.synchronize()
        self._sources.clear()

    def give_back(self) -> None:
        """Wait for the copies, and leave the device's free memory to other processes."""
        self.finish()
        if self._module is not None:
            self._module.empty_cache()
