"""FLOPs of an update, and model FLOPs utilization (MFU)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from dapo_core.machine.device import peak_flops
from dapo_core.memory.shape import shape_of
from dapo_core.memory.tower import LANGUAGE_MODELS, tower_of

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    from dapo_core.algorithm.batch import Batch
    from dapo_core.config.train import LoraConfig
    from dapo_core.memory.shape import ModelShape

logger = logging.getLogger(__name__)

MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")
Grid = tuple[int, int, int]  # patches of a picture in time, height and width


def training_flops(
    config: PretrainedConfig, lengths: np.ndarray, num_logits: int, num_adapted: int = 0
) -> float | None:
    """Return the FLOPs of a forward and backward pass over sequences of `lengths` [B].

    Counts matrix products, with two operations per multiply-add: projections, the MLP (or the
    router and a token's experts), causal attention, and the output head at `num_logits` positions.
    Recomputation by gradient checkpointing does not count (model FLOPs, PaLM, arXiv:2204.02311,
    appendix B). With `num_adapted` parameters of LoRA adapters, the others have no gradients, which
    saves a third of their products. None for an unknown architecture.
    """
    kind = LANGUAGE_MODELS.get(config.model_type, config.model_type)
    has_windows = getattr(config.get_text_config(), "use_sliding_window", False)
    if kind not in MODEL_TYPES or has_windows:
        return None
    lengths = np.asarray(lengths, dtype=np.float64)
    tokens, squares = float(lengths.sum()), float((lengths**2).sum())
    weights, attention = _products(shape_of(config.to_dict()), tokens, squares, num_logits)
    frozen = 2 if num_adapted else 3  # forward, inputs' gradients, and unless frozen the weights'
    return 2 * (frozen * weights + 3 * (attention + num_adapted * tokens))


def forward_flops(shape: ModelShape, tokens: float, squares: float, num_logits: float) -> float:
    """Return the FLOPs of a forward pass, counted like training_flops.

    `squares` is the sum of squared sequence lengths; `num_logits` the number of positions with
    logits.
    """
    return 2 * sum(_products(shape, tokens, squares, num_logits))


def active_parameters(shape: ModelShape) -> int:
    """Return the layer parameters that a token is multiplied with, counting only its experts."""
    matrices = [tensor for layer in shape.layers for tensor in layer if len(tensor) > 1]
    return sum(
        shape.experts_per_token * prod(tensor[1:]) if len(tensor) == 3 else prod(tensor)
        for tensor in matrices
    )


def _products(
    shape: ModelShape, tokens: float, squares: float, num_logits: float
) -> tuple[float, float]:
    """Return the multiply-adds of a forward pass with weights, and those of attention."""
    pairs = (squares + tokens) / 2  # of query and key
    width = 2 * shape.heads * shape.head_dim  # multiply-adds per pair: its score, its value's share
    head = shape.vocabulary * shape.hidden * num_logits
    return active_parameters(shape) * tokens + head, len(shape.layers) * width * pairs


def tower_flops(config: PretrainedConfig, grids: Sequence[Grid], is_trained: bool) -> float:
    """Return the FLOPs of a pass of the vision tower over pictures; only forward if frozen.

    Counted like training_flops. Attention is over a whole picture, or over a window in the blocks
    of Qwen2.5-VL that have windows.
    """
    tower = tower_of(config.to_dict())
    if tower is None or not grids:
        return 0.0
    vision: Any = config.vision_config
    patches = np.array([time * height * width for time, height, width in grids], np.float64)
    weights = [sum(prod(each) for each in block if len(each) > 1) for block in tower.blocks]
    per_patch = sum(weights) + tower.hidden * tower.patch_values
    mergers = sum(
        prod(shape) for shape in tower.root if len(shape) == 2 and shape[1] > tower.hidden
    )
    whole = getattr(vision, "fullatt_block_indexes", range(len(tower.blocks)))
    window = (getattr(vision, "window_size", 0) // vision.patch_size) ** 2
    pairs = len(whole) * (patches**2).sum()
    pairs += (len(tower.blocks) - len(whole)) * (patches * np.minimum(patches, window)).sum()
    products = per_patch * patches.sum() + mergers * patches.sum() / tower.patches_per_token
    return float(2 * (3 if is_trained else 1) * (products + 2 * tower.hidden * pairs))


class ActorUtilization:
    """Computes perf/mfu/actor; if the peak or the FLOPs are unknown, logs the reason once."""

    def __init__(
        self,
        config: PretrainedConfig,
        device_name: str,
        dtype: torch.dtype,
        num_devices: int,
        lora: LoraConfig | None = None,
        trains_tower: bool = True,
    ) -> None:
        import torch

        self.config = config
        self.trains_tower = trains_tower and not (lora is not None and lora.rank)
        self.num_adapted = 0
        self.peak: float | None = None  # FLOP/s of all devices
        peak = peak_flops(device_name)
        if peak is None:
            missing = f"the peak FLOP rate of {device_name} is unknown"
        elif dtype != torch.bfloat16:
            missing = f"peak FLOP rates are known for bfloat16, but the policy computes in {dtype}"
        elif training_flops(config, np.ones(1), 1) is None:
            missing = f"the FLOPs of architecture {config.model_type} as configured are unknown"
        else:
            self.peak = peak * num_devices
            if lora is not None and lora.rank:
                self.num_adapted = shape_of(config.to_dict()).adapter_parameters(lora)
            return
        logger.info("%s, so perf/mfu/actor is not reported", missing)

    def metrics(self, batch: Batch, seconds: float, num_passes: int = 1) -> dict[str, float]:
        """Return perf/mfu/actor of passes that took `seconds`; {} if unknown.

        A prompt that siblings share counts once.
        """
        if self.peak is None:
            return {}
        num_logits = int(batch.response_lengths.sum())
        flops = training_flops(self.config, batch.lengths, num_logits, self.num_adapted)
        repeats = batch.prompt_owners != np.arange(batch.num_responses)
        repeated = batch.prompt_lengths.numpy()[repeats]
        saved = training_flops(self.config, repeated, 0, self.num_adapted)
        assert flops is not None, "the constructor leaves peak unset for such an architecture"
        assert saved is not None, "likewise"
        flops -= saved
        shown = {image.digest: image.grid_thw for images in batch.images or () for image in images}
        flops += tower_flops(self.config, [*shown.values()], self.trains_tower)
        return {"perf/mfu/actor": num_passes * flops / (seconds * self.peak)}
