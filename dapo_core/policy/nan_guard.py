"""NaN guard: reruns a skipped update with hooks to find the first non-finite number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dapo_core.algorithm.update import Fault
from dapo_core.model.sharding import local_part

MAX_SEARCHES = 3  # per process; each takes as long as an update
PREFIX = "causal_lm."  # of parameter names in the policy


class _Watch:
    """Hooks on all modules that record non-finite numbers in the order of computation."""

    def __init__(self, root: nn.Module) -> None:
        self.faults: list[Fault] = []
        # The first non-finite gradient, and the module of its tensor.
        self._gradient: tuple[torch.Tensor, str] | None = None
        self._readers: list[str] = []  # modules that read that tensor
        self._handles: list[Any] = []
        for name, module in root.named_modules():
            name = name.removeprefix(PREFIX) or "the policy"
            self._handles += [
                module.register_forward_pre_hook(self._before(name), with_kwargs=True),
                module.register_forward_hook(self._after(name)),
            ]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def first(self) -> list[Fault]:
        """Return the first fault, if any."""
        if self.faults or self._gradient is None:
            return self.faults[:1]
        readers = self._readers
        innermost = [
            name for name in readers if not any(other.startswith(f"{name}.") for other in readers)
        ]
        source = f"an operation that reads the output of {self._gradient[1]}"
        if innermost:
            source = f"the backward pass of {', '.join(innermost)}"
        return [Fault(2, f"a gradient from {source}")]

    def _before(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any, options: Any) -> None:
            for tensor in _tensors((arguments, options)):
                if not _is_finite(tensor):
                    self.faults.append(Fault(0, f"the input of {name}, which no module produced"))
                elif tensor.requires_grad:
                    self._handles.append(tensor.register_hook(self._backward(name, is_reader=True)))

        return hook

    def _after(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            for tensor in _tensors(output):
                if not _is_finite(tensor):
                    weights = module.named_parameters(recurse=False)
                    part = next(
                        (key for key, one in weights if not _is_finite(local_part(one))),
                        "the output",
                    )
                    self.faults.append(Fault(0, f"{part} of {name}"))
                elif tensor.requires_grad:
                    backward = self._backward(name, is_reader=False)
                    self._handles.append(tensor.register_hook(backward))

        return hook

    def _backward(self, name: str, is_reader: bool) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor) -> None:
            if self._gradient is None and not _is_finite(gradient):
                self._gradient = (gradient, name)
            if is_reader and self._gradient is not None and self._gradient[0] is gradient:
                self._readers.append(name)

        return hook


def find_fault(model: nn.Module, losses: Iterator[torch.Tensor], rank: int) -> Fault:
    """Rerun the micro-batches and return the first non-finite number. Collective.

    Each item of `losses` runs a micro-batch's forward pass. The model's gradients are garbage
    afterwards.
    """
    found: list[Fault] = []
    watch = _Watch(model)
    for number, loss in enumerate(losses):
        if not _is_finite(loss):
            watch.faults.append(Fault(1, "the loss, although log-probs are finite"))
        loss.backward()
        watch.close()
        found += [replace(fault, micro_batch=number, rank=rank) for fault in watch.first()]
        watch = _Watch(model)
    watch.close()
    return min(found, key=lambda fault: fault.order, default=_gradient_fault(model, rank))


def _gradient_fault(model: nn.Module, rank: int) -> Fault:
    """Return the first weight with a non-finite gradient, summed over ranks."""
    for name, weight in model.named_parameters():
        if weight.grad is not None and not _is_finite(local_part(weight.grad)):
            weight_name = name.removeprefix(PREFIX)
            return Fault(3, f"the gradient of {weight_name}, a sum over ranks", rank=rank)
    reason = "not reproduced when the update ran again: a kernel or the device is not deterministic"
    return Fault(4, reason)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the floating-point tensors in nested module arguments or outputs."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping | tuple | list):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(part)


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())
