"""What a policy needs: a model that can be trained on packed rows, and collectives that average."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dapo_core.errors import ConfigError, ModelError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

# transformers has no public way to ask for these, nor for _supports_attention_backend; test_packing.py fails when
# the names move.
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_AFTER_HEAD = (  # names of changes to the logits after the output head
    "final_logit_softcapping",
    "output_logit_soft_cap",
    "logits_soft_cap",
    "logits_scaling",
    "logit_scale",
    "lm_head_multiplier",
)


def require_trainable(model_config: PretrainedConfig, sequence_parallel: int) -> None:
    """Raise ModelError unless the policy can train the architecture.

    Attention must be replaceable in every layer, logits must come straight from the output head, and heads must
    divide over the sequence-parallel ranks.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    text_config = model_config.get_text_config()
    name = model_config.model_type
    if type(model_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = "reads images or sound too, and training takes text alone" if _is_multimodal(model_config) else ""
        raise ModelError(
            f"{name} {kind or 'is no causal language model of transformers'}; set model.path to a text model such "
            "as Qwen3"
        )
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(model_config)]
    others = set(getattr(text_config, "layer_types", None) or ()) - _LAYER_TYPES
    if others or not model_class._supports_attention_backend:
        why = f"has layers of type {', '.join(sorted(others))}" if others else "does not let attention be replaced"
        raise ModelError(
            f"{name} {why}, so its sequences cannot be packed into one row; set model.path to an architecture "
            "such as Qwen2, Qwen3, Qwen3-MoE or Llama"
        )
    changes = {key: value for key in _AFTER_HEAD if (value := getattr(text_config, key, None)) not in (None, 1)}
    if changes:
        raise ModelError(
            f"{name} changes logits after the output head ({', '.join(f'{k}={v}' for k, v in changes.items())}), "
            "which is not supported; set model.path to an architecture such as Qwen2, Qwen3, "
            "Qwen3-MoE or Llama"
        )
    if text_config.num_attention_heads % sequence_parallel:
        raise ModelError(
            f"{name} has {text_config.num_attention_heads} attention heads, which do not divide over "
            f"train.sequence_parallel={sequence_parallel} ranks; lower train.sequence_parallel"
        )


def require_averages(device: torch.device) -> None:
    """Raise ConfigError unless an averaged reduce-scatter of the ranks, which gradients go through, averages.

    gloo of torch 2.7.1 and 2.8.0 returns the sum without an error. Collective.
    """
    import torch
    from torch import distributed

    rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
    given = torch.full((num_ranks,), float(rank), device=device)
    average = torch.empty(1, device=device)
    # Newer versions of torch warn of the old name.
    reduce_scatter = getattr(distributed, "reduce_scatter_single", distributed.reduce_scatter_tensor)
    reduce_scatter(average, given, op=distributed.ReduceOp.AVG)
    expected = (num_ranks - 1) / 2
    if abs(average.item() - expected) > 1e-6 * num_ranks:
        raise ConfigError(
            f"torch {torch.__version__}: the average of 0 to {num_ranks - 1} over {num_ranks} ranks "
            f"({distributed.get_backend()}) is {average.item():g} in place of {expected:g}, so gradients would be "
            "wrong by that factor; install a version of torch from requirements/"
        )


def _is_multimodal(model_config: PretrainedConfig) -> bool:
    return any(hasattr(model_config, name) for name in ("vision_config", "audio_config", "thinker_config"))
