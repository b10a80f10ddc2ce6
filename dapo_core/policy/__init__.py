"""The policy: one FSDP2 rank that computes log-probs, learns from micro-batches, and hands out its weights."""

from dapo_core.policy.rank import Policy, UpdateSums, load_causal_lm

__all__ = ["Policy", "UpdateSums", "load_causal_lm"]
