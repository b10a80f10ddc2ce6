"""Whole configurations for tests."""

from __future__ import annotations

from typing import Any

from dapo_core.config import Config


def make_config(**sections: dict[str, Any]) -> Config:
    """A configuration with these sections; its data and model are paths that nothing is expected at."""
    data = {"train_path": "train.parquet", "eval_path": "eval.parquet", **sections.pop("data", {})}
    return Config.model_validate({"data": data, "model": {"path": "model"}, **sections})
