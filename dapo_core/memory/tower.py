"""Derives the tensors of a vision tower from a model's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

Shape = tuple[int, ...]
# Models with a tower, and the text models that their language models are.
LANGUAGE_MODELS = {"qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe"}


@dataclass(frozen=True)
class TowerShape:
    """Sizes of a vision tower; a picture has patches, and one token for several."""

    hidden: int
    intermediate: int
    patches_per_token: int
    patch_values: int  # pixels of a patch, in all channels and times
    blocks: tuple[tuple[Shape, ...], ...]  # tensor shapes of each block
    root: tuple[Shape, ...]  # outside of blocks: embeddings of patches, mergers

    @property
    def shapes(self) -> list[Shape]:
        return [*self.root, *(shape for block in self.blocks for shape in block)]

    @property
    def num_parameters(self) -> int:
        return sum(map(prod, self.shapes))

    @property
    def block_values(self) -> int:
        """Values of a patch in a block: residuals, norms, queries, keys, values, and the MLP's."""
        return 8 * self.hidden + 3 * self.intermediate

    @property
    def token_values(self) -> int:
        """Values of a token's patches in a pass: pixels, and those of one block."""
        return self.patches_per_token * (self.patch_values + self.block_values)


def tower_of(config: Mapping[str, Any]) -> TowerShape | None:
    """Return the tower that config.json describes; None for a text model."""
    kind = str(config.get("model_type"))
    if kind not in LANGUAGE_MODELS:
        return None
    vision = config["vision_config"]
    text = config.get("text_config") or config  # of Qwen2.5-VL, older files have it at the top
    hidden, width, merge = (
        vision[name] for name in ("hidden_size", "intermediate_size", "spatial_merge_size")
    )
    merged, output = hidden * merge**2, text["hidden_size"]
    channels = vision.get("in_channels") or vision.get("in_chans") or 3
    patch = (channels, vision["temporal_patch_size"], *[vision["patch_size"]] * 2)
    merger: list[Shape] = [(merged, merged), (merged,), (output, merged), (output,)]
    attention: list[Shape] = [(3 * hidden, hidden), (3 * hidden,), (hidden, hidden), (hidden,)]
    if kind == "qwen2_5_vl":  # RMS norms and a gated MLP
        mlp: list[Shape] = [(width, hidden), (width,)] * 2 + [(hidden, width), (hidden,)]
        norms: list[Shape] = [(hidden,)] * 2
        root = [(hidden, *patch), (hidden,), *merger]
    else:  # layer norms, learned positions, and a merger for each layer that gets features
        mlp = [(width, hidden), (width,), (hidden, width), (hidden,)]
        norms = [(hidden,)] * 4
        deep = len(vision["deepstack_visual_indexes"])
        root = [(hidden, *patch), (hidden,), (vision["num_position_embeddings"], hidden)]
        root += [(hidden,)] * 2 + merger + ([(merged,)] * 2 + merger) * deep
    return TowerShape(
        hidden=hidden,
        intermediate=width,
        patches_per_token=merge**2,
        patch_values=prod(patch),
        blocks=((*attention, *mlp, *norms),) * vision["depth"],
        root=tuple(root),
    )
