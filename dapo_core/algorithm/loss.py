"""Policy loss with decoupled and dual clip, as sums that add up over micro-batches and ranks.

The loss is a sum over tokens of weight * token_loss. The weights contain the denominator of the
whole mini-batch over all ranks, so value and gradient do not depend on how the mini-batch is split.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from dapo_core.algorithm.kl import MAX_LOG_RATIO, kl_estimate
from dapo_core.config.compat import Compat

if TYPE_CHECKING:
    from dapo_core.algorithm.batch import Batch
    from dapo_core.config.algorithm import AlgorithmConfig


@dataclass(frozen=True)
class LossTotals:
    """Denominators of one mini-batch's loss, counted once over all ranks."""

    num_tokens: int  # response tokens under the mask
    num_responses: int  # responses with at least one token under the mask
    num_data_ranks: int = 1  # ranks with different responses

    @classmethod
    def of(cls, batch: Batch, num_data_ranks: int = 1) -> LossTotals:
        """Count the denominators of a mini-batch."""
        mask = batch.response_mask
        return cls(int(mask.sum()), int(mask.any(dim=-1).sum()), num_data_ranks)

    def token_weights(
        self,
        response_mask: torch.Tensor,
        algorithm: AlgorithmConfig,
        num_share_responses: int | None = None,
    ) -> torch.Tensor:
        """Return the weight of each token's loss, 0 outside the mask: [b, R] float32.

        With T tokens and N responses in the mini-batch, and t tokens in the response: token-mean 1
        / T (DAPO, arXiv:2503.14476, eq. 12); token-sum 1; seq-mean-token-sum 1 / N;
        seq-mean-token-mean 1 / (N t) (GRPO, arXiv:2402.03300, eq. 3); seq-mean-token-sum-norm 1 /
        (N loss_norm_tokens) (Dr. GRPO, arXiv:2503.20783).

        num_share_responses: responses in this rank's share; None if the mask covers the whole
        mini-batch. Only used by token-mean with compat=verl: older verl takes the token mean of
        each micro-batch, weights it by responses in the micro-batch / in the share, and averages
        over data ranks.
        """
        mask = response_mask.to(torch.float32)
        aggregation = algorithm.loss_aggregation
        if aggregation == "token-mean":
            if not Compat.of(algorithm).token_mean_per_micro_batch or num_share_responses is None:
                return mask / max(self.num_tokens, 1)
            share = len(mask) / (max(num_share_responses, 1) * self.num_data_ranks)
            return mask * share / response_mask.sum().clamp(min=1)
        if aggregation == "token-sum":
            return mask
        per_response = mask / max(self.num_responses, 1)
        if aggregation == "seq-mean-token-sum":
            return per_response
        if aggregation == "seq-mean-token-mean":
            return per_response / response_mask.sum(dim=-1, keepdim=True).clamp(min=1)
        assert algorithm.loss_norm_tokens is not None, (
            "AlgorithmConfig requires it with seq-mean-token-sum-norm"
        )
        return per_response / algorithm.loss_norm_tokens


@dataclass(frozen=True)
class LossTokens:
    """Inputs of the loss per token: padded [b, R] or packed [N]. Masked values may be NaN."""

    old_log_probs: torch.Tensor
    advantages: torch.Tensor  # the response's advantage, repeated for each token
    response_mask: torch.Tensor  # bool
    weights: torch.Tensor  # LossTotals.token_weights
    importance_weights: torch.Tensor | None = None  # truncated policy/engine ratios; None when off
    ref_log_probs: torch.Tensor | None = None  # of the reference model; needed with KL in the loss


@dataclass(frozen=True)
class LossSums:
    """Sums over a part of a mini-batch; the parts of all ranks add up to the whole."""

    pg_loss: float  # policy loss, divided by the denominator of the whole mini-batch
    # KL to the reference, divided likewise, without its coefficient; 0 without KL in the loss
    kl_loss: float
    num_tokens: float
    clipped: float  # tokens with a clipped ratio
    clipped_dual: float  # tokens with A < 0 where the dual clip applied
    neg_log_ratio: float  # sum of old_log_probs - log_probs

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(
            *(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True))
        )

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.pg_loss + self.kl_loss + self.neg_log_ratio)


class PolicyLoss(NamedTuple):
    """Loss of a part of a mini-batch."""

    # differentiable: policy loss - entropy_coefficient * entropy + kl.coefficient * KL
    loss: torch.Tensor
    sums: LossSums


def policy_loss(
    log_probs: torch.Tensor,
    entropy: torch.Tensor | None,
    tokens: LossTokens,
    algorithm: AlgorithmConfig,
) -> PolicyLoss:
    """Return this part's loss: clipped policy loss, entropy bonus, and KL to the reference.

    With r = exp(clamp(log_probs - old_log_probs, -20, 20)), a token's policy loss is max(-A r, -A
    clamp(r, 1 - low, 1 + high)), for A < 0 at most -A c (DAPO, arXiv:2503.14476, eq. 8; dual clip
    arXiv:1912.09729), times its importance weight. Masked values, even NaN, affect neither loss nor
    gradient.
    Entropy may be None without an entropy bonus.
    """
    mask = tokens.response_mask

    def masked(values: torch.Tensor) -> torch.Tensor:
        return torch.where(mask, values, 0.0)

    log_probs, weights = masked(log_probs), masked(tokens.weights)
    log_ratio = (log_probs - masked(tokens.old_log_probs)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    advantages = masked(tokens.advantages).to(log_probs.dtype)
    token_loss, is_clipped, is_dual = _clipped_loss(log_ratio.exp(), advantages, algorithm)
    if tokens.importance_weights is not None:
        token_loss = token_loss * masked(tokens.importance_weights).detach()
    pg_loss = (weights * token_loss).sum()
    loss, kl_loss = pg_loss, torch.zeros_like(pg_loss)
    if algorithm.entropy_coefficient:
        if entropy is None:
            raise ValueError(
                f"algorithm.entropy_coefficient={algorithm.entropy_coefficient} needs the entropy"
            )
        loss = loss - algorithm.entropy_coefficient * (weights * masked(entropy)).sum()
    if algorithm.kl.place == "loss":
        if tokens.ref_log_probs is None:
            raise ValueError("algorithm.kl.place=loss needs the log-probs of the reference model")
        kl = kl_estimate(log_probs, masked(tokens.ref_log_probs), algorithm.kl.estimator)
        kl_loss = (weights * kl).sum()
        loss = loss + algorithm.kl.coefficient * kl_loss
    sums = [
        pg_loss,
        kl_loss,
        mask.sum(),
        (is_clipped & mask).sum(),
        (is_dual & mask).sum(),
        -log_ratio.sum(),
    ]
    # one device-to-host copy instead of six
    numbers = torch.stack([part.detach().to(pg_loss.dtype) for part in sums]).tolist()
    return PolicyLoss(loss, LossSums(*numbers))


def _clipped_loss(
    ratio: torch.Tensor, advantages: torch.Tensor, algorithm: AlgorithmConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each token's loss, whether its ratio was clipped, and by the dual clip."""
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - algorithm.clip_ratio_low, 1 + algorithm.clip_ratio_high)
    single = torch.maximum(unclipped, clipped)
    bound = -advantages * algorithm.clip_ratio_dual
    is_negative = advantages < 0
    token_loss = torch.where(is_negative, torch.minimum(bound, single), single)
    return token_loss, clipped > unclipped, is_negative & (bound < single)
