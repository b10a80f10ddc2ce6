"""The fields of published models' config.json that the memory plan reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128}
_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "tie_word_embeddings",
)

_SMOLLM2 = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "tie_word_embeddings": True,
}

_TOWER_OF_QWEN3 = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
_TOWER_OF_QWEN25 = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}


def _qwen3(*values: int) -> dict[str, Any]:
    return {**_QWEN3, **dict(zip(_FIELDS, values, strict=True))}


def _qwen25(vocabulary: int, key_heads: int, *values: int) -> dict[str, Any]:
    family = {"model_type": "qwen2", "vocab_size": vocabulary, "num_key_value_heads": key_heads}
    return {**family, **dict(zip(_FIELDS, values, strict=True))}


def _qwen3_moe(expert_intermediate: int, *values: int) -> dict[str, Any]:
    return {
        **_qwen3(*values),
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": expert_intermediate,
        "decoder_sparse_step": 1,
    }


def _with_tower(kind: str, text: Mapping[str, Any], vision: Mapping[str, Any]) -> dict[str, Any]:
    text = {name: value for name, value in text.items() if name != "model_type"}
    return {
        "model_type": kind,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": text,
        "vision_config": {**vision, "out_hidden_size": text["hidden_size"]},
    }


# From the model hubs. Base models have the same configuration as their instruction-tuned variants.
PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, True),
    "Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, True),
    "Qwen3-4B": _qwen3(2560, 9728, 36, 32, True),
    "Qwen3-8B": _qwen3(4096, 12288, 36, 32, False),
    "Qwen3-14B": _qwen3(5120, 17408, 40, 40, False),
    "Qwen3-32B": _qwen3(5120, 25600, 64, 64, False),
    "Qwen3-30B-A3B": _qwen3_moe(768, 2048, 6144, 48, 32, False),
    "Qwen3-VL-30B-A3B": _with_tower(
        "qwen3_vl_moe", _qwen3_moe(768, 2048, 6144, 48, 32, False), _TOWER_OF_QWEN3
    ),
    "Qwen3-235B-A22B": _qwen3_moe(1536, 4096, 12288, 94, 64, False),
    "Qwen2.5-0.5B": _qwen25(151936, 2, 896, 4864, 24, 14, True),
    "Qwen2.5-1.5B": _qwen25(151936, 2, 1536, 8960, 28, 12, True),
    "Qwen2.5-3B": _qwen25(151936, 2, 2048, 11008, 36, 16, True),
    "Qwen2.5-7B": _qwen25(152064, 4, 3584, 18944, 28, 28, False),
    "Qwen2.5-14B": _qwen25(152064, 8, 5120, 13824, 48, 40, False),
    "Qwen2.5-32B": _qwen25(152064, 8, 5120, 27648, 64, 40, False),
    "Qwen2.5-72B": _qwen25(152064, 8, 8192, 29568, 80, 64, False),
    "SmolLM2-135M": _SMOLLM2,
    "Qwen2.5-VL-7B": _with_tower(
        "qwen2_5_vl", _qwen25(152064, 4, 3584, 18944, 28, 28, False), _TOWER_OF_QWEN25
    ),
}


def published_config(name: str) -> Mapping[str, Any] | None:
    """Return a published model's config.json by the last part of its id; None if unknown."""
    last = name.rstrip("/").rpartition("/")[2].lower()
    for suffix in ("-instruct", "-base", "-instruct-2507", "-thinking-2507"):
        last = last.removesuffix(suffix)
    return next((config for model, config in PUBLISHED.items() if model.lower() == last), None)
