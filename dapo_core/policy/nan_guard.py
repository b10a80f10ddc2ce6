"""Which module makes the first number that is not finite: a skipped update, run again with hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dapo_core.policy.model import local_part

MOST_SEARCHES = 3  # of a process, since each takes an update's time
PREFIX = "causal_lm."  # of names in the policy's model
ADVICE = "If this goes on, rule out causes: train.fused_kernels=[], train.dtype=float32, train.compile=false"


@dataclass(frozen=True)
class Fault:
    """Where the first number that is not finite is in an update of one rank."""

    order: int  # the earlier in an update the lower: 0 forward, 1 the loss, 2 backward, 3 a weight's gradient
    place: str
    micro_batch: int = 0  # of the rank's share
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.place} (rank {self.rank}, micro-batch {self.micro_batch})"


class _Watch:
    """Hooks on all modules that record, in the order of the computation, what is not finite."""

    def __init__(self, root: nn.Module) -> None:
        self.faults: list[Fault] = []
        self._gradient: tuple[torch.Tensor, str] | None = None  # the first bad one, and what made its tensor
        self._readers: list[str] = []  # of that tensor
        self._handles: list[Any] = []
        for name, module in root.named_modules():
            name = name.removeprefix(PREFIX) or "the policy"
            self._handles.append(module.register_forward_pre_hook(self._before(name), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after(name)))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def first(self) -> list[Fault]:
        """The first fault, if there is one."""
        if self.faults or self._gradient is None:
            return self.faults[:1]
        # Of modules inside each other that read it, the innermost.
        inner = [
            name for name in self._readers if not any(other.startswith(f"{name}.") for other in self._readers)
        ]
        by = (
            f"the backward pass of {', '.join(inner)}"
            if inner
            else f"what reads the output of {self._gradient[1]}"
        )
        return [Fault(2, f"a gradient from {by}")]

    def _before(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any, options: Any) -> None:
            for tensor in _tensors((arguments, options)):
                if not _is_finite(tensor):
                    self.faults.append(Fault(0, f"the input of {name}, which no module made"))
                elif tensor.requires_grad:
                    self._handles.append(tensor.register_hook(self._backward(name, is_reader=True)))

        return hook

    def _after(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            for tensor in _tensors(output):
                if not _is_finite(tensor):
                    own = [key for key, weight in module.named_parameters(recurse=False) if not _is_finite(weight)]
                    self.faults.append(Fault(0, f"{own[0]} of {name}" if own else f"the output of {name}"))
                elif tensor.requires_grad:
                    self._handles.append(tensor.register_hook(self._backward(name, is_reader=False)))

        return hook

    def _backward(self, name: str, is_reader: bool) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor) -> None:
            if self._gradient is None and not _is_finite(gradient):
                self._gradient = (gradient, name)
            if is_reader and self._gradient is not None and self._gradient[0] is gradient:
                self._readers.append(name)

        return hook


def find_fault(model: nn.Module, losses: Iterator[torch.Tensor], rank: int) -> Fault:
    """The first number that is not finite when the micro-batches run again; collective, as they are.

    Each of `losses` comes from a micro-batch's forward pass. The model's gradients are garbage afterwards.
    """
    found: list[Fault] = []
    watch = _Watch(model)
    for number, loss in enumerate(losses):
        if not _is_finite(loss):
            watch.faults.append(Fault(1, "the loss, of finite log-probs"))
        loss.backward()
        watch.close()
        found += [replace(fault, micro_batch=number, rank=rank) for fault in watch.first()]
        watch = _Watch(model)
    watch.close()
    return min(found, key=lambda fault: fault.order, default=_of_weights(model, rank))


def _of_weights(model: nn.Module, rank: int) -> Fault:
    """The first weight whose gradient, summed over ranks and micro-batches, is not finite here."""
    for name, weight in model.named_parameters():
        if weight.grad is not None and not _is_finite(local_part(weight.grad)):
            return Fault(3, f"the gradient of {name.removeprefix(PREFIX)}, a sum over ranks", rank=rank)
    return Fault(4, "not there when the update runs again: a kernel or the device gives other numbers each time")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Floating tensors in nested arguments or outputs of a module."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping | tuple | list):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(part)


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())
