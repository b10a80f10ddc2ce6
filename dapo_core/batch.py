"""Groups as tensors, and how a batch is split over ranks and micro-batches.

P prompts, G responses per prompt, B = P*G responses, R response tokens, T prompt+response tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from dapo_core.rollout import Group


@dataclass(frozen=True)
class Batch:
    """B responses behind their prompts, padded on the right.

    Example with prompt (5, 6), response (7, 8, 2) and T = 6: token_ids [[5, 6, 7, 8, 2, 0]],
    prompt_lengths [2], response_lengths [3]; R = 3 and position r of [B, R] fields is response token r.
    """

    token_ids: torch.Tensor  # [B, T] int64
    prompt_lengths: torch.Tensor  # [B]
    response_lengths: torch.Tensor  # [B]
    response_mask: torch.Tensor  # [B, R] bool: tokens we train
    rollout_log_probs: torch.Tensor  # [B, R] float32, 0 beyond the response
    old_log_probs: torch.Tensor  # [B, R] float32; NaN until the policy computed them
    advantages: torch.Tensor  # [B] float32
    ref_log_probs: torch.Tensor | None = None  # [B, R] float32, of the reference model; None without KL
    importance_weights: torch.Tensor | None = None  # [B, R] float32, truncated policy/engine ratios; None when off

    @property
    def num_responses(self) -> int:
        return len(self.token_ids)

    @property
    def num_loss_tokens(self) -> int:
        """Tokens under the mask."""
        return int(self.response_mask.sum())

    @property
    def num_loss_responses(self) -> int:
        """Responses with at least one token under the mask."""
        return int(self.response_mask.any(dim=-1).sum())

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, at least one for the response: [B] int64."""
        return (self.prompt_lengths + self.response_lengths.clamp(min=1)).numpy()

    def select(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """The given responses in the given order, padded no wider than they need."""
        rows = torch.from_numpy(np.array(indices, dtype=np.int64))
        width = int(self.lengths[rows].max())
        num_response_tokens = max(int(self.response_lengths[rows].max()), 1)
        return Batch(
            token_ids=self.token_ids[rows, :width],
            prompt_lengths=self.prompt_lengths[rows],
            response_lengths=self.response_lengths[rows],
            response_mask=self.response_mask[rows, :num_response_tokens],
            rollout_log_probs=self.rollout_log_probs[rows, :num_response_tokens],
            old_log_probs=self.old_log_probs[rows, :num_response_tokens],
            advantages=self.advantages[rows],
            ref_log_probs=None if self.ref_log_probs is None else self.ref_log_probs[rows, :num_response_tokens],
            importance_weights=(
                None if self.importance_weights is None else self.importance_weights[rows, :num_response_tokens]
            ),
        )

    def with_old_log_probs(self, old_log_probs: torch.Tensor) -> Batch:
        """The batch anchored to a policy: old_log_probs [B, R]."""
        return replace(self, old_log_probs=old_log_probs)


def build_batch(groups: Sequence[Group], advantages: np.ndarray, mask_truncated: bool) -> Batch:
    """The groups' responses as one batch, in the order of groups and of siblings.

    advantages: [B] in that order. With `mask_truncated`, responses cut by the length limit train no token.
    """
    pairs = [(group.prompt.prompt_ids, rollout) for group in groups for rollout in group.rollouts]
    prompt_lengths = [len(prompt_ids) for prompt_ids, _ in pairs]
    response_lengths = [len(rollout.response_ids) for _, rollout in pairs]
    width = max(p + max(r, 1) for p, r in zip(prompt_lengths, response_lengths, strict=True))
    num_response_tokens = max(*response_lengths, 1)
    token_ids = torch.zeros(len(pairs), width, dtype=torch.int64)
    mask = torch.zeros(len(pairs), num_response_tokens, dtype=torch.bool)
    rollout_log_probs = torch.zeros(len(pairs), num_response_tokens)
    for row, (prompt_ids, rollout) in enumerate(pairs):
        sequence = [*prompt_ids, *rollout.response_ids]
        token_ids[row, : len(sequence)] = torch.tensor(sequence)
        rollout_log_probs[row, : response_lengths[row]] = torch.tensor(rollout.rollout_log_probs)
        mask[row, : response_lengths[row]] = not (mask_truncated and rollout.is_truncated)
    return Batch(
        token_ids=token_ids,
        prompt_lengths=torch.tensor(prompt_lengths),
        response_lengths=torch.tensor(response_lengths),
        response_mask=mask,
        rollout_log_probs=rollout_log_probs,
        old_log_probs=torch.full((len(pairs), num_response_tokens), float("nan")),
        advantages=torch.as_tensor(advantages, dtype=torch.float32),
    )


def balance_over_ranks(lengths: np.ndarray, num_ranks: int) -> list[np.ndarray]:
    """Indices for each rank with nearly equal token sums: longest first, each to the lightest rank."""
    loads = np.zeros(num_ranks, dtype=np.int64)
    members: list[list[int]] = [[] for _ in range(num_ranks)]
    for index in np.argsort(-lengths, kind="stable"):
        rank = int(np.argmin(loads))
        members[rank].append(int(index))
        loads[rank] += lengths[index]
    return [np.array(sorted(rank_members), dtype=np.int64) for rank_members in members]


def micro_batches(lengths: np.ndarray, max_tokens: int) -> list[np.ndarray]:
    """Index sets whose padded size, rows times longest, is at most `max_tokens`; similar lengths together.

    Raises ValueError naming a sequence that alone is longer than `max_tokens`.
    """
    sets: list[list[int]] = []
    longest = 0
    for index in np.argsort(-lengths, kind="stable"):
        if lengths[index] > max_tokens:
            raise ValueError(
                f"response {index} has {lengths[index]} tokens with its prompt, above "
                f"train.micro_batch_tokens={max_tokens}; raise train.micro_batch_tokens"
            )
        if not sets or (len(sets[-1]) + 1) * longest > max_tokens:
            sets.append([])
            longest = int(lengths[index])
        sets[-1].append(int(index))
    return [np.array(indices, dtype=np.int64) for indices in sets]


@dataclass(frozen=True)
class RankShare:
    """One rank's part of a batch, already cut into micro-batches.

    `micro_batches` has the same length on every rank, because each is a collective forward pass under FSDP; a
    rank with less work, or none, repeats a response with an empty mask.
    """

    batch: Batch
    micro_batches: list[np.ndarray]  # indices into `batch`; the last ones may be empty


def split_batch(batch: Batch, num_ranks: int, max_tokens: int) -> tuple[list[RankShare], list[np.ndarray]]:
    """Balanced shares for each rank, and for each rank the indices into `batch` that its rows came from."""
    indices = balance_over_ranks(batch.lengths, num_ranks)
    parts = [batch.select(rank_indices if len(rank_indices) else [0]) for rank_indices in indices]
    cuts = [
        micro_batches(part.lengths, max_tokens) if len(rank_indices) else []
        for part, rank_indices in zip(parts, indices, strict=True)
    ]
    most = max(len(cut) for cut in cuts)
    empty = np.empty(0, dtype=np.int64)
    shares = [RankShare(part, cut + [empty] * (most - len(cut))) for part, cut in zip(parts, cuts, strict=True)]
    return shares, indices
