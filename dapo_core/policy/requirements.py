"""Requirements: a model that trains on packed rows, and a correct averaged reduce-scatter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_core.errors import ConfigError, ModelError
from dapo_core.memory.engine import longest_sequence
from dapo_core.model.lora import add_adapters
from dapo_core.model.names import expert_modules, is_gated, is_of_tower
from dapo_core.model.pretrained import empty_causal_lm, load_model_config, reads_pictures
from dapo_core.model.routers import ROUTERS, UNKNOWN_EXPERT, routers_of
from dapo_core.model.tensors import require_original_weights, require_same_tensors

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig

    from dapo_core.config.algorithm import AlgorithmConfig
    from dapo_core.config.train import LoraConfig
    from dapo_core.config.training import TrainingConfig

# transformers has no public API for these, nor for _supports_attention_backend; test_packing.py
# guards the names.
_READ_PICTURES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_AFTER_HEAD = (  # settings that modify logits after the output head
    "final_logit_softcapping",
    "output_logit_soft_cap",
    "logits_soft_cap",
    "logits_scaling",
    "logit_scale",
    "lm_head_multiplier",
)


def trainable_model(
    model_path: str | Path,
    sequence_parallel: int,
    expert_parallel: int,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
    lora: LoraConfig | None = None,
) -> nn.Module:
    """Build the folder's model with parameters on the meta device and real buffers.

    With `lora`, the model has adapters. Reads no weights. Raises ModelError unless the policy can
    train the model, and the folder has its tensors: seconds before any device is used.
    """
    headers = require_original_weights(Path(model_path))
    require_architecture(load_model_config(model_path, trust_remote_code), sequence_parallel)
    model = empty_causal_lm(model_path, dtype, trust_remote_code)
    require_same_tensors(model_path, model, headers)
    _require_even_experts(model, expert_parallel)
    if lora is not None and lora.rank:
        shapes = {name: header.shape for name, header in headers.items()}
        add_adapters(model, shapes, lora, on_meta=True)
    return model


def require_trainable(config: TrainingConfig, *paths: str | Path | None) -> None:
    """Raise ModelError unless the models in the folders can be trained; None is skipped."""
    train, trusted = config.train, config.model.trust_remote_code
    for path in paths:
        if path is not None:
            parallel = train.sequence_parallel, train.expert_parallel
            model = trainable_model(path, *parallel, None, trusted, train.lora)
            require_constant_rope(model.config, longest_sequence(config))  # type: ignore[arg-type]
            require_routers(model, config.algorithm)
            freeze(model, train.freeze)


def require_constant_rope(model_config: PretrainedConfig, longest: int) -> None:
    """Raise ModelError if sequences of up to `longest` tokens rotate others in their row."""
    rope = getattr(model_config.get_text_config(), "rope_parameters", None) or {}
    limit = rope.get("original_max_position_embeddings", longest)
    if rope.get("rope_type") == "longrope" and longest > limit:
        raise ModelError(
            f"{model_config.model_type} has other rotary positions (longrope) in a row with a "
            f"sequence of more than {limit} tokens, so that packed sequences affect each other, "
            f"and data.max_prompt_tokens + rollout.max_response_tokens = {longest}; lower them, or "
            "set model.path to another model"
        )


def require_routers(model: nn.Module, algorithm: AlgorithmConfig) -> None:
    """Raise ModelError if the algorithm needs routers, but none of the model can be recorded."""
    replay, coefficient = algorithm.routing_replay, algorithm.router_aux_loss_coefficient
    if replay == "off" and not coefficient:
        return
    key = f"routing_replay={replay}"
    if replay == "off":
        key = f"router_aux_loss_coefficient={coefficient}"
    routers = routers_of(model)
    if not routers:
        raise ModelError(
            f"algorithm.{key} needs a mixture of experts with routers of {', '.join(ROUTERS)}, but "
            f"{type(model).__name__} has none of them; remove the key"
        )
    if replay != "off" and routers[0].num_experts > UNKNOWN_EXPERT:
        raise ModelError(
            f"algorithm.{key} records experts as single bytes, for at most {UNKNOWN_EXPERT} "
            f"experts, but {type(model).__name__} has {routers[0].num_experts}; remove the key"
        )


def freeze(causal_lm: Any, parts: Sequence[str]) -> None:
    """Exclude parts (train.freeze) from training; raises ModelError if the model has none."""
    if not parts:
        return
    if not reads_pictures(causal_lm.config):
        raise ModelError(
            f"train.freeze=[{', '.join(parts)}], but {causal_lm.config.model_type} has no vision "
            "tower; remove the key"
        )
    for name, parameter in causal_lm.named_parameters():
        if is_of_tower(name):
            parameter.requires_grad_(False)


def require_architecture(model_config: PretrainedConfig, sequence_parallel: int) -> None:
    """Raise ModelError unless the policy can train the architecture.

    Attention must be replaceable in every layer, logits must come directly from the output head,
    and heads must divide evenly over the sequence-parallel ranks.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    text_config = model_config.get_text_config()
    name = model_config.model_type
    parts = ("vision_config", "audio_config", "thinker_config")
    is_multimodal = any(hasattr(model_config, part) for part in parts)
    mapping: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    if name in _READ_PICTURES and reads_pictures(model_config):
        mapping, is_multimodal = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, False
    if is_multimodal or type(model_config) not in mapping:
        reason = "is not a causal language model in transformers"
        if is_multimodal:
            reason = f"is multimodal, and training supports only {', '.join(_READ_PICTURES)}"
        raise ModelError(f"{name} {reason}; set model.path to one of these or to a text model")
    model_class: Any = mapping[type(model_config)]
    others = set(getattr(text_config, "layer_types", None) or ()) - _LAYER_TYPES
    if others or not model_class._supports_attention_backend:
        layers = f"has layers of type {', '.join(sorted(others))}" if others else ""
        raise ModelError(
            f"{name} {layers or 'does not support custom attention'}, so its sequences cannot be "
            "packed into one row; set model.path to an architecture such as Qwen2, Qwen3, "
            "Qwen3-MoE or Llama"
        )
    changes = {
        key: value
        for key in _AFTER_HEAD
        if (value := getattr(text_config, key, None)) not in (None, 1)
    }
    if changes:
        raise ModelError(
            f"{name} modifies logits after the output head "
            f"({', '.join(f'{k}={v}' for k, v in changes.items())}), which is not supported; set "
            "model.path to an architecture such as Qwen2, Qwen3, Qwen3-MoE or Llama"
        )
    named = model_config.architectures or [model_class.__name__]
    if model_class.__name__ not in named:
        raise ModelError(
            f"config.json names {', '.join(named)}, but transformers builds a "
            f"{model_class.__name__} from model_type {name}; correct architectures or model_type"
        )
    if text_config.num_attention_heads % sequence_parallel:
        raise ModelError(
            f"{name} has {text_config.num_attention_heads} attention heads, which do not divide "
            f"evenly over train.sequence_parallel={sequence_parallel} ranks; lower "
            "train.sequence_parallel"
        )


def _require_even_experts(model: nn.Module, expert_parallel: int) -> None:
    """Raise ModelError unless the experts of every layer divide evenly over the ranks."""
    if expert_parallel == 1:
        return
    name = model.config.model_type  # type: ignore[union-attr]
    modules = [each for each in expert_modules(model) if is_gated(each)]
    if not modules:
        raise ModelError(
            f"train.expert_parallel={expert_parallel}, but {name} has no experts that can be "
            "divided over ranks; set train.expert_parallel=1"
        )
    for count in {len(experts.gate_up_proj) for experts in modules}:
        if count % expert_parallel:
            divisors = [size for size in range(1, count + 1) if count % size == 0]
            raise ModelError(
                f"{name} has {count} experts in a layer, which do not divide evenly over "
                f"train.expert_parallel={expert_parallel} ranks; use one of {divisors}"
            )


def require_averages(device: torch.device) -> None:
    """Raise ConfigError unless an averaged reduce-scatter, as in FSDP2, really averages.

    gloo in torch 2.7.1 and 2.8.0 silently returns the sum. Collective.
    """
    import torch
    from torch import distributed

    rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
    values = torch.full((num_ranks,), float(rank), device=device)
    average = torch.empty(1, device=device)
    old = distributed.reduce_scatter_tensor  # deprecated in newer versions of torch
    reduce_scatter = getattr(distributed, "reduce_scatter_single", old)
    reduce_scatter(average, values, op=distributed.ReduceOp.AVG)
    expected = (num_ranks - 1) / 2
    if abs(average.item() - expected) > 1e-6 * num_ranks:
        raise ConfigError(
            f"torch {torch.__version__}: the average of 0 to {num_ranks - 1} over {num_ranks} "
            f"ranks ({distributed.get_backend()}) is {average.item():g} instead of {expected:g}, "
            "so gradients would be wrong by that factor; install a torch version from "
            "requirements/"
        )
