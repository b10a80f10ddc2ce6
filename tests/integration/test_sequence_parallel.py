"""Ulysses over gloo: ranks with slices of a row compute the same as one rank with the whole row."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from dapo_core.algorithm.batch import Batch
from dapo_core.policy.attention import sequence_group
from dapo_core.policy.log_probs import TokenLogProbs
from dapo_core.policy.packing import pack
from tests.batches import random_batch
from tests.ranks import run_ranks

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}


def _model(family: str, num_heads: int, num_key_heads: int) -> TokenLogProbs:
    torch.manual_seed(7)
    window = {"sliding_window": 5} if family == "mistral" else {}
    heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_key_heads}
    config = AutoConfig.for_model(family, **SIZES, **window, **heads)
    return TokenLogProbs(
        AutoModelForCausalLM.from_config(config, dtype=torch.float32), chunk_tokens=8
    )


def _whole_and_slice(rank: int, *case: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return _slice(*case, 1), _slice(*case, dist.get_world_size())


def _slice(
    family: str, num_heads: int, num_key_heads: int, batch: Batch, sequence_parallel: int
) -> dict[str, Any]:
    """Return this rank's log-probs and their cells, and gradients summed over the row's ranks."""
    model = _model(family, num_heads, num_key_heads)
    if sequence_parallel > 1:
        model.causal_lm.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    row = pack(batch, torch.device("cpu"), sequence_group(sequence_parallel))
    log_probs, entropy = model.train()(row, 0.7, True)
    weights = batch.old_log_probs.flatten()[row.cells]
    (weights * log_probs + entropy).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.causal_lm.named_parameters()}
    for gradient in gradients.values() if sequence_parallel > 1 else ():
        dist.all_reduce(gradient)
    return {
        "log_probs": log_probs.detach(),
        "cells": row.cells,
        "num_tokens": row.token_ids.numel(),
        "gradients": gradients,
    }


@pytest.mark.parametrize(
    ("family", "num_heads", "num_key_heads", "sequence_parallel"),
    [
        ("qwen2", 4, 2, 2),  # a key head for each rank
        ("qwen2", 4, 1, 2),  # fewer key heads than ranks
        ("llama", 4, 2, 4),
        ("mistral", 4, 4, 4),  # with a window of 5 tokens
    ],
)
def test_sequence_parallel_ranks_compute_the_same_as_one_rank(
    family: str, num_heads: int, num_key_heads: int, sequence_parallel: int
) -> None:
    batch = random_batch(num_groups=3, group_size=3, seed=5)
    weights = torch.linspace(-1, 2, batch.response_mask.numel()).view_as(batch.rollout_log_probs)
    batch = replace(batch, old_log_probs=weights)
    assert len(set(batch.prompt_owners)) == 3  # each group shares its prompt
    (whole, *_), ranks = zip(
        *run_ranks(sequence_parallel, _whole_and_slice, family, num_heads, num_key_heads, batch),
        strict=True,
    )
    assert {rank["num_tokens"] for rank in ranks} == {-(-whole["num_tokens"] // sequence_parallel)}
    # the rank with a shared prompt's last token computes the first token of each response to it
    cells, order = torch.cat([rank["cells"] for rank in ranks]).sort()
    assert torch.equal(cells, whole["cells"])
    log_probs = torch.cat([rank["log_probs"] for rank in ranks])[order]
    torch.testing.assert_close(log_probs, whole["log_probs"], rtol=1e-5, atol=1e-5)
    for name, gradient in whole["gradients"].items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(
            ranks[0]["gradients"][name], gradient, rtol=1e-4, atol=1e-5 * scale
        )
