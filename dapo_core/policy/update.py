"""What one optimizer step did."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from dapo_core.batch import Measured
from dapo_core.loss import LossSums
from dapo_core.policy.nan_guard import ADVICE, Fault

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Update:
    """One optimizer step."""

    sums: LossSums  # of one rank's share, or of the mini-batch
    grad_norm: float  # of the whole model, the same on every rank
    is_skipped: bool  # the norm is not finite, so the weights are unchanged
    learning_rate: float
    policy_version: int  # optimizer steps done, including this one
    rank_tokens: tuple[int, ...] = ()  # prompt and response tokens of each data-parallel rank
    measured: Measured | None = None  # before the step, from its own pass, if requested
    fault: Fault | None = None  # of a skipped step, if it was searched for

    def log_fault(self, step: int) -> None:
        """Warn of what made training step `step` skip this update, if it was searched for."""
        if self.fault is not None:
            logger.warning(
                "step %d: the gradient's norm is %s, so optimizer step %d is skipped. The first number that is "
                "not finite is %s. %s",
                *(step, self.grad_norm, self.policy_version, self.fault, ADVICE),
            )
