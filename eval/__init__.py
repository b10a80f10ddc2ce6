"""Evaluation of a served model: problems, requests, grading, statistics and reports."""


class EvaluationError(Exception):
    """Base of every error that `eval` raises on purpose. Takes one message and is picklable."""

    is_lasting = False  # until the user changes something; a retry may mend the others


class RequestsRefused(EvaluationError):
    """The server refuses requests as they are (HTTP 400): what is asked or how it is served has to change."""

    is_lasting = True


class InputError(EvaluationError, ValueError):
    """Base of the errors that another attempt cannot cure: a file or a setting has to change first."""

    is_lasting = True
