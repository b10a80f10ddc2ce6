"""Complete configurations for tests that need only a part."""

from pathlib import Path
from typing import Any

from flows.config import Config


def make_config(model_path: str | Path = "model", **sections: dict[str, Any]) -> Config:
    """A valid CPU configuration with the given keys, by section."""
    values: dict[str, Any] = {"model": {"path": str(model_path)}, **sections}
    return Config.model_validate(
        {
            **values,
            "data": {"train": "arithmetic", "eval": "arithmetic", **sections.get("data", {})},
        }
    )
