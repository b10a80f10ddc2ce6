"""Checkpoints: weights and optimizer in shards, the trainer's state, and what a merge needs."""
