"""A model folder of the demo's kind whose response lengths follow a given distribution.

Its layers add nothing: attention and MLP end in zero matrices, so they take their full time and the
next token depends on the last one alone. After the prompt the model draws a length n with the given
probability, and then counts down: token n, token n - 1, ..., token 1, end. Any engine that samples
at temperature 1 gets these lengths, but for a miscount in thousands of tokens; nothing is forced
from outside.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from dapo_core.config.warm_start import WarmStartConfig
from dapo_core.demo.recipe_model import recipe_config
from dapo_core.demo.warm_start import MAX_POSITIONS, train_tokenizer

# Logits of the token that counts down and of a length that is not drawn; others are about 0.
SHARPNESS, NEVER = 24.0, -24.0
SIZES = WarmStartConfig(num_layers=3, hidden_size=256, num_heads=8)  # 2.6 million parameters


def write_counting_model(rows: list[dict[str, Any]], chances: Sequence[float], folder: Path) -> int:
    """Write the folder; `chances[n - 1]` is the chance of n tokens. Returns its parameters."""
    tokenizer = train_tokenizer(rows, reads_pictures=False)
    tokenizer.save_pretrained(folder)
    text = tokenizer.apply_chat_template(
        rows[0]["prompt"], add_generation_prompt=True, tokenize=False
    )
    first = tokenizer.encode(text, add_special_tokens=False)[-1]  # a prompt's last token
    outside = {first, *tokenizer.all_special_ids}
    counted = [token for token in range(len(tokenizer)) if token not in outside]
    # by the number of tokens that are left, itself included
    order = [int(tokenizer.eos_token_id), *counted]
    if len(chances) > len(order):
        raise SystemExit(f"{len(chances)} tokens are too many to count: at most {len(order)}")
    config = AutoConfig.for_model(
        **{**recipe_config(SIZES), "tie_word_embeddings": False},
        max_position_embeddings=MAX_POSITIONS,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    _count_down(model, first, order, chances)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
def _count_down(model: Any, first: int, order: Sequence[int], chances: Sequence[float]) -> None:
    """Set the weights. `order[n - 1]` is the token with n - 1 more tokens to come."""
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    size = embedding.shape[1]
    # Rows of norm sqrt(size), which the last RMSNorm keeps. Dimension 0 marks a prompt's end.
    embedding.normal_()
    embedding[:, 0] = 0
    embedding[first] = 0
    embedding[first, 0] = 1
    embedding *= math.sqrt(size) / embedding.norm(dim=1, keepdim=True)
    head.zero_()
    for token, previous in itertools.pairwise(order):
        head[token] = embedding[previous] * SHARPNESS / size
    head[:, 0] = NEVER / math.sqrt(size)
    for token, chance in zip(order, chances, strict=False):
        head[token, 0] = max(math.log(chance) if chance else NEVER, NEVER) / math.sqrt(size)
