"""Compares an update on siblings that share their prompt's tokens with one on whole sequences.

    .venv/bin/python bench/shared_prompts.py [--layers 6] [--groups 1] [--size 8]

The model has random weights in bfloat16, of SmolLM2-135M's widths. Both get the same responses: in
the second batch, no two are siblings. They take turns; the table has the least CPU time of a
forward and a backward pass with recomputation, and the difference of all gradients, relative to
their norm.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dapo_core.algorithm.batch import Batch
from dapo_core.policy.log_probs import TokenLogProbs
from dapo_core.policy.packing import pack

TURNS = 3
VOCABULARY = 49152
# prompt and response tokens: of SmolLM2's sums; a picture and a short proof; a response three times
# as long as its prompt, beyond which no prompt is shared
LENGTHS = ((110, 8), (300, 100), (100, 300))


def main() -> None:
    """Print one row for each pair of lengths."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("layers", 6), ("groups", 1), ("size", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    sizes = parser.parse_args()
    model = _model(sizes.layers)
    print(
        "| prompt + response tokens | tokens, whole | shared | whole s | shared s | ratio "
        "| difference |\n|---|---|---|---|---|---|---|"
    )
    for lengths in LENGTHS:
        shared = _batch(sizes.groups, sizes.size, *lengths)
        whole = replace(shared, group_ids=torch.arange(shared.num_responses))
        batches = {"whole": whole, "shared": shared}
        seconds = dict.fromkeys(batches, float("inf"))
        gradients = {}
        for name in [*batches] * TURNS:
            found, gradients[name] = _measure(model, batches[name])
            seconds[name] = min(seconds[name], found)
        difference = (gradients["whole"] - gradients["shared"]).norm() / gradients["whole"].norm()
        tokens = [pack(each, torch.device("cpu")).token_ids.numel() for each in batches.values()]
        print(
            f"| {lengths[0]} + {lengths[1]} | {tokens[0]:,} | {tokens[1]:,} | "
            f"{seconds['whole']:.2f} | {seconds['shared']:.2f} | "
            f"{seconds['whole'] / seconds['shared']:.2f} | {difference:.1e} |",
            flush=True,
        )


def _model(num_layers: int) -> TokenLogProbs:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=VOCABULARY,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=num_layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    causal_lm = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return TokenLogProbs(causal_lm, chunk_tokens=128).train()


def _batch(num_groups: int, group_size: int, num_prompt: int, num_response: int) -> Batch:
    draw = np.random.default_rng(0)
    prompts = draw.integers(VOCABULARY, size=(num_groups, num_prompt)).repeat(group_size, axis=0)
    responses = draw.integers(VOCABULARY, size=(len(prompts), num_response))
    values = torch.zeros(responses.shape)
    return Batch(
        token_ids=torch.from_numpy(np.concatenate([prompts, responses], axis=1)),
        prompt_lengths=torch.full((len(prompts),), num_prompt),
        response_lengths=torch.full((len(prompts),), num_response),
        response_mask=torch.ones_like(values, dtype=torch.bool),
        group_ids=torch.arange(num_groups).repeat_interleave(group_size),
        rewards=torch.zeros(len(prompts), dtype=torch.float64),
        is_scored=torch.ones(len(prompts), dtype=torch.bool),
        rollout_log_probs=values,
        is_stale=torch.zeros_like(values, dtype=torch.bool),
        advantages=torch.zeros(len(prompts)),
    )


def _measure(model: TokenLogProbs, batch: Batch) -> tuple[float, torch.Tensor]:
    """Return the CPU seconds of a forward and a backward pass, and all gradients as one vector."""
    model.zero_grad()
    row = pack(batch, torch.device("cpu"))
    began = time.process_time()
    log_probs, _ = model(row, 1.0, False)
    weights = torch.linspace(-1, 1, batch.response_mask.numel())[row.cells]
    (weights * log_probs).sum().backward()
    seconds = time.process_time() - began
    found = [each.grad.flatten().float() for each in model.parameters() if each.grad is not None]
    return seconds, torch.cat(found)


if __name__ == "__main__":
    main()
