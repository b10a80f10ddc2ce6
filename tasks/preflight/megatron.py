"""Memory plans for another trainer's Megatron: check that its splits divide the model, propose
splits that fit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from dapo_core.errors import ConfigError
from dapo_core.memory.fitting import changed
from dapo_core.memory.plan import MemoryPlan, plan_memory
from dapo_core.memory.shape import ModelShape
from interop import ForeignConfigError
from interop.render.megatron import OPTIMIZER, PREFIX, Layers, Splits, require_divided, splits_of
from tasks.config import ChainConfig

MINDSPEED = "actor_config."
MAX_SIZE = 64  # of a parallel dimension; larger ones are for models beyond these recipes
# In verl's order: options that only cost time, then tensor (within a node), expert, pipeline and
# context.
_SWITCHES = ("train.gradient_checkpointing", "train.offload_parameters", "train.offload_optimizer")
_HOST_OPTIMIZER = (
    f"+{OPTIMIZER}optimizer_cpu_offload=True",
    f"+{OPTIMIZER}optimizer_offload_fraction=1.0",
)
_SIZES = {
    "tensor": f"{PREFIX}tensor_model_parallel_size",
    "expert": f"{PREFIX}expert_model_parallel_size",
    "pipeline": f"{PREFIX}pipeline_model_parallel_size",
    "context": "train.sequence_parallel",  # sets context_parallel_size
}

Step = tuple[str, ChainConfig, Splits]  # a change, and the recipe and splits with it


def splits_in(config: ChainConfig, shape: ModelShape) -> Splits | None:
    """Return the splits of verl's Megatron or of MindSpeed, None for FSDP2; ConfigError if they do
    not divide.
    """
    train, is_verl = config.train, config.train.backend == "verl"
    if train.backend == "own" or (is_verl and config.external.strategy != "megatron"):
        return None
    # MindSpeed uses verl's names in a section of its own.
    overrides = [each.replace(MINDSPEED, PREFIX, 1) for each in config.external.overrides]
    try:
        splits = splits_of(
            overrides, train.num_ranks, train.sequence_parallel, train.gradient_checkpointing
        )
        _require_divided(config, shape, splits)
    except ForeignConfigError as error:
        raise ConfigError(str(error)) from error
    return splits


def megatron_change(config: ChainConfig, shape: ModelShape, plan: MemoryPlan) -> str | None:
    """Describe the changes that make the plan fit, in the order of verl's advice; None if they are
    not enough.
    """
    splits = splits_in(config, shape)
    assert splits is not None
    taken: list[str] = []
    while (step := next(_changes(config, shape, splits, _engines_exceed(plan)), None)) is not None:
        change, config, splits = step
        plan = plan_memory(config, shape, plan.limit, (), splits)
        taken = [each for each in taken if each.partition("=")[0] != change.partition("=")[0]] + [
            change
        ]
        if not plan.shortages:
            keys = [f"--set {each}" for each in taken if each.startswith(("train.", "rollout."))]
            overrides = [each for each in taken if not each.startswith(("train.", "rollout."))]
            inside = [f"in external.overrides {', '.join(overrides)}"] * bool(overrides)
            return " and ".join([" ".join(keys)] * bool(keys) + inside)
    return None


def _engines_exceed(plan: MemoryPlan) -> bool:
    """True if the engines exceed the device: no sequence fits their cache, or the peak is not a
    rank's.
    """
    return plan.engine.num_sequences == 0 or plan.loads[0].phase not in ("anchor", "update")


def _changes(
    config: ChainConfig, shape: ModelShape, splits: Splits, engines_exceed: bool
) -> Iterator[Step]:
    """Yield changes that the recipe does not have yet, in order of preference."""
    for name in _SWITCHES:
        if not getattr(config.train, name.partition(".")[2]):
            recomputes = splits.recomputes or name == _SWITCHES[0]
            yield (
                f"{name}=true",
                changed(config, {name: True}),
                dataclasses.replace(splits, recomputes=recomputes),
            )
    if engines_exceed:
        yield from _engine_changes(config, splits)
    is_verl = config.train.backend == "verl"
    if is_verl and splits.host_optimizer < 1:
        yield ", ".join(_HOST_OPTIMIZER), config, dataclasses.replace(splits, host_optimizer=1.0)
    for name, key in _SIZES.items():
        size, most = getattr(splits, name), config.train.num_ranks // config.external.num_nodes
        while (size := 2 * size) <= (min(MAX_SIZE, most) if name == "tensor" else MAX_SIZE):
            larger = dataclasses.replace(splits, **{name: size})
            try:
                _require_divided(config, shape, larger)
            except ForeignConfigError:
                continue
            named = key if is_verl else key.replace(PREFIX, MINDSPEED)
            yield (
                f"{named}={size}",
                changed(config, {key: size} if key.startswith("train.") else {}),
                larger,
            )
            break


def _engine_changes(config: ChainConfig, splits: Splits) -> Iterator[Step]:
    """Spread each engine over twice the devices, so that each holds half of the weights."""
    workers, tensor = config.rollout.num_workers, config.rollout.tensor_parallel
    if workers % 2 == 0 and 2 * tensor <= MAX_SIZE:
        keys = {"rollout.tensor_parallel": 2 * tensor, "rollout.num_workers": workers // 2}
        yield (
            " --set ".join(f"{name}={size}" for name, size in keys.items()),
            changed(config, keys),
            splits,
        )


def _require_divided(config: ChainConfig, shape: ModelShape, splits: Splits) -> None:
    layers = Layers(len(shape.layers), shape.heads, shape.key_heads, shape.num_experts)
    require_divided(splits, layers, config.train.mini_prompts * config.rollout.group_size)
