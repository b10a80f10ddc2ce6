"""Sizes of the model that `model.source: recipe` builds, for warm_start.py and the memory plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dapo_core.config.warm_start import WarmStartConfig

VOCAB_SIZE, HEAD_DIM = 512, 32
EXPERTS_PER_TOKEN = 4
EXPERT_SIZE = 64  # vLLM pads narrower experts on a CPU, and cannot reload them


def recipe_config(recipe: WarmStartConfig) -> dict[str, Any]:
    """Return the model sizes by their names in the config.json of a Qwen3 or Qwen3-MoE."""
    experts = {
        "num_experts": recipe.num_experts,
        "num_experts_per_tok": min(EXPERTS_PER_TOKEN, recipe.num_experts),
        "moe_intermediate_size": EXPERT_SIZE,
        "norm_topk_prob": True,
    }
    return {
        "model_type": "qwen3_moe" if recipe.num_experts else "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": recipe.hidden_size,
        "intermediate_size": 3 * recipe.hidden_size,
        "num_hidden_layers": recipe.num_layers,
        "num_attention_heads": recipe.num_heads,
        "num_key_value_heads": recipe.num_heads // (1 if recipe.num_heads % 2 else 2),
        "head_dim": HEAD_DIM,
        "tie_word_embeddings": True,
        **(experts if recipe.num_experts else {}),
    }
