"""Experiment trackers: each follows a training's metrics.jsonl in a process of its own."""
