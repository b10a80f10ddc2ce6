"""Evaluation of served models: problems, requests, grading, statistics and reports."""


class EvaluationError(Exception):
    """Base class of eval's errors. Takes one message and is picklable."""

    is_lasting = False  # True if a retry cannot succeed until the user changes something


class RequestsRefused(EvaluationError):
    """The server refuses the requests (HTTP 400): they, or how the model is served, must change."""

    is_lasting = True


class InputError(EvaluationError, ValueError):
    """A file or a setting must change before another attempt can succeed."""

    is_lasting = True
