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
    position_ids [[0, 1, 2, 3, 0, 1]], predictors [1, 2, 4], targets [7, 8, 4], places and tokens
    [0, 1, 2, 3, 4, 5], sequences [0, 0, 0, 0, 1, 1], routing None, cells [0, 1, 2] of a [2, 2]
    batch. With prompt (5, 6) shared by responses (7, 8) and (4,): token_ids [[5, 6, 7, 8, 4]],
    position_ids [[0, 1, 2, 3, 2]], predictors [1, 2, 1], places [0, 1, 2, 3, 0, 1, 4].
    """

    token_ids: torch.Tensor  # [1, n]
    # [1, n], from 0 in each sequence; with pictures [3, 1, n], in time, height and width
    position_ids: torch.Tensor
    packing: Packing
    predictors: torch.Tensor  # [M]: positions in the slice whose logits predict a response token
    targets: torch.Tensor  # [M]: the predicted tokens
    # [N]: positions in the whole row of the batch's sequences, one after the other; a shared
    # prompt's once for each sibling
    places: np.ndarray
    # [m]: likewise the positions in the slice of its tokens, and their rows in the batch
    tokens: torch.Tensor
    sequences: torch.Tensor
    # [n, layers, K] uint8: Batch.routing of the tokens; None: each router's own choice
    routing: torch.Tensor | None
    # [M], on the CPU: indices of the targets in the batch's flattened [b, R] fields
    cells: torch.Tensor
    pictures: RowPictures


def pack(batch: Batch, device: torch.device, group: ProcessGroup | None = None) -> PackedRow:
    """Return the batch as one row, or this rank's equal slice of it under sequence parallelism.

    Siblings that share their prompt have it once. If the row does not divide evenly, padding is
    appended as a separate sequence.
    """
    num_ranks = 1 if group is None else dist.get_world_size(group)
    rank = 0 if group is None else dist.get_rank(group)
    spans, prompts, places = _layout(batch)
    num_padding = int(-spans.sum() % num_ranks)
    if num_padding:
        spans, prompts = np.append(spans, num_padding), np.pad(prompts, ((0, 1), (0, 0)))
    size = int(spans.sum()) // num_ranks
    first = rank * size
    # [N]: one sequence after the other -> [n]: their tokens in the slice
    _, sources = np.unique(places, return_index=True)
    sources = sources[first : first + size]
    missing = size - len(sources)  # padding of the last rank

    counts = batch.prompt_lengths + batch.response_lengths
    is_token = torch.arange(batch.token_ids.shape[1]) < counts.unsqueeze(-1)  # [b, T]
    token_ids = batch.token_ids[is_token].long()
    positions = _positions(batch, counts)
    position_ids = torch.cat(
        [positions[..., sources], torch.arange(missing).expand(*positions.shape[:-1], -1)], dim=-1
    )
    routing = None
    if batch.routing is not None:
        parts = torch.from_numpy(np.concatenate(batch.routing)[sources])
        routing = functional.pad(parts, (0, 0, 0, 0, 0, missing), value=UNKNOWN_EXPERT).to(device)

    is_response = batch.is_response  # [b, R]
    starts = counts.cumsum(0) - counts + batch.prompt_lengths
    offsets = torch.arange(batch.response_mask.shape[1])
    responses = (starts.unsqueeze(-1) + offsets)[is_response]  # [M]: of N
    cells = torch.arange(is_response.numel()).view_as(is_response)[is_response]
    predictors = torch.from_numpy(places)[responses - 1] - first
    is_local = (predictors >= 0) & (predictors < size)
    numbers = torch.arange(len(counts)).repeat_interleave(counts)
    tokens = torch.from_numpy(places) - first
    is_here = (tokens >= 0) & (tokens < size)
    return PackedRow(
        token_ids=functional.pad(token_ids[sources], (0, missing)).unsqueeze(0).to(device),
        position_ids=position_ids.unsqueeze(-2).to(device),
        packing=Packing(spans, device, group, prompts),
        predictors=predictors[is_local].to(device),
        targets=token_ids[responses[is_local]].to(device),
        places=places,
        tokens=tokens[is_here].to(device),
        sequences=numbers[is_here].to(device),
        routing=routing,
        cells=cells[is_local],
        pictures=_pictures(batch, counts, sources, device),
    )


def _layout(batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the spans of a row, the prompts that they read (Packing), and PackedRow.places."""
    owners = batch.prompt_owners
    num_shared = np.bincount(owners, minlength=len(owners))
    spans: list[int] = []
    prompts: list[tuple[int, int]] = []
    places: list[np.ndarray] = []
    num_tokens, prompt = 0, (0, 0)
    lengths = zip(batch.prompt_lengths.tolist(), batch.response_lengths.tolist(), strict=True)
    for row, (prompt_tokens, response_tokens) in enumerate(lengths):
        is_shared = num_shared[owners[row]] > 1
        if is_shared and owners[row] == row:
            prompt = num_tokens, prompt_tokens
            spans.append(prompt_tokens)
            prompts.append((0, 0))
            num_tokens += prompt_tokens
        if is_shared:
            places.append(prompt[0] + np.arange(prompt_tokens))
        span = response_tokens if is_shared else prompt_tokens + response_tokens
        spans.append(span)
        prompts.append(prompt if is_shared else (0, 0))
        places.append(num_tokens + np.arange(span))
        num_tokens += span
    return np.array(spans), np.array(prompts), np.concatenate(places)


def _positions(batch: Batch, counts: torch.Tensor) -> torch.Tensor:
    """Return the positions of a row's tokens: [n], or [3, n] with pictures."""
    if batch.images is None:
        return torch.cat([torch.arange(count) for count in counts.tolist()])
    parts = map(rope_positions, counts.tolist(), batch.images)
    return torch.from_numpy(np.concatenate([*parts], axis=1))


def _pictures(
    batch: Batch, counts: torch.Tensor, sources: np.ndarray, device: torch.device
) -> RowPictures:
    """Return the pictures of a row, and where its tokens from `sources` show them.

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
    here = features[sources]
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
        group_ids=torch.arange(2),
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
