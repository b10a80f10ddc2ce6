"""AdamW, its learning rate schedule, and the result of an optimizer step."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dapo_core.algorithm.batch import Measured
from dapo_core.algorithm.loss import LossSums
from dapo_core.policy.nan_guard import ADVICE, Fault

if TYPE_CHECKING:
    from dapo_core.config.train import TrainConfig


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
                "step %d: the gradient norm is %s, so optimizer step %d is skipped. First "
                "non-finite number: "
                "%s. %s",
                step,
                self.grad_norm,
                self.policy_version,
                self.fault,
                ADVICE,
            )


def adamw(parameters: Iterable[torch.Tensor], train: TrainConfig) -> torch.optim.AdamW:
    """Create the optimizer; the learning rate is set before each step."""
    return torch.optim.AdamW(
        parameters,
        lr=train.learning_rate,
        betas=(train.adam_beta1, train.adam_beta2),
        eps=train.adam_epsilon,
        weight_decay=train.weight_decay,
        foreach=True,
    )


def learning_rate(step: int, train: TrainConfig) -> float:
    """Return the learning rate of optimizer step `step`, starting at 1. It has no other state to
    resume.

    With W = warmup_steps, T = num_schedule_steps and m = min_learning_rate_ratio, the peak is
    multiplied by step / W during warm-up, then by 1 (constant) or by m + (1 - m) f(p). p rises from
    0 at step W to 1 at step T and stays there; f(p) is 1 - p (linear) or (1 + cos(pi p)) / 2
    (cosine). wsd is constant, then a cosine over the last decay_ratio * (T - W) steps, rounded.
    """
    return train.learning_rate * _factor(step, train)


def _factor(step: int, train: TrainConfig) -> float:
    start, end = train.warmup_steps, train.num_schedule_steps
    if step < start:
        return step / start
    if train.schedule == "constant":
        return 1.0
    if train.schedule == "wsd":
        start = end - max(round(train.decay_ratio * (end - start)), 1)
    progress = min(max((step - start) / (end - start), 0.0), 1.0)
    decay = progress if train.schedule == "linear" else (1 - math.cos(math.pi * progress)) / 2
    return 1 - (1 - train.min_learning_rate_ratio) * decay
