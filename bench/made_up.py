"""Model folders without values and batches of equal sequences, to measure a policy rank."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PretrainedConfig

from dapo_core.algorithm.balance import RankShare
from dapo_core.algorithm.batch import Batch
from dapo_core.model.names import match_files
from dapo_core.model.pretrained import empty_causal_lm

NUM_TOKEN_IDS = 64  # the smallest vocabulary that a model may have


def write_model_folder(model_config: PretrainedConfig, folder: Path) -> None:
    """Write a model folder whose weights have the true headers and a hole for values."""
    folder.mkdir(parents=True, exist_ok=True)
    model_config.save_pretrained(folder)
    model = empty_causal_lm(folder, torch.bfloat16)
    model_config.architectures = [type(model).__name__]
    model_config.save_pretrained(folder)
    end, header, weights = 0, {}, dict(model.named_parameters())
    for name, shape in match_files(weights, weights)[0].items():
        begin, end = end, end + weights[name].nbytes
        header[name] = {"dtype": "BF16", "shape": [*shape], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(file.tell() + end)
    write_tokenizer(folder)


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of one token, so that engines start."""
    Tokenizer(WordLevel({"?": 0}, unk_token="?")).save(str(folder / "tokenizer.json"))


def rows(num_prompt_tokens: int, num_response_tokens: int, num_rows: int) -> RankShare:
    """Build a rank's share of equal sequences of random tokens, one per micro-batch."""
    length = num_prompt_tokens + num_response_tokens
    generator = torch.Generator().manual_seed(0)
    values = torch.zeros(num_rows, num_response_tokens)
    batch = Batch(
        token_ids=torch.randint(NUM_TOKEN_IDS, (num_rows, length), generator=generator),
        prompt_lengths=torch.full((num_rows,), num_prompt_tokens),
        response_lengths=torch.full((num_rows,), num_response_tokens),
        response_mask=torch.ones_like(values, dtype=torch.bool),
        group_ids=torch.arange(num_rows),
        rewards=torch.zeros(num_rows, dtype=torch.float64),
        is_scored=torch.zeros(num_rows, dtype=torch.bool),
        rollout_log_probs=values,
        is_stale=torch.zeros_like(values, dtype=torch.bool),
        advantages=torch.randn(num_rows, generator=generator),
        old_log_probs=values,
    )
    return RankShare(batch, [np.array([number]) for number in range(num_rows)])
