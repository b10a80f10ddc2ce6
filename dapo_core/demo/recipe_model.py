"""Sizes of the model that `model.source: recipe` builds, for warm_start.py and the memory plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dapo_core.config.warm_start import VISION_HEADS

if TYPE_CHECKING:
    from dapo_core.config.warm_start import WarmStartConfig

VOCAB_SIZE, HEAD_DIM = 512, 32
EXPERTS_PER_TOKEN = 4
EXPERT_SIZE = 64  # vLLM pads narrower experts on a CPU, and cannot reload them
PATCH, MERGE = 8, 2  # pixels of a patch's side, and patches of a token's
GRID = 8  # learned positions of a picture's side
ROPE_SECTIONS = [8, 4, 4]  # of half a head: time, height, width


def recipe_config(recipe: WarmStartConfig) -> dict[str, Any]:
    """Return the model sizes by their names in the config.json of a Qwen3, -MoE or -VL."""
    experts = {
        "num_experts": recipe.num_experts,
        "num_experts_per_tok": min(EXPERTS_PER_TOKEN, recipe.num_experts),
        "moe_intermediate_size": EXPERT_SIZE,
        "norm_topk_prob": True,
    }
    text = {
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
    return _with_tower(text, recipe.vision_size) if recipe.vision_size else text


def _with_tower(text: dict[str, Any], size: int) -> dict[str, Any]:
    """Return the sizes of a Qwen3-VL: the tower's first block also feeds the first layer."""
    return {
        "model_type": "qwen3_vl",
        "text_config": {**text, "model_type": "qwen3_vl_text"},
        "vision_config": {
            "depth": 2,
            "hidden_size": size,
            "intermediate_size": 2 * size,
            "num_heads": VISION_HEADS,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "num_position_embeddings": GRID**2,
            "deepstack_visual_indexes": [0],
            "out_hidden_size": text["hidden_size"],
        },
        "tie_word_embeddings": True,
    }
