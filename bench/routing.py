"""Compares policy and engine on a tiny mixture of experts, with and without routing replay.

    python bench/routing.py

An engine (vLLM, in this process) samples responses from a random mixture and records its routing.
Policies of the same weights compute their log-probs with their own routing and with the engine's
(R3). After a change of all weights, as an update makes it, the ratio's spread is measured with the
routing that the policy then has, and with that before (R2). Half a minute on one core.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from dapo_core.algorithm.batch import Batch, build_batch
from dapo_core.draw.groups import Group, Rollout
from dapo_core.draw.prompts import Prompt
from dapo_core.engines.base import Engine, EngineSettings, GenerationRequest, Response
from dapo_core.engines.factory import build_engine
from dapo_core.model.inputs import ModelInput
from dapo_core.policy.log_probs import TokenLogProbs
from dapo_core.policy.packing import pack

NUM_PROMPTS, GROUP_SIZE, RESPONSE_TOKENS = 4, 4, 48
RELATIVE_CHANGE = 0.01  # of the mean size of a weight
MODEL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "initializer_range": 0.1,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
}
HEADER = "| engine, policy | routed alike | mean abs d | max abs d | k3 |\n|---|---|---|---|---|"


def build_model(folder: Path) -> None:
    """Save a random mixture."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**MODEL, dtype="float32")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def sample(folder: Path, dtype: str) -> Batch:
    """Return responses of an engine in `dtype`, with its routing."""
    settings = EngineSettings(
        dtype=dtype,
        max_model_tokens=128,
        max_response_tokens=RESPONSE_TOKENS,
        max_num_seqs=NUM_PROMPTS * GROUP_SIZE,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        memory_bytes=1 << 27,
        memory_utilization=0.5,
        threads=1,
        records_routing=True,
    )
    prompts = [
        ModelInput(tuple(5 + (7 * number + 3 * place) % 250 for place in range(40 + number)))
        for number in range(NUM_PROMPTS)
    ]
    engine = build_engine("vllm", folder, settings, seed=0)
    responses = _finish(engine, prompts)
    engine.close()
    groups = [
        Group(
            number,
            Prompt(number, prompt, "none", ""),
            [_rollout(responses[f"{number}/{each}"]) for each in range(GROUP_SIZE)],
        )
        for number, prompt in enumerate(prompts)
    ]
    return build_batch(groups, mask_truncated=False)


def _finish(engine: Engine, prompts: Sequence[ModelInput]) -> dict[str, Response]:
    engine.submit(
        [
            GenerationRequest(f"{number}/{each}", prompt, 100 * number + each)
            for number, prompt in enumerate(prompts)
            for each in range(GROUP_SIZE)
        ]
    )
    found: dict[str, Response] = {}
    while engine.num_unfinished():
        found |= {response.request_id: response for response in engine.step()}
    return found


def _rollout(response: Response) -> Rollout:
    return Rollout(
        response.response_ids,
        response.rollout_log_probs,
        response.finish_reason,
        score=1.0,
        overlong_penalty=0.0,
        verdict="right",
        acc=1.0,
        versions=[(0, len(response.response_ids))],
        routing=response.routing,
    )


@torch.no_grad()
def log_probs(model: TokenLogProbs, batch: Batch) -> tuple[torch.Tensor, list[np.ndarray]]:
    """Return the log-probs of the response tokens, and the experts used."""
    row = pack(batch, torch.device("cpu"))
    values, _ = model(row, 1.0, False)
    return values, model.routing.read(row, batch.lengths)


def compare(folder: Path, engine_dtype: str, policy_dtype: str) -> list[str]:
    """Return the lines of one engine and policy: own routing, R3, and the ratio with R2."""
    batch = sample(folder, engine_dtype)
    assert batch.routing is not None
    causal_lm = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, policy_dtype))
    model = TokenLogProbs(causal_lm, chunk_tokens=512).eval()
    sampled = batch.rollout_log_probs[batch.is_response]
    own, own_routing = log_probs(model, replace(batch, routing=None))
    pairs = zip(own_routing, batch.routing, strict=True)
    alike = [np.equal(np.sort(a[:-1]), np.sort(b[:-1])).all(axis=-1) for a, b in pairs]
    name, share = f"{engine_dtype}, {policy_dtype}", float(np.concatenate(alike).mean())
    replayed, _ = log_probs(model, batch)
    lines = [
        f"| {name}: {kind} | {routed:.1%} | {_differences(values - sampled)} |"
        for kind, routed, values in (("own routing", share, own), ("R3", 1.0, replayed))
    ]
    draw = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        change = torch.randn(parameter.shape, generator=draw).to(parameter.dtype)
        parameter.data.add_(change * RELATIVE_CHANGE * parameter.data.abs().mean())
    spread = [
        float((log_probs(model, replace(batch, routing=routing))[0] - own).exp().std())
        for routing in (None, own_routing)
    ]
    text = f"{name}: std of the ratio after a change of {RELATIVE_CHANGE:.0%}: "
    return [*lines, text + f"own routing {spread[0]:.3f}, R2 {spread[1]:.3f}"]


def _differences(difference: torch.Tensor) -> str:
    k3 = (difference.exp() - 1 - difference).mean()
    return f"{difference.abs().mean():.1e} | {difference.abs().max():.1e} | {k3:.1e}"


def main() -> None:
    """Print one table for each pair of precisions."""
    with tempfile.TemporaryDirectory() as folder:
        build_model(Path(folder))
        results = [
            compare(Path(folder), engine, policy)
            for engine, policy in (
                ("float32", "float32"),
                ("bfloat16", "bfloat16"),
                ("bfloat16", "float32"),
            )
        ]
    print(HEADER)
    for *lines, _ in results:
        print("\n".join(lines))
    print("\n" + "\n".join(text for *_, text in results))


if __name__ == "__main__":
    main()
