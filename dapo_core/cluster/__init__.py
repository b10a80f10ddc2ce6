"""Policy ranks and rollout workers as Ray actors. Nothing else imports Ray."""

from dapo_core.cluster.policy_group import PolicyGroup
from dapo_core.cluster.rollout_group import RolloutGroup
from dapo_core.cluster.start import Cluster, start_cluster

__all__ = ["Cluster", "PolicyGroup", "RolloutGroup", "start_cluster"]
