"""Attention of one new token per row to its cache, without copying key heads.

With a mask, transformers' `sdpa` repeats keys and values for every query head that shares them, at
each token, which takes a third of a decode step on a CPU. Here the query heads of a key head are
computed as if they were consecutive tokens, which read the same keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

DECODE_ATTENTION = "decode"  # name in transformers' registries


def decode_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """[N, n, H, D] from queries [N, H, n, D], keys and values [N, H / g, L, D], as `sdpa` does.

    attention_mask: [N, 1, n, L], True where a token reads a key; None: it reads all before it.
    """
    num_sharing = query.shape[1] // key.shape[1]
    if query.shape[2] > 1 or num_sharing == 1 or options.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    sharing = query.squeeze(2).unflatten(1, (-1, num_sharing))  # [N, H / g, g, D]
    attended = F.scaled_dot_product_attention(
        sharing, key, value, attn_mask=attention_mask, scale=options.get("scaling")
    )
    return attended.flatten(1, 2).unsqueeze(1), None


AttentionInterface.register(DECODE_ATTENTION, decode_attention)
AttentionMaskInterface.register(DECODE_ATTENTION, sdpa_mask)
