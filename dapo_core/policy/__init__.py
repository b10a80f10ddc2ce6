"""The policy: one FSDP2 rank that computes log-probs, learns from micro-batches, and hands out its
weights.
"""
