"""Resolves dtype `auto` on a CPU to the faster precision for the model's size."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from dapo_core.config.loading import changed
from dapo_core.machine.device import is_bfloat16_faster
from dapo_core.model.pretrained import load_model_config

if TYPE_CHECKING:
    from pathlib import Path

    from dapo_core.config.training import TrainingConfig

    Root = TypeVar("Root", bound=TrainingConfig)


def with_model_dtypes(config: Root, model_path: Path) -> Root:
    """Return the configuration with dtype `auto` resolved for the model in the folder."""
    if config.train.device != "cpu":
        return config
    model_config = load_model_config(model_path, config.model.trust_remote_code)
    text = model_config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return with_cpu_dtypes(config, text.hidden_size, head_dim)


def with_cpu_dtypes(config: Root, hidden_size: int, head_dim: int) -> Root:
    """Return the configuration with dtype `auto` resolved, if it trains on a CPU."""
    if config.train.device != "cpu":
        return config
    is_faster = is_bfloat16_faster(hidden_size, head_dim)
    dtypes = {"train.dtype": config.train.dtype, "rollout.dtype": config.rollout.dtype}
    auto = [name for name, dtype in dtypes.items() if dtype == "auto"]
    return changed(config, dict.fromkeys(auto, "bfloat16" if is_faster else "float32"))
