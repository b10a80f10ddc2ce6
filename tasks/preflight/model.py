"""Check a model folder: complete, trainable, servable, its tokenizer renders the prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from dapo_core.errors import ConfigError
from dapo_core.memory.devices import describe_bytes
from dapo_core.memory.shape import count
from dapo_core.model.folder import weight_paths
from dapo_core.model.lora import adapter_shapes
from dapo_core.model.pretrained import load_model_config, load_tokenizer, model_errors
from dapo_core.model.sampling import read_eos_ids, with_model_sampling
from dapo_core.model.tensors import num_elements, require_original_weights
from dapo_core.policy.requirements import require_trainable
from tasks.config import ChainConfig
from tasks.fetched_model import stop_ids
from tasks.preflight.finding import OK, WARN, Findings
from tasks.serve_model.checks import longest_sequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANSWER = "It is forty-two."  # in the probe of the chat template


@dataclass(frozen=True)
class ModelFacts:
    """Properties of a model that other checks need; None if they could not be read."""

    tokenizer: PreTrainedTokenizerBase | None = None
    positions: int | None = None
    vocabulary: int | None = None  # rows of the embedding
    token_bytes: int | None = None  # keys and values of one token, in 16 bits
    head_width: int | None = None
    parameters: int = 0
    num_adapted: int = 0  # parameters of train.lora's adapters
    num_bytes: int = 0  # of the weight files
    model_type: str = ""


def check_model(folder: Path, config: ChainConfig, findings: Findings) -> ModelFacts:
    """Return the facts of a model folder; add what training, engines or servers would reject."""
    num_before = len(findings)
    facts = ModelFacts()
    with findings.catching("model"):
        facts = _read_facts(folder, config)
    if len(findings) > num_before:
        return facts
    with findings.catching("tokenizer"):
        template = config.model.chat_template  # a fetched folder already contains it
        is_fetched = template is None or folder != Path(str(config.model.path))
        trusted = config.model.trust_remote_code
        tokenizer = load_tokenizer(folder, trusted, None if is_fetched else template)
        read_eos_ids(folder)
        facts = replace(facts, tokenizer=tokenizer)
    with findings.catching("sampling"):
        with_model_sampling(config, folder)
    if len(findings) == num_before:
        found = f"{describe_bytes(facts.num_bytes)} of {facts.model_type}, trainable"
        findings.add("model", OK, f"{found}; chat template present")
        _warn_of_copies(folder, findings)
    if facts.tokenizer is not None:
        with findings.catching("tokenizer"):
            _check_turn_end(facts.tokenizer, folder, config, findings)
    return facts


def _check_turn_end(
    tokenizer: PreTrainedTokenizerBase, folder: Path, config: ChainConfig, findings: Findings
) -> None:
    """Warn if responses do not end at the token with which the chat template ends a turn."""
    ids = {*read_eos_ids(folder), *stop_ids(tokenizer, config.model.stop_tokens)}
    end = turn_end(tokenizer, config.rollout.chat_template_kwargs)
    if end is None or end in ids:
        return
    token, *stops = map(str, tokenizer.convert_ids_to_tokens([end, *sorted(ids)]))
    findings.add(
        "tokenizer",
        WARN,
        f"the chat template ends a turn with {token}, but a response ends only with "
        f"{' or '.join(stops)} (eos_token_id in generation_config.json, else config.json): in "
        "training, serving and evaluation, responses would run past it to the length limit",
        f"set model.stop_tokens=['{token}']",
    )


def turn_end(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> int | None:
    """Return the first special token after an assistant's message; None if there is none."""
    messages = [{"role": "user", "content": "6 x 7?"}, {"role": "assistant", "content": ANSWER}]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, **arguments))
    except (jinja2.TemplateError, TypeError, ValueError):
        return None  # it takes no assistant's message
    _, answer, rest = text.rpartition(ANSWER)
    special = {*tokenizer.get_added_vocab().values(), *tokenizer.all_special_ids}
    ids = tokenizer(rest, add_special_tokens=False).input_ids if answer else []
    return next((token_id for token_id in ids if token_id in special), None)


def _read_facts(folder: Path, config: ChainConfig) -> ModelFacts:
    """Return the facts of config.json and the weights' headers.

    Raises ModelError or ConfigError for what training, engines or servers would reject.
    """
    if not config.is_adopted:
        require_trainable(config, folder)
    headers, lora = require_original_weights(folder), config.train.lora
    shapes = {name: header.shape for name, header in headers.items()}
    model_config = load_model_config(folder, config.model.trust_remote_code)
    with model_errors(folder, "has a config.json with values that training cannot use"):
        text = model_config.get_text_config()
        _require_even_heads(text, config)
        _require_parts(text, config)
        return ModelFacts(
            positions=longest_sequence(model_config.to_dict()),
            vocabulary=getattr(text, "vocab_size", None),
            token_bytes=_token_bytes(text),
            head_width=_head_width(text),
            parameters=num_elements(headers),
            num_adapted=count(adapter_shapes(shapes, lora).values()) if lora.rank else 0,
            num_bytes=sum(path.stat().st_size for path in weight_paths(folder)),
            model_type=model_config.model_type,
        )


def _warn_of_copies(folder: Path, findings: Findings) -> None:
    """Warn of weights that training does not read and that vLLM may."""
    others = {*folder.glob("*.safetensors")} - {*weight_paths(folder)}
    if others:
        names = ", ".join(sorted(path.name for path in others)[:3])
        found = f"{folder} holds {names} beside the weights that training reads"
        findings.add("model", WARN, found, "move it elsewhere, since vLLM may load it instead")


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
