"""Real FSDP2 ranks over gloo: log-probs, gradients and weights do not depend on how the work is split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from dapo_core.batch import Batch, split_batch
from dapo_core.config import AlgorithmConfig, TrainConfig
from dapo_core.errors import ModelError
from dapo_core.loss import LossTokens, LossTotals, policy_loss
from dapo_core.policy import Policy, load_causal_lm
from tests.batches import random_batch
from tests.ranks import run_ranks
from tests.tiny_models import build_tiny_qwen3

TRAIN = TrainConfig(train_prompts=6, mini_prompts=6, learning_rate=1e-2, warmup_steps=0, weight_decay=0.0)
TEMPERATURE = 0.8


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    build_tiny_qwen3(folder, seed=3, tie_word_embeddings=request.param)
    return folder


def _update(rank: int, model_path: Path, batch: Batch, num_ranks: int, max_tokens: int) -> dict[str, Any]:
    """Anchor, then one update: log-probs before, sums, norm, and weights after."""
    policy = Policy(model_path, TRAIN, AlgorithmConfig(), TEMPERATURE)
    shares, indices = split_batch(batch, num_ranks, max_tokens)
    log_probs, entropy = policy.log_probs(shares[rank])
    totals = LossTotals(batch.num_loss_tokens, batch.num_loss_responses)
    sums = policy.update(shares[rank], totals)
    names = list(policy.weight_sizes())
    return {
        "indices": indices[rank],
        "log_probs": log_probs,
        "entropy": entropy,
        "sums": sums,
        "weights": policy.gather_weights(names),
    }


def _reference(model_path: Path, batch: Batch) -> dict[str, Any]:
    """The same update written plainly: one process, one sequence at a time, no FSDP."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=TRAIN.learning_rate, weight_decay=0.0)
    log_probs = torch.zeros(batch.response_mask.shape)
    entropy = torch.zeros(batch.response_mask.shape)
    for row in range(batch.num_responses):
        start, count = int(batch.prompt_lengths[row]), int(batch.response_lengths[row])
        ids = batch.token_ids[row, : start + count]
        logits = model(input_ids=ids.unsqueeze(0)).logits[0, start - 1 : -1] / TEMPERATURE
        rows = torch.nn.functional.pad(
            logits.log_softmax(-1).gather(1, ids[start:].unsqueeze(-1)).squeeze(-1),
            (0, batch.response_mask.shape[1] - count),
        )
        log_probs[row] = rows
        entropy[row, :count] = torch.distributions.Categorical(logits=logits).entropy().detach()
    totals = LossTotals(batch.num_loss_tokens, batch.num_loss_responses)
    tokens = LossTokens(
        old_log_probs=batch.old_log_probs,
        advantages=batch.advantages.unsqueeze(-1).expand_as(log_probs),
        response_mask=batch.response_mask,
        weights=totals.token_weights(batch.response_mask, AlgorithmConfig()),
    )
    loss = policy_loss(log_probs, None, tokens, AlgorithmConfig()).loss
    loss.backward()
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), TRAIN.max_grad_norm)
    optimizer.step()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {
        "log_probs": log_probs.detach(),
        "entropy": entropy,
        "loss": loss.item(),
        "norm": grad_norm.item(),
        "weights": weights,
    }


@pytest.mark.parametrize(("num_ranks", "max_tokens"), [(1, 4096), (1, 24), (2, 64), (3, 30)])
def test_update_equals_the_plain_single_process_update(model_path: Path, num_ranks: int, max_tokens: int) -> None:
    batch = random_batch(num_groups=6, group_size=3, seed=1)
    old = torch.rand(batch.response_mask.shape, generator=torch.Generator().manual_seed(0)) * 0.4 - 5.5
    old[~batch.response_mask] = float("nan")  # padding must not matter
    batch = batch.with_old_log_probs(old)
    expected = _reference(model_path, batch)
    ranks = run_ranks(num_ranks, _update, model_path, batch, num_ranks, max_tokens)
    for rank in ranks:
        width = rank["log_probs"].shape[1]
        for name in ("log_probs", "entropy"):
            torch.testing.assert_close(rank[name], expected[name][rank["indices"], :width], rtol=1e-5, atol=1e-5)
        assert rank["sums"].grad_norm == pytest.approx(expected["norm"], rel=1e-4)
    assert sum(rank["sums"].loss for rank in ranks) == pytest.approx(expected["loss"], rel=1e-5)
    assert sum(rank["sums"].num_tokens for rank in ranks) == batch.num_loss_tokens
    weights = ranks[0]["weights"]
    assert set(weights) == set(expected["weights"])
    for name, weight in weights.items():
        # AdamW's first step moves each weight by lr * sign(gradient): compare where the gradient is not noise
        close = torch.isclose(weight, expected["weights"][name], rtol=1e-4, atol=1e-4)
        assert close.float().mean() > 0.995, name
    assert all(rank["weights"] is None for rank in ranks[1:])


def _infinite_loss(rank: int, model_path: Path, batch: Batch, num_ranks: int) -> Any:
    policy = Policy(model_path, TRAIN, AlgorithmConfig(), TEMPERATURE)
    names = list(policy.weight_sizes())
    before = policy.gather_weights(names)
    shares, _ = split_batch(batch, num_ranks, 4096)
    sums = policy.update(shares[rank], LossTotals(batch.num_loss_tokens, batch.num_loss_responses))
    return before, policy.gather_weights(names), sums


def test_a_norm_that_is_not_finite_changes_nothing_and_is_counted(model_path: Path) -> None:
    batch = random_batch(num_groups=2, group_size=2)
    batch = batch.with_old_log_probs(torch.full_like(batch.rollout_log_probs, -2.0))
    batch.advantages[1] = float("inf")
    before, after, sums = run_ranks(2, _infinite_loss, model_path, batch, 2)[0]
    assert sums.is_skipped
    for name, weight in before.items():
        assert torch.equal(weight, after[name]), name


def test_an_incomplete_model_folder_is_named(model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((model_path / "config.json").read_bytes())
    with pytest.raises(ModelError, match=r"lacks weights \(\*\.safetensors\) and a tokenizer"):
        load_causal_lm(tmp_path)
    with pytest.raises(ModelError, match=r"does not exist; set model\.path"):
        load_causal_lm(tmp_path / "nowhere")
