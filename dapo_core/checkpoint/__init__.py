"""Checkpoints: sharded weights and optimizer state, the trainer state, and the model files that a
merge needs.
"""
