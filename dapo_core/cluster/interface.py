"""The started roles of a training, as the trainer holds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dapo_core.cluster.policy_group import PolicyGroup
    from dapo_core.cluster.rollout_group import RolloutGroup
    from dapo_core.config.training import TrainingConfig
    from dapo_core.weights.transfer import WeightTransfer


@dataclass(frozen=True)
class Cluster:
    """The started roles of a training."""

    policy: PolicyGroup
    rollouts: RolloutGroup
    weights: WeightTransfer
    config: TrainingConfig  # with the actual number of ranks and engines
