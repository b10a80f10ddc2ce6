"""The policy: one FSDP2 rank that computes log-probs, learns, and hands out its weights."""
