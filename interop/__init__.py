"""Read the configurations and logs of other trainers (verl, MindSpeed): pure data and functions.

In names and docstrings, *foreign* means the other trainer, *ours* this project.
"""


class ForeignConfigError(ValueError):
    """A configuration or log of another trainer cannot be read or converted."""
