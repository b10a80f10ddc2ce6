"""Decoding with shared key heads against transformers' sdpa, which repeats them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from dapo_core.engines.decode_attention import decode_attention


@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize("num_key_heads", [1, 2, 4])
def test_decoding_equals_sdpa_with_repeated_key_heads(num_tokens: int, num_key_heads: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(3, 4, num_tokens, 8)
    key, value = torch.randn(2, 3, num_key_heads, 9, 8)
    is_read = torch.ones(3, 1, num_tokens, 9, dtype=torch.bool)
    is_read[1, ..., :5] = False  # a shorter row, padded on the left
    module: Any = SimpleNamespace(num_key_value_groups=4 // num_key_heads)
    for mask in (is_read, None):
        parts = (module, query, key, value, mask)
        expected, _ = sdpa_attention_forward(*parts, scaling=0.3)
        attended, _ = decode_attention(*parts, scaling=0.3)
        torch.testing.assert_close(attended, expected)
