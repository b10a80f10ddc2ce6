"""Problem files and known benchmarks: fetching, reading, prompts."""

from eval import InputError


class ProblemsError(InputError):
    """A problem file is unavailable, or lacks columns, rows or prompts."""
