"""Files of problems and known benchmarks: read, fetched, and put as prompts."""

from eval import InputError


class ProblemsError(InputError):
    """A file of problems cannot be had, or lacks columns, rows or prompts."""
