"""Packed rows: micro-batches without padding, and their tokens' cells in [B, R] fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional

from dapo_core.algorithm.balance import RankShare
from dapo_core.algorithm.batch import Batch, TokenStats
from dapo_core.algorithm.correction import importance_weights
from dapo_core.algorithm.loss_tokens import LossTokens, Responses
from dapo_core.model.inputs import ImageReference, rope_positions
from dapo_core.model.routers import UNKNOWN_EXPERT
from dapo_core.policy.attention import Packing

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from dapo_core.config.algorithm import RolloutCorrectionConfig


@dataclass(frozen=True)
class RowPictures:
    """The distinct pictures of a packed row, and the m tokens of a rank's slice that show them.

    Example with a picture of 2 tokens, and a slice that begins with the second: images (picture,),
    tokens [0], features [1].
    """

    images: tuple[ImageReference, ...]  # of the whole row
    tokens: torch.Tensor  # [m]: positions in the slice
    features: torch.Tensor  # [m]: the tokens' rows in the features of all images


@dataclass(frozen=True)
class PackedRow:
    """A rank's n tokens of a packed row, M of which predict a response token.

    Example with prompts (5, 6) and (3,), responses (7, 8) and (4,): token_ids [[5, 6, 7, 8, 3, 4]],
    position_ids [[0, 1, 2, 3, 0, 1]], predictors [1, 2, 4], targets [7, 8, 4], sequences
    [0, 0, 0, 0, 1, 1], routing None, cells [0, 1, 2] of a [2, 2] batch.
    """

    token_ids: torch.Tensor  # [1, n]
    # [1, n], from 0 in each sequence; with pictures [3, 1, n], in time, height and width
    position_ids: torch.Tensor
    packing: Packing
    predictors: torch.Tensor  # [M]: positions in the slice whose logits predict a response token
    targets: torch.Tensor  # [M]: the predicted tokens
    sequences: torch.Tensor  # [n]: the row of each token in the batch, -1 for padding
    # [n, layers, K] uint8: Batch.routing of the tokens; None: each router's own choice
    routing: torch.Tensor | None
    # [M], on the CPU: indices of the targets in the batch's flattened [b, R] fields
    cells: torch.Tensor
    pictures: RowPictures


def pack(batch: Batch, device: torch.device, group: ProcessGroup | None = None) -> PackedRow:
    """Return the batch as one row, or this rank's equal slice of it under sequence parallelism.

    If the row does not divide evenly, padding is appended as a separate sequence.
    """
    num_ranks = 1 if group is None else dist.get_world_size(group)
    rank = 0 if group is None else dist.get_rank(group)
    counts = batch.prompt_lengths + batch.response_lengths
    num_padding = int(-counts.sum() % num_ranks)
    columns = torch.arange(batch.token_ids.shape[1])
    is_token = columns < counts.unsqueeze(-1)  # [b, T]
    padding = torch.zeros(num_padding, dtype=torch.int64)
    token_ids = torch.cat([batch.token_ids[is_token].long(), padding])
    positions = _positions(batch, counts)
    padded = torch.arange(num_padding).expand(*positions.shape[:-1], -1)
    positions = torch.cat([positions, padded], dim=-1)
    numbers = torch.arange(len(counts)).repeat_interleave(counts)
    sequences = torch.cat([numbers, padding - 1])

    offsets = torch.arange(batch.response_mask.shape[1])
    is_response = batch.is_response  # [b, R]
    starts = counts.cumsum(0) - counts + batch.prompt_lengths
    # [M] positions of response tokens in the row
    responses = (starts.unsqueeze(-1) + offsets)[is_response]
    cells = torch.arange(is_response.numel()).view_as(is_response)[is_response]

    size = len(token_ids) // num_ranks
    first = rank * size
    # a token is predicted by the one before it
    is_local = (responses > first) & (responses <= first + size)
    routing = None
    if batch.routing is not None:
        parts = torch.from_numpy(np.concatenate(batch.routing)[first : first + size])
        missing = size - len(parts)  # padding of the last rank
        routing = functional.pad(parts, (0, 0, 0, 0, 0, missing), value=UNKNOWN_EXPERT).to(device)
    lengths = [*counts.tolist(), num_padding] if num_padding else counts.tolist()
    return PackedRow(
        token_ids=token_ids[first : first + size].unsqueeze(0).to(device),
        position_ids=positions[..., first : first + size].unsqueeze(-2).to(device),
        packing=Packing(lengths, device, group),
        predictors=(responses[is_local] - 1 - first).to(device),
        targets=token_ids[responses[is_local]].to(device),
        sequences=sequences[first : first + size].to(device),
        routing=routing,
        cells=cells[is_local],
        pictures=_pictures(batch, counts, slice(first, first + size), device),
    )


def _positions(batch: Batch, counts: torch.Tensor) -> torch.Tensor:
    """Return the positions of a row's tokens: [n], or [3, n] with pictures."""
    if batch.images is None:
        return torch.cat([torch.arange(count) for count in counts.tolist()])
    parts = map(rope_positions, counts.tolist(), batch.images)
    return torch.from_numpy(np.concatenate([*parts], axis=1))


def _pictures(batch: Batch, counts: torch.Tensor, part: slice, device: torch.device) -> RowPictures:
    """Return the pictures of a row, and where this part of it shows them.

    Siblings show the same pictures, which are computed once.
    """
    images: dict[str, ImageReference] = {}
    firsts: dict[str, int] = {}  # first feature of each picture
    num_features = 0
    features = torch.full((int(counts.sum()),), -1)
    starts = (counts.cumsum(0) - counts).tolist()
    for start, shown in zip(starts, batch.images or [()] * len(starts), strict=True):
        for image in shown:
            if image.digest not in images:
                images[image.digest], firsts[image.digest] = image, num_features
                num_features += image.num_tokens
            first = firsts[image.digest]
            place = slice(start + image.tokens.start, start + image.tokens.stop)
            features[place] = torch.arange(first, first + image.num_tokens)
    here = features[part]
    is_shown = here >= 0
    tokens = is_shown.nonzero().squeeze(-1)
    return RowPictures(tuple(images.values()), tokens.to(device), here[is_shown].to(device))


def probe_row(device: torch.device, group: ProcessGroup | None = None) -> PackedRow:
    """Return a row of two sequences, each with two prompt and two response tokens."""
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


def loss_tokens(
    micro: Batch,
    row: PackedRow,
    log_probs: torch.Tensor,
    token_weights: torch.Tensor,
    correction: RolloutCorrectionConfig,
) -> LossTokens:
    """Return the loss inputs at the row's targets: [M]. Missing old log-probs are `log_probs`."""

    def at_tokens(values: torch.Tensor) -> torch.Tensor:
        """[b, R] -> [M]."""
        return values.flatten()[row.cells].to(log_probs.device)

    mask = micro.response_mask
    optional = (micro.old_log_probs, micro.importance_weights, micro.ref_log_probs)
    old_log_probs, weights, ref_log_probs, is_selected = (
        None if values is None else at_tokens(values) for values in (*optional, micro.is_selected)
    )
    numbers = torch.arange(micro.num_responses).unsqueeze(-1).expand(mask.shape)
    if old_log_probs is None:
        old_log_probs = log_probs
        sampled = (at_tokens(micro.rollout_log_probs), at_tokens(mask), at_tokens(micro.is_stale))
        weights = importance_weights(log_probs, *sampled, correction)
    return LossTokens(
        old_log_probs=old_log_probs,
        advantages=at_tokens(micro.advantages.unsqueeze(-1).expand(mask.shape)),
        response_mask=at_tokens(mask),
        weights=at_tokens(token_weights),
        responses=Responses(at_tokens(numbers), micro.num_responses, row.packing.group),
        importance_weights=weights,
        ref_log_probs=ref_log_probs,
        is_selected=is_selected,
    )


class StatsBuffer:
    """Collects log-probs and entropy of a rank's share, one micro-batch at a time."""

    def __init__(self, share: RankShare) -> None:
        self.share = share
        # [2, b, R]
        self.values = torch.zeros(len(TokenStats._fields), *share.batch.response_mask.shape)

    def add(self, number: int, row: PackedRow, values: Sequence[torch.Tensor]) -> None:
        """Store log-probs and entropy [M] of micro-batch `number`; entropy may be empty."""
        indices, micro = self.share.micro_batches[number], self.share.micro_batch(number)
        part = torch.zeros(len(self.values), micro.response_mask.numel())
        for field, stats in zip(part, values, strict=True):
            field[row.cells[: len(stats)]] = stats.detach().cpu()
        part = part.unflatten(1, micro.response_mask.shape)[:, : len(indices)]
        self.values[:, torch.tensor(indices), : part.shape[2]] = part

    def read(self, group: ProcessGroup | None, device: torch.device) -> TokenStats:
        """Return the whole share's values, [b, R] each, on every rank. Collective."""
        values = self.values
        if group is not None:  # every rank has its slices of the rows, and 0 elsewhere
            values = values.to(device)
            dist.all_reduce(values, group=group)
        return TokenStats(*values.cpu())
