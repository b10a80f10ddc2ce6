"""Configurations for tests that need only a part of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dapo_core.config import Config


def policy_config(model_path: str | Path, **sections: dict[str, Any]) -> Config:
    """A valid configuration of a model on the CPU with the given keys, by section."""
    values: dict[str, Any] = {"data": {"source": "arithmetic"}, "model": {"path": str(model_path)}, **sections}
    return Config.model_validate(values)
