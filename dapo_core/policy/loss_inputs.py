"""What the loss of a packed row needs beside the log-probs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dapo_core.batch import Batch
from dapo_core.loss import LossTokens
from dapo_core.rollout_correction import importance_weights

if TYPE_CHECKING:
    from dapo_core.config.algorithm import RolloutCorrectionConfig
    from dapo_core.policy.packing import PackedRow


def loss_tokens(
    micro: Batch,
    row: PackedRow,
    log_probs: torch.Tensor,
    token_weights: torch.Tensor,
    correction: RolloutCorrectionConfig,
) -> LossTokens:
    """The loss's inputs at the row's targets, [M] each; `log_probs` stand in for old ones that are missing."""

    def at_tokens(values: torch.Tensor) -> torch.Tensor:
        """Values [b, R] at the row's targets: [M]."""
        return values.flatten()[row.cells].to(log_probs.device)

    mask = micro.response_mask
    optional = (micro.old_log_probs, micro.importance_weights, micro.ref_log_probs)
    old_log_probs, weights, ref_log_probs = (None if values is None else at_tokens(values) for values in optional)
    if old_log_probs is None:
        old_log_probs = log_probs
        sampled = (at_tokens(micro.rollout_log_probs), at_tokens(mask), at_tokens(micro.is_stale))
        weights = importance_weights(log_probs, *sampled, correction)
    return LossTokens(
        old_log_probs=old_log_probs,
        advantages=at_tokens(micro.advantages.unsqueeze(-1).expand(mask.shape)),
        response_mask=at_tokens(mask),
        weights=at_tokens(token_weights),
        importance_weights=weights,
        ref_log_probs=ref_log_probs,
    )
