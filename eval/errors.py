"""Errors of the evaluation: each says what happened with numbers, what it means, and what to change."""

from __future__ import annotations


class EvaluationError(Exception):
    """Base of every error that `eval` raises on purpose. Takes one message and is picklable."""


class BenchmarkError(EvaluationError, ValueError):
    """An evaluation set lacks columns, rows or prompts. Raised before any request is sent."""


class ResultsError(EvaluationError, ValueError):
    """A results directory is missing files or rows, or holds rows that are not ours."""


class ComparisonError(EvaluationError, ValueError):
    """Two results directories cannot be paired: other items, prompts, sampling settings or grader."""
