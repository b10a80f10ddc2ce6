"""Checks that vLLM can serve a model folder, before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any, TypeGuard

from dapo_core.errors import ModelError
from dapo_core.model.folder import read_config, require_model_folder
from dapo_core.model.lora import full_model
from dapo_core.model.tensors import read_headers, require_generative
from tasks.config.serve import ServeConfig

_LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
)
_ALLOW_LONGER_VARIABLE = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"


def require_servable(
    model_path: str | Path,
    settings: ServeConfig,
    environment: Mapping[str, str],
    key: str = "model.path",
) -> None:
    """Raise ModelError if vLLM cannot serve the folder, or serve.max_model_len is too large for it.

    Of an adapter, its base model is checked. If serve.extra_args or
    VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 change the model's length, vLLM checks it instead. `key` is what
    sets the folder.
    """
    model_path = full_model(model_path)
    require_model_folder(model_path, key)
    require_generative(Path(model_path))
    read_headers(model_path)
    overrides = ("--hf-overrides", "--hf_overrides")
    is_overridden = any(word.startswith(overrides) for word in settings.extra_args)
    if is_overridden or environment.get(_ALLOW_LONGER_VARIABLE) == "1":
        return
    longest = longest_sequence(read_config(Path(model_path)))
    if longest is not None and settings.max_model_len > longest:
        raise ModelError(
            f"serve.max_model_len={settings.max_model_len} is above the {longest} positions of "
            f"{model_path} (config.json, with rope scaling): vLLM would refuse it; lower "
            "serve.max_model_len, and in a recipe also evaluate.max_response_tokens"
        )


def longest_sequence(config: Mapping[str, Any]) -> int | None:
    """An upper bound on the model's positions from config.json; None if it has no length.

    The bound is the longest length times the largest rope factor, because some configs state the
    length before scaling and some after. vLLM rejects lengths that pass here but are still too
    long.
    """
    nested = config.get("text_config")
    text = nested if isinstance(nested, dict) and nested else config
    lengths = [text[name] for name in _LENGTH_KEYS if _is_positive(text.get(name))]
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    sets = [rope, *rope.values()] if isinstance(rope, dict) else []  # one set, or one a layer type
    factors: list[Any] = [part.get("factor") for part in sets if isinstance(part, dict)]
    factor = max([1.0, *filter(_is_positive, factors)])
    return int(max(lengths) * factor) if lengths else None


def _is_positive(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and 0 < value < inf
