"""Problem files and registered sets: downloading, reading, prompts."""

from eval import InputError


class ProblemsError(InputError):
    """A problem file is missing, unreadable or incomplete, or a set or prompt is unknown."""
