"""Which tensors travel in which bucket, and where they lie in it: the same on ranks and engines."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

NUM_SLOTS = 2  # buckets outside the shards: one is gathered while the other is sent


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor in its bucket, by its name in the model's files."""

    name: str
    shape: tuple[int, ...]
    shard_rows: int  # rows of it that a rank holds; each such part has a checksum
    offset: int = 0  # of its first element in the bucket

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class WeightPlan:
    """All tensors of a model in buckets, of which each holds at most `slot_numel` elements."""

    dtype: torch.dtype  # of the engines
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
    """Elements of a bucket."""
    return bucket[-1].offset + bucket[-1].numel


def plan_buckets(tensors: Iterable[PlannedTensor], dtype: torch.dtype, max_bytes: int) -> WeightPlan:
    """The tensors in order, cut so that no bucket exceeds `max_bytes`, or the largest tensor if that is more."""
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
