"""Which rows of a parameter a rank holds; FSDP2 splits like torch.chunk."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor


def local_part(tensor: Any) -> torch.Tensor:
    """Return this rank's shard of a DTensor; other tensors unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_dim(parameter: DTensor) -> int:
    """Return the mesh dimension over which the parameter is sharded."""
    return next(
        index for index, placement in enumerate(parameter.placements) if placement.is_shard()
    )


def shard_rows(parameter: DTensor) -> int:
    """Return the rows per shard (the last ones may have fewer); FSDP2 splits like torch.chunk."""
    return -(-parameter.shape[0] // parameter.device_mesh.size(shard_dim(parameter)))


def first_row(parameter: DTensor) -> int:
    """Return the row of the full parameter at which this rank's shard starts."""
    rank = parameter.device_mesh.get_local_rank(shard_dim(parameter))
    return min(rank * shard_rows(parameter), parameter.shape[0])
