"""Results of calls to Ray's processes."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import RayTaskError

from dapo_core.errors import DapoError


def get(references: Any, max_seconds: float | None = None) -> Any:
    """Results of the calls; an error of ours or of the system arrives as itself, not as Ray's copy of it."""
    try:
        return ray.get(references, timeout=max_seconds)
    except RayTaskError as error:
        if isinstance(error.cause, DapoError | OSError):  # Ray's copy of the latter has no errno
            raise error.cause from error
        raise
