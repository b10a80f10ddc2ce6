"""All-to-all with autograd: gradients travel back the way their rows came."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def all_to_all(
    rows: torch.Tensor, sends: list[int], receives: list[int], group: ProcessGroup
) -> torch.Tensor:
    """Send the next `sends[i]` rows to rank i of the group; return `receives[i]` from each."""
    received: torch.Tensor = _AllToAll.apply(rows, sends, receives, group)
    return received


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        rows: torch.Tensor,
        sends: list[int],
        receives: list[int],
        group: ProcessGroup,
    ) -> torch.Tensor:
        context.sizes, context.group = (sends, receives), group
        received = rows.new_empty(sum(receives), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), receives, sends, group=group)
        return received

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        sends, receives = context.sizes
        return all_to_all(gradients[0], receives, sends, context.group), None, None, None
