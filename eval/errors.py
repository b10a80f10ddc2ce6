"""Errors of the evaluation: each says what happened with numbers, what it means, and what to change."""

from __future__ import annotations


class EvaluationError(Exception):
    """Base of every error that `eval` raises on purpose. Takes one message and is picklable."""

    is_lasting = False  # until the user changes something; a retry may mend the others


class BenchmarkError(EvaluationError, ValueError):
    """An evaluation set lacks columns, rows or prompts. Raised before any request is sent."""

    is_lasting = True


class ResultsError(EvaluationError, ValueError):
    """A results directory is missing files or rows, or holds rows that are not ours."""

    is_lasting = True


class ComparisonError(EvaluationError, ValueError):
    """Two results directories cannot be paired: other items, prompts, sampling settings or grader."""

    is_lasting = True
