"""Reads the splits of another trainer's Megatron and checks that they divide the model."""

from __future__ import annotations

from dapo_core.memory.shape import ModelShape
from dapo_core.memory.splits import PREFIX, Layers, Splits, require_divided, splits_of
from tasks.config import ChainConfig

MINDSPEED = "actor_config."


def splits_in(config: ChainConfig, shape: ModelShape) -> Splits | None:
    """Return the splits of verl's Megatron or of MindSpeed, None for FSDP2.

    Raises ConfigError if they do not divide the model.
    """
    train, is_verl = config.train, config.train.backend == "verl"
    if train.backend == "own" or (is_verl and config.external.strategy != "megatron"):
        return None
    # MindSpeed uses verl's names in a section of its own.
    overrides = [each.replace(MINDSPEED, PREFIX, 1) for each in config.external.overrides]
    splits = splits_of(
        overrides, train.num_ranks, train.sequence_parallel, train.gradient_checkpointing
    )
    _require_divided(config, shape, splits)
    return splits


def _require_divided(config: ChainConfig, shape: ModelShape, splits: Splits) -> None:
    layers = Layers(len(shape.layers), shape.heads, shape.key_heads, shape.num_experts)
    require_divided(splits, layers, config.train.mini_prompts * config.rollout.group_size)
