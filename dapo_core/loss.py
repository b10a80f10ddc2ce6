"""The policy loss: decoupled clip, dual clip, and sums that micro-batches and ranks can add up.

A loss is a sum over tokens of weight * token_loss, where the weights already contain the denominator of the whole
mini-batch over all ranks. However the mini-batch is split, the parts add up to the same value and gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from dapo_core.config import AlgorithmConfig

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class LossTotals:
    """What one mini-batch's losses are divided by, counted once over all ranks."""

    num_tokens: int  # response tokens under the mask
    num_responses: int  # responses with at least one token under the mask

    def token_weights(self, response_mask: torch.Tensor, aggregation: str) -> torch.Tensor:
        """Weight of each token's loss, 0 outside the mask: [b, R] float32.

        token-mean: 1 / tokens of the mini-batch (DAPO eq. 12). seq-mean-token-sum: 1 / responses.
        seq-mean-token-mean: 1 / (responses * tokens of the response) (GRPO).
        """
        mask = response_mask.to(torch.float32)
        if aggregation == "token-mean":
            return mask / max(self.num_tokens, 1)
        per_response = mask / max(self.num_responses, 1)
        if aggregation == "seq-mean-token-sum":
            return per_response
        if aggregation == "seq-mean-token-mean":
            return per_response / mask.sum(dim=-1, keepdim=True).clamp(min=1)
        raise ValueError(f"unknown algorithm.loss_aggregation {aggregation!r}")


@dataclass(frozen=True)
class PolicyLoss:
    """A part's contribution to the mini-batch: `loss` to differentiate, the rest sums over the part's tokens."""

    loss: torch.Tensor  # scalar
    num_tokens: float
    clipped: float  # tokens whose ratio was clipped
    clipped_dual: float  # tokens with A < 0 where the dual clip bound
    neg_log_ratio: float  # sum of old_log_probs - log_probs


def policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    totals: LossTotals,
    algorithm: AlgorithmConfig,
) -> PolicyLoss:
    """This part's share of the clipped policy loss (DAPO, arXiv:2503.14476, eq. 8; dual clip arXiv:1912.09729).

    r = exp(clamp(log_probs - old_log_probs, -20, 20)); L = max(-A r, -A clamp(r, 1 - low, 1 + high)), and for
    A < 0 no more than -A c. Values outside the mask, NaN too, change neither the loss nor its gradient.

    log_probs, old_log_probs, response_mask: [b, R]; advantages: [b], one per response.
    """
    zeros = torch.zeros_like(log_probs)
    log_ratio = torch.where(response_mask, log_probs, zeros) - torch.where(response_mask, old_log_probs, zeros)
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    advantage = advantages.to(log_probs.dtype).unsqueeze(-1)  # [b, 1]
    unclipped = -advantage * ratio
    clipped = -advantage * ratio.clamp(1 - algorithm.clip_ratio_low, 1 + algorithm.clip_ratio_high)
    single = torch.maximum(unclipped, clipped)
    bound = -advantage * algorithm.clip_ratio_dual
    is_negative = advantage < 0
    token_loss = torch.where(is_negative, torch.minimum(bound, single), single)
    weights = totals.token_weights(response_mask, algorithm.loss_aggregation)
    is_clipped = (clipped > unclipped) & response_mask
    is_dual = is_negative & (bound < single) & response_mask
    return PolicyLoss(
        loss=(weights * token_loss).sum(),
        num_tokens=float(response_mask.sum()),
        clipped=float(is_clipped.sum()),
        clipped_dual=float(is_dual.sum()),
        neg_log_ratio=float(-log_ratio.detach().sum()),
    )
