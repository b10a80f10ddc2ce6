"""Which rows of a parameter each rank holds.

FSDP2 splits like torch.chunk. Under expert parallelism, experts are first divided over the last
mesh dimension; FSDP2 splits each part over the dimension before it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Shard:
    """Consecutive rows of a parameter on one rank."""

    rank: int  # in the default group
    first_row: int
    num_rows: int


def local_part(tensor: Any) -> torch.Tensor:
    """Return this rank's shard of a DTensor; other tensors unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shards_of(parameter: DTensor) -> list[Shard]:
    """Return the shards that are not empty in row order, on the ranks of rank 0's replica."""
    mesh, dims = parameter.device_mesh, _split_dims(parameter)
    sizes = [mesh.size(dim) for dim in dims]
    ranks = mesh.mesh.movedim(dims, list(range(-len(dims), 0))).reshape(-1, math.prod(sizes))[0]
    blocks = [(0, parameter.shape[0])]
    for size in sizes:
        blocks = [_chunk(*block, number, size) for block in blocks for number in range(size)]
    return [
        Shard(rank, *block) for rank, block in zip(ranks.tolist(), blocks, strict=True) if block[1]
    ]


def first_row(parameter: DTensor) -> int:
    """Return the row of the full parameter at which this rank's shard starts."""
    mesh, block = parameter.device_mesh, (0, parameter.shape[0])
    for dim in _split_dims(parameter):
        block = _chunk(*block, mesh.get_local_rank(dim), mesh.size(dim))
    return block[0]


def _split_dims(parameter: DTensor) -> list[int]:
    """Return the mesh dimensions that split the rows: the one of experts, then that of FSDP2."""
    placements = parameter.placements  # is_shard() is false for those of FSDP2 within experts
    return [dim for dim in reversed(range(len(placements))) if not placements[dim].is_replicate()]


def _chunk(start: int, num_rows: int, number: int, count: int) -> tuple[int, int]:
    """Return the first row and the number of rows of one of `count` chunks of these rows."""
    size = -(-num_rows // count)
    offset = min(number * size, num_rows)
    return start + offset, min(size, num_rows - offset)
