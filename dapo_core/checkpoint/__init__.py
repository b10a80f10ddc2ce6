"""Checkpoints: shards of weights and optimizer, the trainer's state, and the model's files."""
