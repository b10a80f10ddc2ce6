"""Check a model folder: complete, trainable, servable, its tokenizer renders the prompts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_core.errors import ConfigError
from dapo_core.memory.devices import describe_bytes
from dapo_core.model.folder import num_parameters, require_model_folder
from dapo_core.model.pretrained import load_model_config, load_tokenizer
from dapo_core.model.sampling import read_eos_ids, with_model_sampling
from dapo_core.policy.requirements import require_trainable
from tasks.config import ChainConfig
from tasks.preflight.finding import OK, Findings
from tasks.serve_model.checks import longest_sequence, require_whole_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ModelFacts:
    """Properties of a model that other checks need; None if they could not be read."""

    tokenizer: PreTrainedTokenizerBase | None = None
    positions: int | None = None
    vocabulary: int | None = None  # rows of the embedding
    token_bytes: int | None = None  # keys and values of one token, in 16 bits
    head_width: int | None = None
    parameters: int = 0


def check_model(folder: Path, config: ChainConfig, findings: Findings) -> ModelFacts:
    """Return the facts of a model folder; add what training, engines or servers would reject."""
    num_before = len(findings)
    with findings.catching("model"):
        require_model_folder(folder)
        require_whole_files(folder)
    if len(findings) > num_before:
        return ModelFacts()
    model_config, tokenizer = None, None
    with findings.catching("model"):
        model_config = load_model_config(folder, config.model.trust_remote_code)
        if config.train.backend == "own":
            require_trainable(model_config, config.train.sequence_parallel)
        _require_even_heads(model_config.get_text_config(), config)
        _require_parts(model_config.get_text_config(), config)
    with findings.catching("tokenizer"):
        template = config.model.chat_template  # a fetched folder already contains it
        is_fetched = template is None or folder != Path(str(config.model.path))
        tokenizer = load_tokenizer(
            folder, config.model.trust_remote_code, None if is_fetched else template
        )
        read_eos_ids(folder)
    with findings.catching("sampling"):
        with_model_sampling(config, folder)
    if model_config is None:
        return ModelFacts(tokenizer)
    text = model_config.get_text_config()
    weight_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if len(findings) == num_before:
        found = (
            f"{describe_bytes(weight_bytes)} of {model_config.model_type}, trainable; chat "
            "template present"
        )
        findings.add("model", OK, found)
    return ModelFacts(
        tokenizer,
        longest_sequence(model_config.to_dict()),
        getattr(text, "vocab_size", None),
        _token_bytes(text),
        _head_width(text),
        num_parameters(folder),
    )


def _require_even_heads(text: Any, config: ChainConfig) -> None:
    heads = getattr(text, "num_attention_heads", 0)
    sizes = {"rollout": config.rollout.tensor_parallel, "serve": config.serve.tensor_parallel}
    for section, size in sizes.items():
        if heads % size:
            raise ConfigError(
                f"{section}.tensor_parallel={size} does not divide the model's {heads} attention "
                f"heads; set it to a divisor of {heads}"
            )


def _require_parts(text: Any, config: ChainConfig) -> None:
    """Raise ConfigError for more pipeline stages than layers, or experts that do not exist."""
    layers, stages = getattr(text, "num_hidden_layers", 0), config.rollout.pipeline_parallel
    if layers and stages > layers:
        raise ConfigError(
            f"rollout.pipeline_parallel={stages} is more stages than the model's {layers} layers; "
            f"set it to {layers} or less"
        )
    experts = ("num_experts", "num_local_experts", "n_routed_experts")
    if config.rollout.expert_parallel and not any(getattr(text, name, None) for name in experts):
        raise ConfigError(
            f"rollout.expert_parallel=true, but {text.model_type} has no experts; set it to false"
        )


def _head_width(text: Any) -> int | None:
    heads, width = getattr(text, "num_attention_heads", None), getattr(text, "hidden_size", None)
    return getattr(text, "head_dim", None) or (width // heads if heads and width else None)


def _token_bytes(text: Any) -> int | None:
    layers = getattr(text, "num_hidden_layers", None)
    heads, head_width = getattr(text, "num_attention_heads", None), _head_width(text)
    if not (layers and heads and head_width):
        return None
    return 2 * layers * (getattr(text, "num_key_value_heads", None) or heads) * head_width * 2
