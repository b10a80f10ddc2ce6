"""What a policy loss gets and returns: values per token, and sums per response."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Responses:
    """Which response of the micro-batch each token belongs to.

    Under sequence parallelism, a rank has only some of a response's tokens, and `group` adds up the
    rest. So a loss that needs the whole response does not depend on the split.
    """

    index: torch.Tensor  # int64, of the tokens' shape
    count: int  # responses in the micro-batch, the same on all ranks of the group
    group: ProcessGroup | None = None

    def mean(self, values: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
        """Return for each token the mean of its response's unmasked tokens, without gradient.

        Collective over the group.
        """
        parts = torch.stack([torch.where(response_mask, values, 0.0), response_mask.to(values)])
        sums = values.new_zeros(2, self.count)
        sums.index_add_(1, self.index.flatten(), parts.detach().flatten(1))
        if self.group is not None:
            dist.all_reduce(sums, group=self.group)
        return (sums[0] / sums[1].clamp(min=1))[self.index]


@dataclass(frozen=True)
class LossTokens:
    """Inputs of the loss per token: padded [b, R] or packed [N]. Masked values may be NaN."""

    old_log_probs: torch.Tensor
    advantages: torch.Tensor  # the response's advantage, repeated for each token
    response_mask: torch.Tensor  # bool
    weights: torch.Tensor  # LossTotals.token_weights
    responses: Responses
    importance_weights: torch.Tensor | None = None  # truncated policy/engine ratios; None when off
    ref_log_probs: torch.Tensor | None = None  # of the reference model; needed with KL in the loss
    is_selected: torch.Tensor | None = None  # bool: chosen by covariance (clip-cov, kl-cov)


class TokenLoss(NamedTuple):
    """A loss per token, without weights; tokens without an effect on the gradient are clipped."""

    value: torch.Tensor
    is_clipped: torch.Tensor | None = None  # bool
    is_clipped_dual: torch.Tensor | None = None  # bool: by a second bound, for A < 0
