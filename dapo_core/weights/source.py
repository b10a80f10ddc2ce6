"""Gathers a rank's shards into the tensors of model or adapter files, bucket by bucket."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from dapo_core.model.lora import adapter_names, base_name, is_adapter, sent_name
from dapo_core.model.names import FilePiece, file_pieces
from dapo_core.model.sharding import Shard, first_row, shards_of
from dapo_core.weights.plan import PlannedTensor, WeightPlan, bucket_numel, plan_buckets
from dapo_core.weights.proof import checksum

if TYPE_CHECKING:
    from dapo_core.weights.outbox import Outbox


@dataclass(frozen=True)
class _Part:
    """The rows of a tensor that one rank holds."""

    number: int  # index among the tensor's parts
    rank: int  # in the default group
    first_row: int  # in the file's tensor
    num_rows: int


class WeightSource:
    """The model's parameters under their file names, in the engines' dtype.

    Engines read frozen ones (train.freeze) from the model's files. Of a model with adapters, either
    the adapters alone, in float32, or the weights with the adapters merged into them. Rank 0 sends;
    the others copy their rows directly into its slot. So beside its shards, a rank holds only its
    own part of a bucket.
    """

    def __init__(
        self,
        causal_lm: nn.Module,
        file_names: Collection[str],
        dtype: torch.dtype,
        max_bytes: int,
        device: torch.device,
        merged_scale: float | None = None,
    ) -> None:
        """file_names: tensors in the model files; device: of slots and shards on the device.

        merged_scale: of the adapters to merge; None sends the adapters, if the model has some.
        """
        self._device = device
        self._causal_lm = causal_lm
        self._merged_scale = merged_scale
        parameters: dict[str, Any] = dict(causal_lm.named_parameters())
        has_adapters = any(map(is_adapter, parameters))
        sends_adapters = merged_scale is None and has_adapters
        self._pieces = {
            piece.file_name: (name, piece)
            for name, parameter in parameters.items()
            if is_adapter(name) == sends_adapters and (has_adapters or parameter.requires_grad)
            for piece in (
                [FilePiece(sent_name(name, file_names))]
                if sends_adapters
                else file_pieces(base_name(name), parameter.shape, file_names)
            )
        }
        self._shards = {name: shards_of(parameters[name]) for name, _ in self._pieces.values()}
        dtype = torch.float32 if sends_adapters else dtype
        self.plan: WeightPlan = plan_buckets(self._tensors(parameters), dtype, max_bytes)

    def send(self, outbox: Outbox | None) -> dict[str, dict[int, int]]:
        """Send all buckets through rank 0's outbox; returns this rank's checksums. Collective."""
        parameters: dict[str, Any] = dict(self._causal_lm.named_parameters())
        sent: dict[str, dict[int, int]] = {}
        for bucket in self.plan.buckets:
            slot = None if outbox is None else outbox.slot()
            sent |= self._gather(bucket, parameters, slot)
            if outbox is not None:
                outbox.send(bucket_numel(bucket))
        if outbox is not None:
            outbox.finish()
        return sent

    @torch.no_grad()
    def _gather(
        self,
        bucket: Sequence[PlannedTensor],
        parameters: Mapping[str, DTensor],
        slot: torch.Tensor | None,
    ) -> dict[str, dict[int, int]]:
        """Fill rank 0's slot with a bucket; returns the checksums of this rank's rows."""
        rank = dist.get_rank()
        sent: dict[str, dict[int, int]] = {}
        transfers = []
        for planned in bucket:
            name, piece = self._pieces[planned.name]
            row_numel = planned.numel // planned.shape[0]
            update = self._update(name, parameters)
            for part in _parts(self._shards[name], piece, planned):
                start = planned.offset + part.first_row * row_numel
                stop = start + part.num_rows * row_numel
                if part.rank == rank:
                    rows = _own_rows(parameters[name], piece).to(self._device, self.plan.dtype)
                    if update is not None:
                        rows = rows + update.to(self._device)
                    rows = rows.reshape(-1)
                    sent.setdefault(planned.name, {})[part.number] = checksum(rows)
                    if slot is None:
                        transfers.append(dist.P2POp(dist.isend, rows, 0))
                    else:
                        slot[start:stop].copy_(rows)
                elif slot is not None:
                    transfers.append(dist.P2POp(dist.irecv, slot[start:stop], part.rank))
        for work in dist.batch_isend_irecv(transfers) if transfers else []:
            work.wait()
        return sent

    def _update(self, name: str, parameters: Mapping[str, DTensor]) -> torch.Tensor | None:
        """Return this rank's rows of what an adapter adds to the weight. Collective.

        FSDP2 splits the weight and the adapter's B into the same rows.
        """
        if self._merged_scale is None or base_name(name) == name:
            return None
        first, second = (parameters[each] for each in adapter_names(base_name(name)))
        return self._merged_scale * second.to_local() @ first.full_tensor()

    def _tensors(self, parameters: Mapping[str, Any]) -> Iterator[PlannedTensor]:
        for file_name, (name, piece) in self._pieces.items():
            parameter = parameters[name]
            shape = tuple(piece.view(torch.empty(parameter.shape, device="meta")).shape)
            rows = [shard.num_rows for shard in self._shards[name]]
            is_expert = piece.expert is not None
            yield PlannedTensor(file_name, shape, (shape[0],) if is_expert else tuple(rows))


def _parts(shards: Sequence[Shard], piece: FilePiece, planned: PlannedTensor) -> Iterator[_Part]:
    """Yield the parts of the piece; an expert's only one is on the rank that holds the expert."""
    if piece.expert is not None:
        owner = shards[bisect_right(shards, piece.expert, key=lambda shard: shard.first_row) - 1]
        yield _Part(0, owner.rank, 0, planned.shape[0])
        return
    for number, shard in enumerate(shards):
        yield _Part(number, shard.rank, shard.first_row, shard.num_rows)


def _own_rows(parameter: DTensor, piece: FilePiece) -> torch.Tensor:
    """Return this rank's rows of the piece."""
    local = parameter.to_local()
    return piece.view(local, first_row(parameter))
