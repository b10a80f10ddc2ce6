"""Runs of the chain: one that goes on, those that were, what the next one would do."""
