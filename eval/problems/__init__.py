"""Files of problems and known benchmarks: read, fetched, and put as prompts."""

from eval import InputError


class BenchmarkError(InputError):
    """A file of problems lacks columns, rows or prompts. Raised before any request is sent."""
