"""Derives a model's tensors and their sizes from its config.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from dapo_core.errors import ModelError
from dapo_core.memory.tower import LANGUAGE_MODELS, Shape, TowerShape, tower_of

if TYPE_CHECKING:
    from dapo_core.config.train import LoraConfig

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
_ATTENTION_BIAS = ("qwen2",)  # has bias on queries, keys and values without a config key
_HEAD_NORMS = ("qwen3", "qwen3_moe")


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder: h hidden, a = heads x head_dim, k = key heads x head_dim, i: MLP."""

    hidden: int
    heads: int
    key_heads: int
    head_dim: int
    intermediate: int  # of a dense layer
    vocabulary: int
    is_tied: bool
    has_head_norms: bool
    num_experts: int  # of a sparse layer; 0 if dense
    experts_per_token: int
    expert_intermediate: int
    layers: tuple[tuple[Shape, ...], ...]  # tensor shapes of each layer as the policy holds them
    # embedding, last norm, unless tied the head, and what of a tower is outside of blocks
    root: tuple[Shape, ...]
    tower: TowerShape | None = None

    @property
    def num_parameters(self) -> int:
        """Number of parameters, tied ones counted once."""
        return count(self._shapes)

    @property
    def root_parameters(self) -> int:
        return count(self.root)

    @property
    def mlp_width(self) -> int:
        """Width of the MLPs that a token passes in a layer."""
        if self.num_experts:
            return self.experts_per_token * self.expert_intermediate
        return self.intermediate

    @property
    def largest_layer(self) -> int:
        """Number of parameters in the largest decoder layer."""
        return max(self.layer_sizes())

    @property
    def largest_tensor(self) -> int:
        """Elements of the largest tensor in files and engines, where experts are separate."""
        return max(prod(shape[-2:]) for shape in self._shapes)

    @property
    def largest_module(self) -> int:
        """Elements of an engine's largest module: a layer's experts, say, or the embedding."""
        experts = (count(shape for shape in layer if len(shape) == 3) for layer in self.layers)
        queries_keys_values = (self.heads + 2 * self.key_heads) * self.head_dim
        rows = max(self.vocabulary, 2 * self.intermediate, queries_keys_values)
        return max(rows * self.hidden, *experts)

    @property
    def _shapes(self) -> list[Shape]:
        return [*self.root, *(shape for layer in self._units for shape in layer)]

    @property
    def _units(self) -> tuple[tuple[Shape, ...], ...]:
        return (*self.layers, *(() if self.tower is None else self.tower.blocks))

    @property
    def tower_parameters(self) -> int:
        return 0 if self.tower is None else self.tower.num_parameters

    def adapter_parameters(self, lora: LoraConfig) -> int:
        """Return the elements of all LoRA adapters: rank x (rows + columns) of each matrix."""
        queries, keys = self.heads * self.head_dim, self.key_heads * self.head_dim
        hidden, width = self.hidden, self.intermediate
        sizes = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": queries}
        sizes |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), width)
        return lora.rank * len(self.layers) * sum(hidden + sizes.get(n, 0) for n in lora.targets)

    def layer_sizes(self, expert_parallel: int = 1) -> list[int]:
        """Return the parameters of each layer, with a rank's part of the experts."""
        return [
            sum(prod(shape) // _parts(shape, expert_parallel) for shape in layer)
            for layer in self.layers
        ]

    def shards(self, num_shards: int, expert_parallel: int = 1) -> list[int]:
        """Return the elements of each tensor's largest shard: FSDP2 splits rows like torch.chunk.

        Experts are first divided over `expert_parallel` ranks, then each part over the others.
        """
        return _shards(self._shapes, num_shards, expert_parallel)

    def tower_shards(self, num_shards: int) -> list[int]:
        """Return `shards` of the vision tower alone."""
        return [] if self.tower is None else _shards(self.tower.shapes, num_shards)

    def language_shards(self, num_shards: int, expert_parallel: int = 1) -> list[int]:
        """Return `shards` without those of the vision tower."""
        of_tower = 0 if self.tower is None else len(self.tower.root)
        shapes = [*self.root[: len(self.root) - of_tower]]
        shapes += [shape for layer in self.layers for shape in layer]
        return _shards(shapes, num_shards, expert_parallel)

    def engine_parameters(self, tensor_parallel: int, pipeline_parallel: int = 1) -> int:
        """Return the elements on an engine device in the largest pipeline stage.

        Heads, MLPs, experts and vocabulary are split, norms are replicated, and so are key heads if
        there are fewer than devices.
        """
        per_stage = -(-len(self.layers) // pipeline_parallel)
        keys = 2 * self.hidden * self.head_dim * max(self.key_heads // tensor_parallel, 1)
        split_keys = 2 * self.hidden * self.head_dim * self.key_heads // tensor_parallel
        layer = self.largest_layer // tensor_parallel + keys - split_keys
        matrices = 1 if self.is_tied or pipeline_parallel > 1 else 2
        vocabulary = matrices * self.vocabulary * self.hidden // tensor_parallel
        tower = self.tower_parameters // tensor_parallel  # in the first stage
        return per_stage * layer + vocabulary + self.hidden + tower

    def token_elements(self, tensor_parallel: int = 1, pipeline_parallel: int = 1) -> int:
        """Return the KV cache elements of one token on an engine device."""
        per_stage = -(-len(self.layers) // pipeline_parallel)
        return 2 * per_stage * self.head_dim * max(self.key_heads // tensor_parallel, 1)


def _shards(shapes: Iterable[Shape], num_shards: int, expert_parallel: int = 1) -> list[int]:
    sizes = []
    for shape in shapes:
        parts = _parts(shape, expert_parallel)
        rows = -(-(shape[0] // parts) // (num_shards // parts))
        sizes.append(rows * prod(shape[1:]))
    return sizes


def _parts(shape: Shape, expert_parallel: int) -> int:
    """Return the number of ranks that divide a tensor before FSDP2: only that of experts."""
    return expert_parallel if len(shape) == 3 else 1


def count(shapes: Iterable[Shape]) -> int:
    """Return the elements of all tensors."""
    return sum(map(prod, shapes))


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """Return the shape that config.json describes; raises ModelError for other architectures."""
    kind = str(config.get("model_type"))
    if kind not in MODEL_TYPES and kind not in LANGUAGE_MODELS:
        raise ModelError(
            f"memory cannot be estimated for model_type {kind} (only for "
            f"{', '.join([*MODEL_TYPES, *LANGUAGE_MODELS])}); training may still work"
        )
    try:
        shape = _shape(_text_config(config, kind), LANGUAGE_MODELS.get(kind, kind))
        if (tower := tower_of(config)) is not None:
            shape = replace(shape, tower=tower, root=(*shape.root, *tower.root))
        is_whole = bool(shape.layers) and shape.num_parameters > 0
    except KeyError as missing:
        raise ModelError(
            f"config.json has no {missing}, which the memory plan needs; fetch the model again"
        ) from None
    except (TypeError, ValueError, ZeroDivisionError):  # the file may contain anything
        is_whole = False
    if not is_whole:
        raise ModelError("config.json has sizes that are no whole numbers above 0; correct them")
    return shape


def _text_config(config: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Return the configuration of the language model alone."""
    if kind not in LANGUAGE_MODELS:
        return config
    text = config.get("text_config") or config
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    return {**text, "model_type": LANGUAGE_MODELS[kind], "tie_word_embeddings": tied}


def _shape(text: Mapping[str, Any], kind: str) -> ModelShape:
    hidden, heads, width = text["hidden_size"], text["num_attention_heads"], text["vocab_size"]
    shape = ModelShape(
        hidden=hidden,
        heads=heads,
        key_heads=text.get("num_key_value_heads") or heads,
        head_dim=text.get("head_dim") or hidden // heads,
        intermediate=text["intermediate_size"],
        vocabulary=width,
        is_tied=bool(text.get("tie_word_embeddings", False)),
        has_head_norms=kind in _HEAD_NORMS,
        num_experts=int(text.get("num_experts") or text.get("num_local_experts") or 0),
        experts_per_token=text.get("num_experts_per_tok") or 0,
        expert_intermediate=text.get("moe_intermediate_size") or 0,
        layers=(),
        root=(),
    )
    layers = tuple(_layer(shape, text, number) for number in range(text["num_hidden_layers"]))
    head: tuple[Shape, ...] = () if shape.is_tied else ((width, hidden),)
    return replace(shape, layers=layers, root=((width, hidden), (hidden,), *head))


def _layer(shape: ModelShape, text: Mapping[str, Any], number: int) -> tuple[Shape, ...]:
    hidden, queries = shape.hidden, shape.heads * shape.head_dim
    keys = shape.key_heads * shape.head_dim
    tensors: list[Shape] = [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)]
    if text["model_type"] in _ATTENTION_BIAS or text.get("attention_bias"):
        tensors += [(queries,), (keys,), (keys,)]
        if text["model_type"] not in _ATTENTION_BIAS:
            tensors.append((hidden,))
    if shape.has_head_norms:
        tensors += [(shape.head_dim,)] * 2
    tensors += [(hidden,)] * 2  # norms
    if _is_sparse(shape, text, number):
        experts, width = shape.num_experts, shape.expert_intermediate
        return (*tensors, (experts, hidden), (experts, 2 * width, hidden), (experts, hidden, width))
    width = shape.intermediate
    tensors += [(width, hidden), (width, hidden), (hidden, width)]
    return tuple(tensors + ([(width,), (width,), (hidden,)] if text.get("mlp_bias") else []))


def _is_sparse(shape: ModelShape, text: Mapping[str, Any], number: int) -> bool:
    if not shape.num_experts or number in (text.get("mlp_only_layers") or ()):
        return False
    return (number + 1) % int(text.get("decoder_sparse_step") or 1) == 0
