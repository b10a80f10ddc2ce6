"""Result of one optimizer step."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from dapo_core.batch import Measured
from dapo_core.loss import LossSums
from dapo_core.policy.nan_guard import ADVICE, Fault

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Update:
    """Result of one optimizer step."""

    sums: LossSums  # over one rank's share, or over the mini-batch
    grad_norm: float  # of the whole model, the same on every rank
    is_skipped: bool  # non-finite norm: the weights are unchanged
    learning_rate: float
    policy_version: int  # optimizer steps so far, including this one
    rank_tokens: tuple[int, ...] = ()  # prompt+response tokens of each data-parallel rank
    measured: Measured | None = None  # before the step, from its own forward pass, if requested
    fault: Fault | None = None  # cause of a skipped step, if searched for

    def log_fault(self, step: int) -> None:
        """Log why training step `step` skipped this update, if the cause was searched for."""
        if self.fault is not None:
            logger.warning(
                "step %d: the gradient norm is %s, so optimizer step %d is skipped. First non-finite number: "
                "%s. %s",
                *(step, self.grad_norm, self.policy_version, self.fault, ADVICE),
            )
