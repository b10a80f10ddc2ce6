"""A micro-batch as one row of sequences without padding, and the positions that predict response tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dapo_core.batch import Batch
from dapo_core.policy.attention import Packing

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class PackedRow:
    """A rank's n tokens of a packed row, of which M predict a response token.

    Example with prompts (5, 6) and (3,), responses (7, 8) and (4,): token_ids [[5, 6, 7, 8, 3, 4]], position_ids
    [[0, 1, 2, 3, 0, 1]], predictors [1, 2, 4], targets [7, 8, 4], cells [0, 1, 2] of a [2, 2] batch.
    """

    token_ids: torch.Tensor  # [1, n]
    position_ids: torch.Tensor  # [1, n], from 0 in each sequence
    packing: Packing
    predictors: torch.Tensor  # [M]: positions in the slice whose logits predict a response token
    targets: torch.Tensor  # [M]: the tokens predicted
    cells: torch.Tensor  # [M], on the CPU: where these tokens are in the batch's flattened [b, R] fields


def pack(batch: Batch, device: torch.device, group: ProcessGroup | None = None) -> PackedRow:
    """The batch as one row, or this rank's equal slice of it under sequence parallelism.

    A row that does not divide evenly ends with padding, as a separate sequence.
    """
    num_ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    counts = batch.prompt_lengths + batch.response_lengths
    num_padding = int(-counts.sum() % num_ranks)
    columns = torch.arange(batch.token_ids.shape[1])
    is_token = columns < counts.unsqueeze(-1)  # [b, T]
    token_ids = torch.cat([batch.token_ids[is_token], torch.zeros(num_padding, dtype=torch.int64)])
    positions = torch.cat([columns.expand_as(is_token)[is_token], torch.arange(num_padding)])

    place = torch.arange(batch.response_mask.shape[1])
    is_response = place < batch.response_lengths.unsqueeze(-1)  # [b, R]
    starts = counts.cumsum(0) - counts + batch.prompt_lengths
    responses = (starts.unsqueeze(-1) + place)[is_response]  # [M] positions of response tokens in the row
    cells = torch.arange(is_response.numel()).view_as(is_response)[is_response]

    size = len(token_ids) // num_ranks
    first = rank * size
    is_local = (responses > first) & (responses <= first + size)  # a token is predicted by the one before it
    lengths = [*counts.tolist(), num_padding] if num_padding else counts.tolist()
    return PackedRow(
        token_ids=token_ids[first : first + size].unsqueeze(0).to(device),
        position_ids=positions[first : first + size].unsqueeze(0).to(device),
        packing=Packing(lengths, device, group),
        predictors=(responses[is_local] - 1 - first).to(device),
        targets=token_ids[responses[is_local]].to(device),
        cells=cells[is_local],
    )


def probe_row(device: torch.device, group: ProcessGroup | None = None) -> PackedRow:
    """Two sequences of two prompt and two response tokens."""
    values = torch.zeros(2, 2)
    lengths = torch.full((2,), 2)
    batch = Batch(
        token_ids=torch.arange(8).view(2, 4),
        prompt_lengths=lengths,
        response_lengths=lengths,
        response_mask=values.bool(),
        group_ids=lengths,
        rewards=values[:, 0],
        is_scored=values[:, 0].bool(),
        rollout_log_probs=values,
        is_stale=values.bool(),
        advantages=values[:, 0],
    )
    return pack(batch, device, group)
