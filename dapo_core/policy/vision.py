"""The vision tower of a model that reads pictures, in the forward pass of a packed row."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dapo_core.model.inputs import ImageReference
from dapo_core.model.pictures import ImageProcessor

if TYPE_CHECKING:
    from dapo_core.policy.packing import PackedRow


class Tower:
    """Computes the decoder's inputs of a model with a vision tower.

    FSDP2 gathers the tower's blocks collectively, so every rank runs the tower in every pass: on a
    blank picture, multiplied by 0, if its row has none. Ranks with slices of a row run it on all
    pictures of the row.
    """

    def __init__(self, causal_lm: Any, model_path: str | Path) -> None:
        self._base = causal_lm.base_model
        self._model_path = model_path

    def inputs(self, row: PackedRow) -> dict[str, Any]:
        """Return the arguments of the decoder for the row's tokens."""
        embeddings = self._base.get_input_embeddings()(row.token_ids)
        shown, device = row.pictures, embeddings.device
        pixels, grids = self._pixels(shown.images)
        features = self._features(pixels.to(device), grids.to(device))
        embeddings = embeddings + 0 * sum(each.sum() for each in features)
        if not len(shown.tokens):
            return {"inputs_embeds": embeddings}
        first, *deep = (each[shown.features].to(embeddings.dtype) for each in features)
        inputs = {"inputs_embeds": embeddings.index_copy(1, shown.tokens, first.unsqueeze(0))}
        if deep:  # added to the outputs of the first layers
            mask = torch.zeros_like(row.token_ids, dtype=torch.bool)
            mask[:, shown.tokens] = True
            inputs |= {"visual_pos_masks": mask, "deepstack_visual_embeds": deep}
        return inputs

    @cached_property
    def _processor(self) -> ImageProcessor:
        return ImageProcessor(self._model_path)

    def _features(self, pixels: torch.Tensor, grids: torch.Tensor) -> list[torch.Tensor]:
        """Return the features [tokens, hidden] of pictures for the embeddings, then for layers.

        A frozen tower computes without gradients, and so without keeping activations.
        """
        is_trained = next(self._base.visual.parameters()).requires_grad
        with torch.set_grad_enabled(is_trained and torch.is_grad_enabled()):
            output = self._base.get_image_features(pixels, grids, return_dict=True)
        parts = [output.pooler_output, *(getattr(output, "deepstack_features", None) or [])]
        # by picture, or whole in transformers 5.5
        return [each if isinstance(each, torch.Tensor) else torch.cat(each) for each in parts]

    def _pixels(self, images: Sequence[ImageReference]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return patches [sum of patches, values] and grids [images, 3].

        Without images, those of a blank picture of one token.
        """
        if images:
            return self._processor.pixels(images)
        config = self._base.config.vision_config
        size = config.spatial_merge_size
        values = config.in_channels * config.temporal_patch_size * config.patch_size**2
        return torch.zeros(size**2, values), torch.tensor([[1, size, size]])
