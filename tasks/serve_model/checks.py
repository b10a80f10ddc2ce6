"""Reasons why vLLM would refuse a model folder, found before it starts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dapo_core.config.training import PromptsConfig, RolloutConfig
from dapo_core.errors import ModelError
from dapo_core.model_folder import INDEX_FILE, require_model_folder, weight_files
from tasks.serve_model.config import ServeConfig

# vLLM 0.32, transformers_utils/model_arch_config_convertor.py: the smallest of these that is set counts.
_LENGTH_KEYS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_target_positions",
    "max_sequence_length", "max_seq_length", "seq_len",
)  # fmt: skip
# Rope types whose max_position_embeddings is already scaled; the others are scaled by their factor.
_SCALED_TYPES = frozenset({"su", "longrope", "llama3", "deepseek_llama_scaling"})
_YARN_TYPES = frozenset({"yarn", "deepseek_yarn"})
_ALLOW_LONGER_VARIABLE = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"


def require_servable(model_path: str | Path, settings: ServeConfig, environment: Mapping[str, str]) -> None:
    """Raise ModelError for an incomplete or truncated folder, or for a length that the model has no positions for.

    A length beyond the model's is left to vLLM where serve.extra_args or VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 change
    the model's own.
    """
    require_model_folder(model_path)
    _require_whole_files(Path(model_path))
    is_overridden = any(word.startswith(("--hf-overrides", "--hf_overrides")) for word in settings.extra_args)
    if is_overridden or environment.get(_ALLOW_LONGER_VARIABLE) == "1":
        return
    longest = longest_sequence(_read_config(Path(model_path)))
    if longest is not None and settings.max_model_len > longest:
        raise ModelError(
            f"serve.max_model_len={settings.max_model_len} is above the {longest} positions of {model_path} "
            "(config.json, rope scaling counted): vLLM would refuse it; lower serve.max_model_len, and in a "
            "recipe evaluate.max_response_tokens with it"
        )


def require_positions(model_path: str | Path, data: PromptsConfig, rollout: RolloutConfig) -> None:
    """Raise ModelError when prompt and response of a rollout may be longer than the model has positions for."""
    require_model_folder(model_path)
    longest = longest_sequence(_read_config(Path(model_path)))
    needed = data.max_prompt_tokens + rollout.max_response_tokens
    if longest is not None and needed > longest:
        raise ModelError(
            f"data.max_prompt_tokens + rollout.max_response_tokens = {data.max_prompt_tokens} + "
            f"{rollout.max_response_tokens} is above the {longest} positions of {model_path} (config.json, rope "
            "scaling counted): no engine could roll out so much; lower them, and with them "
            "reward.overlong.buffer_tokens, evaluate.max_response_tokens and serve.max_model_len, which are "
            "checked next"
        )


def longest_sequence(config: Mapping[str, Any]) -> int | None:
    """Number of positions of a model with this config.json; None when it does not say.

    vLLM's rule (`_get_and_verify_max_len`), lenient where its versions differ: YaRN may come with the original or
    the scaled max_position_embeddings, and the larger reading counts.
    """
    text = config.get("text_config") or config
    lengths = [text[name] for name in _LENGTH_KEYS if text.get(name) is not None]
    # Command-R's key replaces the others; any model may set it above them.
    longest = text.get("model_max_length") or min(lengths, default=None)
    if longest is None:
        return None
    if "gemma3" in str(config.get("model_type")):  # its length is already scaled
        return int(longest)
    scaled = [_scaled(longest, rope) for rope in _ropes(text)]
    return int(max(scaled, default=longest))


def _ropes(text: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Rope parameters under their new or old name; nested ones have a set per layer type."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    nested = [part for part in rope.values() if isinstance(part, dict)]
    yield from nested or [rope]


def _scaled(length: float, rope: Mapping[str, Any]) -> float:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    factor = rope.get("factor") or 1.0
    if kind in _YARN_TYPES:
        return max(length, factor * (rope.get("original_max_position_embeddings") or length))
    return length if kind in _SCALED_TYPES else length * factor


def _require_whole_files(folder: Path) -> None:
    from safetensors import SafetensorError, safe_open

    has_index = (folder / INDEX_FILE).is_file()
    for path in sorted(set(weight_files(folder).values()) if has_index else folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="numpy"):  # compares the size with the header's
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{path} is not a whole safetensors file ({error}; {path.stat().st_size} bytes); fetch the model "
                "again, or name a complete folder"
            ) from None


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{folder / 'config.json'} is not JSON ({error}); fetch the model again") from None
    if not isinstance(config, dict):
        raise ModelError(f"{folder / 'config.json'} holds no model configuration; fetch the model again")
    return config
