"""Evaluation of a served model: problems, requests, grading, statistics and reports."""


class EvaluationError(Exception):
    """Base of every error that `eval` raises on purpose. Takes one message and is picklable."""

    is_lasting = False  # until the user changes something; a retry may mend the others


class InputError(EvaluationError, ValueError):
    """Base of the errors that another attempt cannot cure: a file or a setting has to change first."""

    is_lasting = True
