"""Assigns tensors to weight buckets; ranks and engines use the same plan."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

NUM_SLOTS = 2  # one bucket is gathered while the other is sent


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor and its position in a bucket."""

    name: str  # in the model's files
    shape: tuple[int, ...]
    shard_rows: tuple[int, ...]  # of each rank's part, which has a checksum
    offset: int = 0  # of the first element in the bucket

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class WeightPlan:
    """All tensors of a model, divided into buckets of at most `slot_numel` elements."""

    dtype: torch.dtype  # the engines' dtype
    buckets: tuple[tuple[PlannedTensor, ...], ...]

    @property
    def slot_numel(self) -> int:
        """Elements of the largest bucket."""
        return max(map(bucket_numel, self.buckets), default=0)

    @property
    def tensors(self) -> dict[str, PlannedTensor]:
        """Every tensor by name."""
        return {planned.name: planned for bucket in self.buckets for planned in bucket}


def bucket_numel(bucket: tuple[PlannedTensor, ...]) -> int:
    """Return the number of elements in a bucket."""
    return bucket[-1].offset + bucket[-1].numel


def plan_buckets(
    tensors: Iterable[PlannedTensor], dtype: torch.dtype, max_bytes: int
) -> WeightPlan:
    """Divide the tensors in order; a bucket has `max_bytes` at most, or one larger tensor."""
    tensors = list(tensors)
    limit = max([max_bytes // dtype.itemsize, *(planned.numel for planned in tensors)])
    buckets: list[list[PlannedTensor]] = []
    filled = 0
    for planned in tensors:
        if not buckets or filled + planned.numel > limit:
            buckets.append([])
            filled = 0
        buckets[-1].append(PlannedTensor(planned.name, planned.shape, planned.shard_rows, filled))
        filled += planned.numel
    return WeightPlan(dtype, tuple(map(tuple, buckets)))
