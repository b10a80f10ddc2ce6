"""Parallel sizes in verl's Megatron overrides, and what they must divide."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from dapo_core.errors import ConfigError

PREFIX = "actor_rollout_ref.actor.megatron."
TRANSFORMER = f"{PREFIX}override_transformer_config."
OPTIMIZER = "actor_rollout_ref.actor.optim.override_optimizer_config."
_PARTS = {
    "tensor": f"{PREFIX}tensor_model_parallel_size",
    "pipeline": f"{PREFIX}pipeline_model_parallel_size",
    "virtual": f"{PREFIX}virtual_pipeline_model_parallel_size",
    "context": f"{PREFIX}context_parallel_size",
    "expert": f"{PREFIX}expert_model_parallel_size",
    "expert_tensor": f"{PREFIX}expert_tensor_parallel_size",
    "first_layers": f"{TRANSFORMER}num_layers_in_first_pipeline_stage",
    "last_layers": f"{TRANSFORMER}num_layers_in_last_pipeline_stage",
    "counts_embedding": f"{TRANSFORMER}account_for_embedding_in_pipeline_split",
    "counts_loss": f"{TRANSFORMER}account_for_loss_in_pipeline_split",
}


@dataclass(frozen=True)
class Layers:
    """The model sizes that parallel sizes must divide."""

    layers: int
    heads: int
    key_heads: int
    experts: int  # per sparse layer; 0 for a dense model


@dataclass(frozen=True)
class Splits:
    """Megatron's parallel sizes, recomputation and optimizer offload."""

    devices: int
    tensor: int = 1
    pipeline: int = 1
    virtual: int | None = None  # model chunks per pipeline stage
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None  # None: same as tensor
    first_layers: int | None = None
    last_layers: int | None = None
    counts_embedding: bool = False
    counts_loss: bool = False
    recomputes: bool = False  # full recomputation of every layer
    host_optimizer: float = 0.0  # fraction of the optimizer on the host

    @property
    def data(self) -> int:
        """Data-parallel size."""
        return self.devices // (self.tensor * self.pipeline * self.context)

    @property
    def expert_tensor_size(self) -> int:
        """Tensor-parallel size of the experts."""
        return self.expert_tensor or self.tensor

    @property
    def expert_data(self) -> int:
        """Data-parallel size of the experts."""
        return self.devices // (self.pipeline * self.expert * self.expert_tensor_size)

    def stages(self, num_layers: int) -> list[int]:
        """Return the number of layers in each pipeline stage."""
        ends = {0: self.first_layers, self.pipeline - 1: self.last_layers}
        given = {stage: layers for stage, layers in ends.items() if layers and self.pipeline > 1}
        counted = {0: self.counts_embedding, self.pipeline - 1: self.counts_loss}
        if given:
            rest = (num_layers - sum(given.values())) // max(self.pipeline - len(given), 1)
            return [given.get(stage, rest) for stage in range(self.pipeline)]
        each = (num_layers + self.counts_embedding + self.counts_loss) // self.pipeline
        if self.pipeline == 1:
            return [num_layers]
        return [each - counted.get(stage, False) for stage in range(self.pipeline)]


def splits_of(overrides: Sequence[str], devices: int, context: int, recomputes: bool) -> Splits:
    """Read the parallel sizes in verl's overrides; the defaults are 1, `context`, `recomputes`.

    Raises ConfigError for an invalid size.
    """
    values = dict(map(_read, overrides))
    sizes: dict[str, Any] = {
        name: values[key] for name, key in _PARTS.items() if values.get(key) is not None
    }
    for name, size in sizes.items():
        least = 0 if name.endswith("_layers") or name.startswith("counts") else 1
        if not isinstance(size, int) or size < least:
            raise ConfigError(
                f"external.overrides: {_PARTS[name]}={size} is not a valid size; give an integer"
            )
    if f"{TRANSFORMER}recompute_granularity" in values:
        recomputes = values[f"{TRANSFORMER}recompute_granularity"] == "full"
    is_offloaded = values.get(f"{OPTIMIZER}optimizer_cpu_offload")
    share = values.get(f"{OPTIMIZER}optimizer_offload_fraction", 0) if is_offloaded else 0
    return Splits(
        **{"devices": devices, "context": context, **sizes},
        recomputes=recomputes,
        host_optimizer=float(share),
    )


def _read(text: str) -> tuple[str, Any]:
    key, _, value = text.lstrip("+").partition("=")
    return key, yaml.safe_load(value) if value else None


def require_divided(splits: Splits, model: Layers, responses: int) -> None:
    """Raise ConfigError for all that does not divide; `responses`: per optimizer step."""
    if found := list(_undivided(splits, model, responses)):
        raise ConfigError("\n".join(f"external.overrides: {each}" for each in found))


def _undivided(splits: Splits, model: Layers, responses: int) -> Iterator[str]:
    names = {name: key.removeprefix(PREFIX) for name, key in _PARTS.items()}
    tensor, pipeline, context = splits.tensor, splits.pipeline, splits.context
    devices = splits.devices
    for what, number in (("attention heads", model.heads), ("key heads", model.key_heads)):
        if number % tensor:
            yield (
                f"{names['tensor']}={tensor} does not divide the model's {number} {what}; "
                f"use one of {_divisors(number)}, or split the layers with {names['pipeline']}"
            )
    whole = tensor * pipeline * context
    if devices % whole:
        yield (
            f"{names['tensor']}={tensor} x {names['pipeline']}={pipeline} x "
            f"{names['context']}={context} = {whole} does not divide train.num_ranks={devices}"
        )
        return
    if responses % splits.data:
        yield (
            f"{responses} responses per optimizer step (train.mini_prompts x rollout.group_size) "
            f"cannot be split evenly over {splits.data} data-parallel ranks ({devices} / {whole}); "
            "change train.mini_prompts"
        )
    yield from _undivided_experts(splits, model, names)
    yield from _undivided_layers(splits, model, names)


def _undivided_experts(splits: Splits, model: Layers, names: Mapping[str, str]) -> Iterator[str]:
    if splits.expert > 1 and not model.experts:
        yield f"{names['expert']}={splits.expert}, but the model has no experts"
    elif model.experts and model.experts % splits.expert:
        yield (
            f"{names['expert']}={splits.expert} does not divide the model's {model.experts} "
            f"experts; use one of {_divisors(model.experts)}"
        )
    per_stage, size = splits.devices // splits.pipeline, splits.expert_tensor_size
    if per_stage % (splits.expert * size):
        yield (
            f"{names['expert']}={splits.expert} x {names['expert_tensor']}={size} = "
            f"{splits.expert * size} does not divide the {per_stage} devices of a pipeline stage; "
            f"set {names['expert_tensor']}=1 or change one"
        )


def _undivided_layers(splits: Splits, model: Layers, names: Mapping[str, str]) -> Iterator[str]:
    stages = splits.stages(model.layers)
    if sum(stages) != model.layers or min(stages) < 1:
        account = f"{names['counts_embedding']} and {names['counts_loss']}"
        yield (
            f"{names['pipeline']}={splits.pipeline} does not divide the model's {model.layers} "
            f"layers: stages are {stages}; set {account} if {model.layers} + 2 divides, or "
            f"{names['first_layers']} and {names['last_layers']}"
        )
    elif splits.virtual and (
        splits.pipeline == 1 or any(layers % splits.virtual for layers in stages)
    ):
        yield (
            f"{names['virtual']}={splits.virtual} needs several pipeline stages and must divide "
            f"the layers of each ({stages})"
        )


def _divisors(number: int) -> str:
    return ", ".join(str(size) for size in range(1, min(number, 64) + 1) if number % size == 0)
