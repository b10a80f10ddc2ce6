"""Evaluation logs: regrading, other programs' formats, and exports."""
