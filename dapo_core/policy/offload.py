"""Weights and optimizer state between the device and the host, so that engines on the same device have room."""

from __future__ import annotations

import torch
from torch import nn

_HOST = torch.device("cpu")


def offload_model(model: nn.Module) -> None:
    """Move the shards of an FSDP2 model to the host; nothing happens when they are there."""
    device = next(model.parameters()).device
    _move_model(model, _HOST)
    _free_cached(device)


def onload_model(model: nn.Module, device: torch.device) -> None:
    """Move the shards of an FSDP2 model back to its device."""
    _move_model(model, device)


def offload_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Move the optimizer's moments to the host; nothing happens when they are there."""
    devices = {parameter.device for group in optimizer.param_groups for parameter in group["params"]}
    _move_optimizer(optimizer, _HOST)
    for device in devices:
        _free_cached(device)


def onload_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the optimizer's moments back to the device of the weights."""
    _move_optimizer(optimizer, device)


def _move_model(model: nn.Module, device: torch.device) -> None:
    """FSDP2 reshards on the way, and the parameters stay the objects that the optimizer knows."""
    model.to(device)


def _move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Step counts stay where AdamW put them: on the host."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                state[name] = value.to(device)


def _free_cached(device: torch.device) -> None:
    """Give memory that torch keeps for itself back to the device, where other processes can have it."""
    if device.type not in ("cpu", "meta"):
        getattr(torch, device.type).empty_cache()
