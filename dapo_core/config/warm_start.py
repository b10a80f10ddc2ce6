"""Keys of the `model` section that the training core reads."""

from __future__ import annotations

from dapo_core.config.fields import Section, key


class ModelCodeConfig(Section):
    """Whether Python files in a model folder may run."""

    trust_remote_code: bool = key(
        False, "Run the Python files of the model folder with your permissions."
    )


class WarmStartConfig(Section):
    """The small Qwen3 or Qwen3-MoE that `model.source: recipe` builds and warm-starts."""

    num_layers: int = key(2, "Decoder layers.", ge=1, le=64)
    hidden_size: int = key(128, "Hidden size.", ge=16, le=8192)
    num_heads: int = key(4, "Attention heads.", ge=1, le=128)
    num_experts: int = key(
        0, "Experts of a layer, of which a token uses 4; 0 for a dense model.", ge=0, le=255
    )
    num_steps: int = key(600, "Supervised steps before reinforcement learning.", ge=1, le=100_000)
    batch_size: int = key(32, "Solutions per supervised step.", ge=1, le=65_536)
    learning_rate: float = key(3e-3, "Peak AdamW learning rate.", gt=0, le=1)
