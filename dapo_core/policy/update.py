"""What one optimizer step did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dapo_core.batch import Measured
from dapo_core.loss import LossSums

if TYPE_CHECKING:
    from dapo_core.policy.nan_guard import Fault


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
