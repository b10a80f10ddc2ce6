"""Keys of the `model` section that the training core reads."""

from __future__ import annotations

from pydantic import model_validator

from dapo_core.config.fields import Section, key

VISION_HEADS = 2  # of the tower of a model that `model.source: recipe` builds


class ModelCodeConfig(Section):
    """Whether Python files in a model folder may run."""

    trust_remote_code: bool = key(
        False, "Run the Python files of the model folder with your permissions."
    )


class WarmStartConfig(Section):
    """The small Qwen3, Qwen3-MoE or Qwen3-VL that `model.source: recipe` builds and warm-starts."""

    num_layers: int = key(2, "Decoder layers.", ge=1, le=64)
    hidden_size: int = key(128, "Hidden size.", ge=16, le=8192)
    num_heads: int = key(4, "Attention heads.", ge=1, le=128)
    num_experts: int = key(
        0, "Experts of a layer, of which a token uses 4; 0 for a dense model.", ge=0, le=255
    )
    vision_size: int = key(
        0, "Hidden size of a vision tower, for pictures; 0 for a model of texts.", ge=0, le=8192
    )
    num_steps: int = key(
        600, "Supervised steps before reinforcement learning, at most.", ge=1, le=100_000
    )
    stop_accuracy: float = key(
        1.0,
        "Ends supervised steps once the model's own choice is right at all tokens of this share of "
        "the last 512 solutions.",
        gt=0,
        le=1,
    )
    batch_size: int = key(32, "Solutions per supervised step.", ge=1, le=65_536)
    learning_rate: float = key(3e-3, "Peak AdamW learning rate.", gt=0, le=1)

    @model_validator(mode="after")
    def _either_experts_or_tower(self) -> WarmStartConfig:
        if self.num_experts and self.vision_size:
            raise ValueError(
                f"model.recipe.num_experts={self.num_experts} and "
                f"model.recipe.vision_size={self.vision_size} are not built together; set one of "
                "them to 0"
            )
        if self.vision_size % (VISION_HEADS * 4):
            raise ValueError(
                f"model.recipe.vision_size={self.vision_size} is not a multiple of "
                f"{VISION_HEADS * 4}, as the tower's {VISION_HEADS} heads with two-dimensional "
                "rotations need"
            )
        return self
