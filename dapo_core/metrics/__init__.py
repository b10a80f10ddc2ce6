"""Metrics of a step, their log, and model FLOPs utilization."""
