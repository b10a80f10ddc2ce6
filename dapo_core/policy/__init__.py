"""The policy: one FSDP2 rank that computes log-probs, learns from micro-batches, and hands out its weights."""

from dapo_core.policy.rank import Policy, Update
from dapo_core.policy.requirements import read_model_config, require_trainable

__all__ = ["Policy", "Update", "read_model_config", "require_trainable"]
