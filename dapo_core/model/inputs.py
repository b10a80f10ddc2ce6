"""What a model reads before its response."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelInput:
    """A tokenized prompt as engines and the policy read it, on its way from request to batch.

    Example: ModelInput((1, 52, 9))
    """

    token_ids: tuple[int, ...]
