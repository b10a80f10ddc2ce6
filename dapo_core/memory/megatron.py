"""Memory of a rank in verl's Megatron training by phase; docs/memory.md explains the formulas.

Assumes Megatron's mixed precision (bfloat16 weights, float32 gradients, a distributed optimizer
with a float32 copy and two moments) and equally loaded experts. Not verified on a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from dapo_core.memory.engine import longest_sequence
from dapo_core.memory.rank import layer_bytes

if TYPE_CHECKING:
    from dapo_core.config.train import TrainConfig
    from dapo_core.config.training import TrainingConfig
    from dapo_core.memory.shape import ModelShape
    from dapo_core.memory.splits import Splits

WEIGHT, GRADIENT, STATE = 2, 4, 12  # bytes per parameter; STATE: a float32 copy and two moments
# bytes per logit: bfloat16, float32 and exponentials; plus gradients
LOGITS_SCORED, LOGITS_TRAINED = 10, 14

Part = tuple[str, int, int]  # name, bytes on the device, bytes on the host


@dataclass(frozen=True)
class StageMemory:
    """Memory parts of a rank in one pipeline stage."""

    weights: int
    gradients: int
    optimizer: int
    host_optimizer: int  # optimizer state kept and stepped on the host
    reference: int
    scoring: int  # activations of a forward-only pass
    scoring_logits: int
    activations: int
    logits: int

    @property
    def peak(self) -> int:
        """Memory of the update with everything on the device."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits


def largest_stage(config: TrainingConfig, shape: ModelShape, splits: Splits) -> StageMemory:
    """Return the pipeline stage that needs the most memory for the update."""
    stages = splits.stages(len(shape.layers))
    first = [sum(stages[:number]) for number in range(len(stages))]
    found = [
        _stage(config, shape, splits, number, range(start, start + layers))
        for number, (start, layers) in enumerate(zip(first, stages, strict=True))
    ]
    return max(found, key=lambda stage: stage.peak)


def _stage(
    config: TrainingConfig, shape: ModelShape, splits: Splits, number: int, layers: range
) -> StageMemory:
    is_first, is_last = number == 0, number == splits.pipeline - 1
    dense, experts = 0, 0
    for layer in layers:
        for tensor in shape.layers[layer]:
            if len(tensor) == 3:
                experts += prod(tensor) // (splits.expert * splits.expert_tensor_size)
            elif len(tensor) == 2 and tensor[0] != shape.num_experts:
                dense += prod(tensor) // splits.tensor
            else:  # norms and the router are replicated
                dense += prod(tensor)
    table = shape.vocabulary * shape.hidden // splits.tensor
    dense += table * ((is_first or is_last) if shape.is_tied else is_first + is_last)
    states = STATE * (dense // (splits.data * splits.context) + experts // splits.expert_data)
    tokens = max(config.train.micro_batch_tokens, -(-longest_sequence(config) // splits.context))
    stream = WEIGHT * shape.hidden * tokens // splits.tensor  # split by sequence parallelism
    one_layer = tokens * layer_bytes(config, shape) // splits.tensor
    in_flight = splits.pipeline - number
    kept = len(layers) * (stream if splits.recomputes else one_layer) * in_flight
    vocabulary = shape.vocabulary // splits.tensor * tokens * is_last
    return StageMemory(
        weights=WEIGHT * (dense + experts),
        gradients=GRADIENT * (dense + experts),
        optimizer=int(states * (1 - splits.host_optimizer)),
        host_optimizer=int(states * splits.host_optimizer),
        reference=WEIGHT * (dense + experts) if config.algorithm.kl.place != "off" else 0,
        scoring=one_layer + stream,
        scoring_logits=vocabulary * LOGITS_SCORED,
        activations=kept + (one_layer if splits.recomputes else stream),
        logits=vocabulary * LOGITS_TRAINED,
    )


def parts_of(stage: StageMemory, train: TrainConfig, bucket: int, phase: str) -> Iterator[Part]:
    """Yield what a rank holds in a phase; what is not offloaded stays on the device."""
    on_weights = not train.offload_parameters or phase in ("anchor", "update", "publish")
    on_gradients = not train.offload_parameters or phase == "update"
    on_optimizer = not train.offload_optimizer or phase == "update"
    on_reference = not train.offload_parameters or phase == "anchor"
    for name, size, is_on in (
        ("weights", stage.weights, on_weights),
        ("optimizer", stage.optimizer, on_optimizer),
        ("reference model", stage.reference, on_reference),
    ):
        yield (name, size, 0) if is_on else (name, 0, size)
    yield "gradients", stage.gradients * on_gradients, 0  # dropped when offloading
    yield "optimizer on the host", 0, stage.host_optimizer
    if phase == "anchor":
        yield "activations", stage.scoring, 0
        yield "logits", stage.scoring_logits, 0
    elif phase == "update":
        yield "activations", stage.activations, 0
        yield "logits", stage.logits, 0
    elif phase == "publish":
        yield "weights being sent", 2 * bucket, 0
