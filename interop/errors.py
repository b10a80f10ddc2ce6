"""The error of this package."""

from __future__ import annotations


class ForeignConfigError(ValueError):
    """A configuration or log of another trainer cannot be read, or its table does not fit it."""
