"""Runs of the chain: the one in progress, recorded ones, and what the next one would do."""
