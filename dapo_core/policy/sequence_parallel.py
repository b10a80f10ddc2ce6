"""Ulysses sequence parallelism (arXiv:2309.14509): ranks exchange slices of a row for attention heads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def sequence_group(sequence_parallel: int) -> ProcessGroup | None:
    """Create this rank's group of `sequence_parallel` consecutive ranks; None for 1. Collective."""
    if sequence_parallel == 1:
        return None
    group, _ = dist.new_subgroups(group_size=sequence_parallel)
    return group


def repeats_of_key_heads(num_key_heads: int, num_ranks: int) -> int:
    """Return how often each key head must be repeated so that heads divide evenly over the ranks."""
    return num_ranks // math.gcd(num_key_heads, num_ranks)


def tokens_to_heads(states: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """All heads of this rank's tokens, [N / sp, H, D] -> all tokens of its heads, [N, H / sp, D]."""
    num_ranks = dist.get_world_size(group)
    blocks = states.unflatten(1, (num_ranks, -1)).transpose(0, 1)  # [sp, N / sp, H / sp, D]
    return _AllToAll.apply(blocks, group).flatten(0, 1)


def heads_to_tokens(states: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """All tokens of this rank's heads, [N, H / sp, D] -> all heads of its tokens, [N / sp, H, D]."""
    num_ranks = dist.get_world_size(group)
    blocks = _AllToAll.apply(states.unflatten(0, (num_ranks, -1)), group)  # [sp, N / sp, H / sp, D]
    return blocks.transpose(0, 1).flatten(1, 2)


class _AllToAll(torch.autograd.Function):
    """All-to-all with autograd: block i goes to rank i; gradients travel back the same way."""

    @staticmethod
    def forward(context: Any, blocks: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        context.group = group
        blocks = blocks.contiguous()
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks, group=group)
        return received

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _AllToAll.apply(gradients[0], context.group), None
