"""Weights and optimizer state between the device and the host, so that engines on the same device have room."""

from __future__ import annotations

import torch
from torch import nn

HOST = torch.device("cpu")


def move_model(model: nn.Module, device: torch.device) -> None:
    """Move the shards of an FSDP2 model; the parameters stay the objects that the optimizer knows."""
    before = next(model.parameters()).device
    model.to(device)
    _free_cached(before, device)


def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move AdamW's moments; step counts stay where AdamW put them, on the host."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                state[name] = value.to(device)
    _free_cached(optimizer.param_groups[0]["params"][0].device, device)


def _free_cached(before: torch.device, device: torch.device) -> None:
    """Give the memory that torch caches back to the device that was left, for other processes."""
    if before.type not in ("cpu", "meta") and before != device:
        getattr(torch, before.type).empty_cache()
