"""FLOPs of an update, and model FLOPs utilization (MFU)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dapo_core.machine.device import peak_flops
from dapo_core.memory.shape import shape_of
from dapo_core.memory.tower import LANGUAGE_MODELS, tower_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from dapo_core.algorithm.batch import Batch
    from dapo_core.config.train import LoraConfig

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
    if config.model_type in LANGUAGE_MODELS:
        config = config.text_config
    if kind not in MODEL_TYPES or getattr(config, "use_sliding_window", False):
        return None
    lengths = np.asarray(lengths, dtype=np.float64)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    projections = config.hidden_size * head_dim * (2 * num_heads + 2 * num_kv_heads)
    weights = sum(
        projections + _mlp_weights(config, layer) for layer in range(config.num_hidden_layers)
    )
    attended = (lengths * (lengths + 1) / 2).sum()  # (query, key) pairs
    width = 2 * num_heads * head_dim  # multiply-adds per pair: its score, its share of the value
    attention = config.num_hidden_layers * width * attended
    head = config.vocab_size * config.hidden_size * num_logits
    frozen = 2 if num_adapted else 3  # forward, inputs' gradients, and unless frozen the weights'
    products = frozen * (weights * lengths.sum() + head)
    return float(2 * (products + 3 * (attention + num_adapted * lengths.sum())))


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


def _mlp_weights(config: PretrainedConfig, layer: int) -> int:
    """Return the weights per token in the gated MLP, or in the router and active experts."""
    if not _is_sparse(config, layer):
        return 3 * config.hidden_size * config.intermediate_size
    experts = config.num_experts_per_tok * 3 * config.hidden_size * config.moe_intermediate_size
    return config.hidden_size * config.num_experts + experts


def _is_sparse(config: PretrainedConfig, layer: int) -> bool:
    if not getattr(config, "num_experts", 0) or layer in config.mlp_only_layers:
        return False
    return (layer + 1) % config.decoder_sparse_step == 0


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
        """Return perf/mfu/actor of passes that took `seconds`; {} if unknown."""
        if self.peak is None:
            return {}
        num_logits = int(batch.response_lengths.sum())
        flops = training_flops(self.config, batch.lengths, num_logits, self.num_adapted)
        assert flops is not None, "the constructor leaves peak unset for such an architecture"
        shown = {image.digest: image.grid_thw for images in batch.images or () for image in images}
        flops += tower_flops(self.config, [*shown.values()], self.trains_tower)
        return {"perf/mfu/actor": num_passes * flops / (seconds * self.peak)}
