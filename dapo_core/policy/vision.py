"""The vision tower of a model that reads pictures, in the forward pass of a packed row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dapo_core.policy.attention import PACKED_ATTENTION

if TYPE_CHECKING:
    from dapo_core.policy.packing import PackedRow


class Tower:
    """Computes the decoder's inputs of a model with a vision tower.

    FSDP2 gathers the tower's blocks collectively, so every rank runs the tower in every pass: on a
    blank picture, multiplied by 0, if its row has none.
    """

    def __init__(self, causal_lm: Any) -> None:
        causal_lm.set_attn_implementation(
            {"text_config": PACKED_ATTENTION, "vision_config": "sdpa"}
        )
        self._base = causal_lm.base_model

    def inputs(self, row: PackedRow) -> dict[str, Any]:
        """Return the arguments of the decoder for the row's tokens."""
        embeddings = self._base.get_input_embeddings()(row.token_ids)
        features = self._features(*self._blank_picture(embeddings.device))
        return {"inputs_embeds": embeddings + 0 * sum(each.sum() for each in features)}

    def _features(self, pixels: torch.Tensor, grids: torch.Tensor) -> list[torch.Tensor]:
        """Return the features [tokens, hidden] of pictures for the embeddings, then for layers.

        A frozen tower computes without gradients, and so without keeping activations.
        """
        is_trained = next(self._base.visual.parameters()).requires_grad
        with torch.set_grad_enabled(is_trained and torch.is_grad_enabled()):
            output = self._base.get_image_features(pixels, grids, return_dict=True)
        deep = getattr(output, "deepstack_features", None) or []
        return [torch.cat([*parts]) for parts in (output.pooler_output, *deep)]

    def _blank_picture(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return pixels [patches, values] and grid of the smallest picture: one token."""
        config = self._base.config.vision_config
        size = config.spatial_merge_size
        values = config.in_channels * config.temporal_patch_size * config.patch_size**2
        pixels = torch.zeros(size**2, values, device=device)
        return pixels, torch.tensor([[1, size, size]], device=device)
