"""Result of an optimizer step."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from dapo_core.algorithm.batch import TokenStats
from dapo_core.algorithm.loss import LossSums

logger = logging.getLogger(__name__)


ADVICE = (
    "If this continues, rule out causes: train.fused_kernels=[], train.dtype=float32, "
    "train.compile=false"
)


@dataclass(frozen=True)
class Fault:
    """Location of the first non-finite number in one rank's update."""

    # position in the update: 0 forward, 1 loss, 2 backward, 3 weight gradient, 4 not reproduced
    order: int
    place: str
    micro_batch: int = 0  # in the rank's share
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.place} (rank {self.rank}, micro-batch {self.micro_batch})"


@dataclass(frozen=True)
class RoutingSums:
    """Routing over a part of a mini-batch; the parts of all ranks add up to the whole."""

    loads: list[list[int]]  # [layers, E], tokens that each expert processed
    entropy: float  # nats, summed over tokens and layers
    num_tokens: int  # prompt+response
    # divided by the denominator of the whole mini-batch; None without
    # algorithm.router_aux_loss_coefficient
    balance_loss: float | None

    def __add__(self, other: RoutingSums) -> RoutingSums:
        losses = [each for each in (self.balance_loss, other.balance_loss) if each is not None]
        return RoutingSums(
            np.add(self.loads, other.loads).tolist(),
            self.entropy + other.entropy,
            self.num_tokens + other.num_tokens,
            sum(losses) if losses else None,
        )


@dataclass(frozen=True)
class Update:
    """Result of one optimizer step."""

    sums: LossSums  # over one rank's share, or over the mini-batch
    grad_norm: float  # of the whole model, the same on every rank
    is_skipped: bool  # non-finite norm: the weights are unchanged
    learning_rate: float
    policy_version: int  # optimizer steps so far, including this one
    rank_tokens: tuple[int, ...] = ()  # prompt+response tokens of each data-parallel rank
    routing: RoutingSums | None = None  # None without recorded routers
    stats: TokenStats | None = None  # before the step, from its own forward pass, if requested
    fault: Fault | None = None  # cause of a skipped step, if searched for

    def log_fault(self, step: int) -> None:
        """Log why training step `step` skipped this update, if the cause was searched for."""
        if self.fault is not None:
            logger.warning(
                "step %d: the gradient norm is %s, so optimizer step %d is skipped. First "
                "non-finite number: %s. %s",
                step,
                self.grad_norm,
                self.policy_version,
                self.fault,
                ADVICE,
            )
