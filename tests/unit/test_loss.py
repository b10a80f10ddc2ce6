"""The policy loss: worked by hand, blind to masked values, and the same however a mini-batch is split."""

from __future__ import annotations

import math
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_core.config import AlgorithmConfig
from dapo_core.loss import LossTotals, PolicyLoss, policy_loss

DAPO = AlgorithmConfig(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_dual=10.0)
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
NAN = float("nan")


def _algorithm(aggregation: str) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"loss_aggregation": aggregation})


def _totals(mask: torch.Tensor) -> LossTotals:
    return LossTotals(int(mask.sum()), int(mask.any(dim=-1).sum()))


def _single_token(ratio: float, advantage: float) -> tuple[PolicyLoss, float]:
    """The loss of one token and its derivative by the log-prob."""
    log_probs = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    loss = policy_loss(
        log_probs,
        torch.zeros(1, 1, dtype=torch.float64),
        torch.tensor([advantage], dtype=torch.float64),
        torch.ones(1, 1, dtype=torch.bool),
        LossTotals(1, 1),
        DAPO,
    )
    (gradient,) = torch.autograd.grad(loss.loss, log_probs)
    return loss, gradient.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient", "is_clipped", "is_dual"),
    [
        # A = 2: L = max(-2 r, -2 clamp(r, 0.8, 1.28)); d/dlogp of -2 r is -2 r, of a clipped value 0
        (0.79, 2.0, -1.58, -1.58, False, False),  # max(-1.58, -1.6)
        (0.81, 2.0, -1.62, -1.62, False, False),  # inside the interval
        (1.27, 2.0, -2.54, -2.54, False, False),  # inside the interval
        (1.29, 2.0, -2.56, 0.0, True, False),  # max(-2.58, -2.56)
        (3.0, 2.0, -2.56, 0.0, True, False),  # max(-6, -2.56)
        (11.0, 2.0, -2.56, 0.0, True, False),  # max(-22, -2.56); no dual clip for A > 0
        # A = -2: L = min(20, max(2 r, 2 clamp(r, 0.8, 1.28)))
        (0.79, -2.0, 1.6, 0.0, True, False),  # max(1.58, 1.6)
        (0.81, -2.0, 1.62, 1.62, False, False),
        (1.27, -2.0, 2.54, 2.54, False, False),
        (1.29, -2.0, 2.58, 2.58, False, False),  # max(2.58, 2.56)
        (3.0, -2.0, 6.0, 6.0, False, False),  # max(6, 2.56), below 20
        (11.0, -2.0, 20.0, 0.0, False, True),  # min(20, 22)
    ],
)
def test_one_token(
    ratio: float, advantage: float, value: float, gradient: float, is_clipped: bool, is_dual: bool
) -> None:
    loss, slope = _single_token(ratio, advantage)
    assert loss.loss.item() == pytest.approx(value, abs=1e-12)
    assert slope == pytest.approx(gradient, abs=1e-12)
    assert (loss.clipped, loss.clipped_dual, loss.num_tokens) == (float(is_clipped), float(is_dual), 1.0)
    assert loss.neg_log_ratio == pytest.approx(-math.log(ratio), abs=1e-12)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "value"),
    [(50.0, 1.0, -1.28), (50.0, -1.0, 10.0), (-50.0, 1.0, -math.exp(-20)), (-50.0, -1.0, 0.8)],
)
def test_a_log_ratio_of_fifty_is_clamped_to_twenty(log_ratio: float, advantage: float, value: float) -> None:
    log_probs = torch.tensor([[log_ratio]], requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    loss = policy_loss(log_probs, torch.zeros(1, 1), torch.tensor([advantage]), mask, LossTotals(1, 1), DAPO)
    assert loss.loss.item() == pytest.approx(value, rel=1e-6)
    assert loss.neg_log_ratio == -math.copysign(20.0, log_ratio)
    loss.loss.backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [[0.0]]  # constant beyond the clamp


# Two responses, ratios all 1, so that a token's loss is -A: A = -4 on 2 tokens, A = -10 on 1 token.
@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token-mean", 6.0),  # (4 + 4 + 10) / 3
        ("seq-mean-token-sum", 9.0),  # (8 + 10) / 2
        ("seq-mean-token-mean", 7.0),  # (4 + 10) / 2
    ],
)
def test_aggregations(aggregation: str, expected: float) -> None:
    mask = torch.tensor([[True, True], [True, False]])
    values = torch.zeros(2, 2)
    loss = policy_loss(values, values, torch.tensor([-4.0, -10.0]), mask, _totals(mask), _algorithm(aggregation))
    assert loss.loss.item() == pytest.approx(expected)


def test_token_mean_is_of_the_mini_batch_not_a_mean_over_micro_batches() -> None:
    # responses of 1, 2 and 9 tokens with losses 10.1, 9.7 and 7.5 per token: over all tokens
    # (10.1 + 2 * 9.7 + 9 * 7.5) / 12 = 97 / 12 = 8.083; a mean over micro-batches would be 27.3 / 3 = 9.100
    lengths, losses = [1, 2, 9], [10.1, 9.7, 7.5]
    mask = torch.arange(9) < torch.tensor(lengths).unsqueeze(-1)
    values, advantages = torch.zeros(3, 9), -torch.tensor(losses)
    totals = _totals(mask)
    parts = [
        policy_loss(values[row], values[row], advantages[row], mask[row], totals, DAPO).loss.item()
        for row in ([0], [1], [2])
    ]
    assert sum(parts) == pytest.approx(97 / 12, rel=1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_what_stands_under_the_mask_changes_neither_value_nor_gradient(aggregation: str) -> None:
    mask = torch.tensor([[True, True, False, False], [True, False, False, False], [False] * 4])
    clean = torch.tensor([[-1.0, -2.0, 0.0, 0.0], [-0.5, 0.0, 0.0, 0.0], [0.0] * 4])
    old = torch.tensor([[-1.2, -1.7, 0.0, 0.0], [-0.4, 0.0, 0.0, 0.0], [0.0] * 4])
    advantages = torch.tensor([1.5, -0.5, 2.0])
    results = []
    for masked, masked_old in ((0.0, 0.0), (NAN, NAN), (float("inf"), NAN), (7.0, -float("inf"))):
        log_probs = torch.where(mask, clean, torch.tensor(masked)).requires_grad_()
        old_log_probs = torch.where(mask, old, torch.tensor(masked_old))
        loss = policy_loss(log_probs, old_log_probs, advantages, mask, _totals(mask), _algorithm(aggregation))
        loss.loss.backward()
        assert log_probs.grad is not None
        results.append((loss.loss.item(), log_probs.grad.tolist(), loss.neg_log_ratio, loss.clipped))
    assert math.isfinite(results[0][0])
    assert results[0][1][0][0] != 0.0
    assert results[0][1][2] == [0.0] * 4
    assert all(result == results[0] for result in results[1:])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_part_without_trained_tokens_adds_nothing(aggregation: str) -> None:
    log_probs = torch.full((2, 3), NAN, requires_grad=True)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    old = torch.full((2, 3), NAN)
    for totals in (LossTotals(10, 2), LossTotals(0, 0)):
        log_probs.grad = None
        loss = policy_loss(log_probs, old, torch.ones(2), mask, totals, _algorithm(aggregation))
        loss.loss.backward()
        assert (loss.loss.item(), loss.num_tokens, loss.clipped, loss.neg_log_ratio) == (0.0, 0.0, 0.0, 0.0)
        assert log_probs.grad is not None
        assert log_probs.grad.tolist() == [[0.0] * 3] * 2


def test_an_unknown_aggregation_is_named() -> None:
    with pytest.raises(ValueError, match=r"unknown algorithm\.loss_aggregation 'mean'"):
        LossTotals(1, 1).token_weights(torch.ones(1, 1, dtype=torch.bool), "mean")


@st.composite
def _mini_batches(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log_probs, old_log_probs, advantages, mask) of a few responses, values outside the mask NaN."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    shape = (len(lengths), max(*lengths, 1))
    mask = torch.arange(shape[1]) < torch.tensor(lengths).unsqueeze(-1)
    old = -torch.rand(shape, generator=generator, dtype=torch.float64) * 3
    log_probs = old + torch.randn(shape, generator=generator, dtype=torch.float64)
    advantages = torch.randn(len(lengths), generator=generator, dtype=torch.float64) * 2
    nan = torch.tensor(NAN, dtype=torch.float64)
    return torch.where(mask, log_probs, nan), torch.where(mask, old, nan), advantages, mask


def _loss_and_gradient(
    mini_batch: tuple[torch.Tensor, ...], parts: list[list[int]], aggregation: str, width: int | None = None
) -> tuple[float, torch.Tensor, float]:
    """Sum of the parts' losses, gradient by all log-probs, clipped tokens; micro-batches of the given rows."""
    log_probs, old, advantages, mask = mini_batch
    leaf = log_probs.clone().requires_grad_()
    totals = _totals(mask)
    value = clipped = 0.0
    for rows in parts:
        loss = policy_loss(
            leaf[rows, :width],
            old[rows, :width],
            advantages[rows],
            mask[rows, :width],
            totals,
            _algorithm(aggregation),
        )
        loss.loss.backward()
        value, clipped = value + loss.loss.item(), clipped + loss.clipped
    assert leaf.grad is not None
    return value, leaf.grad, clipped


@settings(max_examples=60, deadline=None)
@given(_mini_batches(), st.sampled_from(AGGREGATIONS), st.randoms(use_true_random=False))
def test_micro_batches_in_any_order_give_the_same_value_and_gradient(
    mini_batch: tuple[torch.Tensor, ...], aggregation: str, shuffler: Random
) -> None:
    rows = list(range(len(mini_batch[0])))
    value, gradient, clipped = _loss_and_gradient(mini_batch, [rows], aggregation)
    shuffler.shuffle(rows)
    cut = shuffler.randint(0, len(rows))
    parts = [part for part in (rows[:cut], rows[cut:]) if part]
    for split in (parts, [[row] for row in rows]):
        split_value, split_gradient, split_clipped = _loss_and_gradient(mini_batch, split, aggregation)
        assert split_value == pytest.approx(value, rel=1e-6, abs=1e-9)
        torch.testing.assert_close(split_gradient, gradient, rtol=1e-6, atol=1e-12)
        assert split_clipped == clipped


@settings(max_examples=30, deadline=None)
@given(_mini_batches(), st.sampled_from(AGGREGATIONS), st.integers(1, 5))
def test_padding_width_does_not_matter(mini_batch: tuple[torch.Tensor, ...], aggregation: str, extra: int) -> None:
    log_probs, old, advantages, mask = mini_batch
    rows, width = list(range(len(log_probs))), log_probs.shape[1]
    value, gradient, _ = _loss_and_gradient(mini_batch, [rows], aggregation)
    wider = (
        torch.nn.functional.pad(log_probs, (0, extra), value=NAN),
        torch.nn.functional.pad(old, (0, extra), value=NAN),
        advantages,
        torch.nn.functional.pad(mask, (0, extra), value=False),
    )
    wide_value, wide_gradient, _ = _loss_and_gradient(wider, [rows], aggregation)
    assert wide_value == pytest.approx(value, rel=1e-6, abs=1e-9)
    torch.testing.assert_close(wide_gradient[:, :width], gradient, rtol=1e-6, atol=1e-12)
    assert wide_gradient[:, width:].tolist() == [[0.0] * extra for _ in rows]
