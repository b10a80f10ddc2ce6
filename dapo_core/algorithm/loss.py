"""The policy loss of a micro-batch, as sums that add up over micro-batches and ranks.

The loss is a sum over tokens of weight * token_loss. The weights contain the denominator of the
whole mini-batch over all ranks, so value and gradient do not depend on how the mini-batch is split.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from dapo_core.algorithm.kl import kl_estimate
from dapo_core.algorithm.loss_tokens import LossTokens
from dapo_core.algorithm.losses import log_ratios, loss_of
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
    num_sequence_tokens: int = 1  # prompt+response

    @classmethod
    def of(cls, batch: Batch, num_data_ranks: int = 1) -> LossTotals:
        """Count the denominators of a mini-batch."""
        mask = batch.response_mask
        num_responses, num_tokens = int(mask.any(dim=-1).sum()), int(batch.lengths.sum())
        return cls(int(mask.sum()), num_responses, num_data_ranks, num_tokens)

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
class LossSums:
    """Sums over a part of a mini-batch; the parts of all ranks add up to the whole."""

    pg_loss: float  # policy loss, divided by the denominator of the whole mini-batch
    # KL to the reference, divided likewise, without its coefficient; 0 without KL in the loss
    kl_loss: float
    num_tokens: float
    clipped: float  # tokens that the loss clips
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
    """Return this part's loss: policy loss, entropy bonus, and KL to the reference.

    A token's policy loss (losses.py) is multiplied by its importance weight. Masked values, even
    NaN, affect neither loss nor gradient. Entropy may be None without an entropy bonus. Collective
    over the ranks that share a response, if the loss needs its mean.
    """
    mask = tokens.response_mask

    def masked(values: torch.Tensor) -> torch.Tensor:
        return torch.where(mask, values, 0.0)

    log_probs, weights = masked(log_probs), masked(tokens.weights)
    inputs = replace(
        tokens,
        old_log_probs=masked(tokens.old_log_probs),
        advantages=masked(tokens.advantages).to(log_probs.dtype),
    )
    token_loss, *are_clipped = loss_of(algorithm)(log_probs, inputs, algorithm)
    if tokens.importance_weights is not None:
        token_loss = token_loss * masked(tokens.importance_weights).detach()
    pg_loss = (weights * masked(token_loss)).sum()
    loss, kl_loss = pg_loss, torch.zeros_like(pg_loss)
    if algorithm.entropy_coefficient:
        assert entropy is not None, "the policy computes it for a bonus"
        loss = loss - algorithm.entropy_coefficient * (weights * masked(entropy)).sum()
    if algorithm.kl.place == "loss":
        assert tokens.ref_log_probs is not None, "PolicyGroup.anchor computes them for KL"
        kl = kl_estimate(log_probs, masked(tokens.ref_log_probs), algorithm.kl.estimator)
        kl_loss = (weights * kl).sum()
        loss = loss + algorithm.kl.coefficient * kl_loss
    sums = [
        pg_loss,
        kl_loss,
        mask.sum(),
        *(mask.new_zeros(()) if each is None else (each & mask).sum() for each in are_clipped),
        -log_ratios(log_probs, inputs).sum(),
    ]
    # one device-to-host copy instead of six
    numbers = torch.stack([part.detach().to(pg_loss.dtype) for part in sums]).tolist()
    return PolicyLoss(loss, LossSums(*numbers))
