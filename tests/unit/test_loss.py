"""Policy loss against hand-computed values."""

import math
from dataclasses import astuple
from typing import Any, get_args

import pytest
import torch

from dapo_core.algorithm.loss import LossTotals, PolicyLoss, policy_loss
from dapo_core.algorithm.loss_tokens import LossTokens
from dapo_core.config.algorithm import AlgorithmConfig
from tests.batches import rows_of

DAPO = AlgorithmConfig(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_dual=10.0)
AGGREGATIONS = get_args(AlgorithmConfig.model_fields["loss_aggregation"].annotation)
NAN, INF = float("nan"), float("inf")


def _algorithm(aggregation: str = "token-mean", **values: Any) -> AlgorithmConfig:
    norm = {"loss_norm_tokens": 10} if aggregation == "seq-mean-token-sum-norm" else {}
    return AlgorithmConfig.model_validate({"loss_aggregation": aggregation, **norm, **values})


def _totals(mask: torch.Tensor) -> LossTotals:
    return LossTotals(int(mask.sum()), int(mask.any(dim=-1).sum()))


def _tokens(
    old_log_probs: torch.Tensor,
    advantages: list[float],
    mask: torch.Tensor,
    weights: torch.Tensor,
    **more: Any,
) -> LossTokens:
    """`advantages` holds one number per response."""
    per_token = (
        torch.tensor(advantages, dtype=old_log_probs.dtype).unsqueeze(-1).expand_as(old_log_probs)
    )
    return LossTokens(old_log_probs, per_token, mask, weights, rows_of(mask), **more)


def _one_token(
    log_ratio: float, advantage: float, algorithm: AlgorithmConfig = DAPO, **more: Any
) -> tuple[PolicyLoss, float]:
    """Return the loss of one token with old log-prob 0, and its derivative by the log-prob."""
    log_probs = torch.tensor([[log_ratio]], dtype=torch.float64, requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    weights = LossTotals(1, 1).token_weights(mask, algorithm)
    tokens = _tokens(torch.zeros(1, 1, dtype=torch.float64), [advantage], mask, weights, **more)
    loss = policy_loss(log_probs, None, tokens, algorithm)
    (gradient,) = torch.autograd.grad(loss.loss, log_probs)
    return loss, gradient.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient", "is_clipped", "is_dual"),
    [
        # A = 2: L = max(-2 r, -2 clamp(r, 0.8, 1.28)); d/dlogp of -2 r is -2 r, of a clipped value
        # 0
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
def test_one_token_loss_matches_hand_computed_values(
    ratio: float, advantage: float, value: float, gradient: float, is_clipped: bool, is_dual: bool
) -> None:
    loss, slope = _one_token(math.log(ratio), advantage)
    assert loss.loss.item() == pytest.approx(value, abs=1e-12)
    assert loss.sums.pg_loss == loss.loss.item()
    assert slope == pytest.approx(gradient, abs=1e-12)
    assert (loss.sums.clipped, loss.sums.clipped_dual, loss.sums.num_tokens) == (
        is_clipped,
        is_dual,
        1.0,
    )
    assert loss.sums.neg_log_ratio == pytest.approx(-math.log(ratio), abs=1e-12)
    assert loss.sums.kl_loss == 0.0


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "value"),
    [(50.0, 1.0, -1.28), (50.0, -1.0, 10.0), (-50.0, 1.0, -math.exp(-20)), (-50.0, -1.0, 0.8)],
)
def test_a_log_ratio_of_fifty_is_clamped_to_twenty(
    log_ratio: float, advantage: float, value: float
) -> None:
    loss, slope = _one_token(log_ratio, advantage)
    assert loss.loss.item() == pytest.approx(value, rel=1e-6)
    assert loss.sums.neg_log_ratio == -math.copysign(20.0, log_ratio)
    assert slope == 0.0  # constant beyond the clamp


# Responses of 2, 1 and 0 tokens, N = 2 responses and T = 3 tokens: the empty one is no response of
# the mean.
@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [
        ("token-mean", [[1 / 3, 1 / 3], [1 / 3, 0], [0, 0]]),
        ("token-sum", [[1, 1], [1, 0], [0, 0]]),
        ("seq-mean-token-sum", [[1 / 2, 1 / 2], [1 / 2, 0], [0, 0]]),
        # 1 / (2 * 2) and 1 / (2 * 1)
        ("seq-mean-token-mean", [[1 / 4, 1 / 4], [1 / 2, 0], [0, 0]]),
        ("seq-mean-token-sum-norm", [[1 / 20, 1 / 20], [1 / 20, 0], [0, 0]]),  # 1 / (2 * 10)
    ],
)
def test_token_weights(aggregation: str, weights: list[list[float]]) -> None:
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    found = _totals(mask).token_weights(mask, _algorithm(aggregation))
    torch.testing.assert_close(found, torch.tensor(weights, dtype=torch.float32))


# Responses of 1, 2 and 9 tokens with losses 10.1, 9.7 and 7.5 per token: over all tokens (10.1 + 2
# * 9.7 + 9 * 7.5) / 12 = 97 / 12 = 8.083, however they are split. Older verl, one rank,
# micro-batches of one response: (10.1 + 9.7 + 7.5) / 3 = 9.100; micro-batches {1, 2} and {9}: 29.5
# / 3 * 2 / 3 + 7.5 / 3 = 9.0556; ranks with {1, 2} and {9}: (29.5 / 3 + 7.5) / 2 = 8.6667; all in
# one micro-batch: 8.083.
@pytest.mark.parametrize(
    ("ranks", "verl"),
    [
        ([[[0], [1], [2]]], 9.1),
        ([[[0, 1], [2]]], 9.0555556),
        ([[[0, 1]], [[2]]], 8.6666667),
        ([[[0, 1, 2]]], 97 / 12),
    ],
)
@pytest.mark.parametrize("compat", ["none", "verl"])
def test_token_mean_is_per_mini_batch_and_with_compat_verl_per_micro_batch(
    compat: str, ranks: list[list[list[int]]], verl: float
) -> None:
    mask = torch.arange(9) < torch.tensor([1, 2, 9]).unsqueeze(-1)
    losses, algorithm = torch.tensor([10.1, 9.7, 7.5]), _algorithm(compat=compat)
    totals = LossTotals(12, 3, num_data_ranks=len(ranks))
    value = 0.0
    for share in ranks:
        num_responses = sum(len(rows) for rows in share)
        for rows in share:
            weights = totals.token_weights(mask[rows], algorithm, num_responses)
            tokens = _tokens(
                torch.zeros(len(rows), 9), (-losses[rows]).tolist(), mask[rows], weights
            )
            value += policy_loss(torch.zeros(len(rows), 9), None, tokens, algorithm).sums.pg_loss
    assert value == pytest.approx(verl if compat == "verl" else 97 / 12, rel=1e-6)


@pytest.mark.parametrize("compat", ["none", "verl"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_masked_values_change_neither_loss_nor_gradient(aggregation: str, compat: str) -> None:
    mask = torch.tensor([[True, True, False, False], [True, False, False, False], [False] * 4])
    clean = torch.tensor([[-1.0, -2.0, 0.0, 0.0], [-0.5, 0.0, 0.0, 0.0], [0.0] * 4])
    old = torch.tensor([[-1.2, -1.7, 0.0, 0.0], [-0.4, 0.0, 0.0, 0.0], [0.0] * 4])
    algorithm = _algorithm(
        aggregation,
        compat=compat,
        entropy_coefficient=0.1,
        kl={"place": "loss", "coefficient": 0.5},
    )
    weights = _totals(mask).token_weights(mask, algorithm, 3)
    results = []
    for junk in (0.0, NAN, INF, -INF, 7.0):
        filler = torch.tensor(junk)
        log_probs = torch.where(mask, clean, filler).requires_grad_()
        entropy = torch.where(mask, clean.square(), filler).requires_grad_()
        tokens = LossTokens(
            old_log_probs=torch.where(mask, old, filler),
            advantages=torch.where(mask, torch.tensor([[1.5], [-0.5], [2.0]]), filler),
            response_mask=mask,
            weights=weights,
            responses=rows_of(mask),
            importance_weights=torch.where(mask, 0.5 - old, filler),
            ref_log_probs=torch.where(mask, old * 2, filler),
        )
        loss = policy_loss(log_probs, entropy, tokens, algorithm)
        loss.loss.backward()
        assert log_probs.grad is not None
        assert entropy.grad is not None
        numbers = (loss.loss.item(), *astuple(loss.sums))
        results.append((numbers, log_probs.grad.tolist(), entropy.grad.tolist()))
    numbers, gradient, entropy_gradient = results[0]
    assert all(math.isfinite(number) for number in numbers)
    assert gradient[0][0] != 0.0
    assert [gradient[0][2:], gradient[1][1:], gradient[2]] == [[0.0] * 2, [0.0] * 3, [0.0] * 4]
    assert [entropy_gradient[0][2:], entropy_gradient[2]] == [[0.0] * 2, [0.0] * 4]
    assert all(result == results[0] for result in results[1:])


@pytest.mark.parametrize("compat", ["none", "verl"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("totals", [LossTotals(10, 2), LossTotals(0, 0)])
def test_a_part_without_trained_tokens_contributes_zero(
    aggregation: str, compat: str, totals: LossTotals
) -> None:
    log_probs = torch.full((2, 3), NAN, requires_grad=True)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    algorithm = _algorithm(aggregation, compat=compat)
    weights = totals.token_weights(mask, algorithm, 0)
    loss = policy_loss(
        log_probs, None, _tokens(torch.full((2, 3), NAN), [1.0, 1.0], mask, weights), algorithm
    )
    loss.loss.backward()
    assert (loss.loss.item(), *astuple(loss.sums)) == (0.0,) * 7
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [[0.0] * 3] * 2


def test_the_entropy_bonus_subtracts_the_mean_entropy() -> None:
    # ratios 1, A = -1 and -3: policy loss (1 + 3) / 2 = 2; entropy (0.4 + 0.8) / 2 = 0.6; 2 - 0.05
    # * 0.6 = 1.97
    mask = torch.ones(2, 1, dtype=torch.bool)
    entropy = torch.tensor([[0.4], [0.8]], requires_grad=True)
    algorithm = _algorithm(entropy_coefficient=0.05)
    tokens = _tokens(
        torch.zeros(2, 1), [-1.0, -3.0], mask, LossTotals(2, 2).token_weights(mask, algorithm)
    )
    loss = policy_loss(torch.zeros(2, 1), entropy, tokens, algorithm)
    loss.loss.backward()
    assert loss.loss.item() == pytest.approx(1.97)
    assert loss.sums.pg_loss == pytest.approx(2.0)
    assert entropy.grad is not None
    torch.testing.assert_close(entropy.grad, torch.full((2, 1), -0.025))  # -0.05 / 2 tokens


@pytest.mark.parametrize("place", ["off", "reward"])
def test_kl_outside_the_loss_does_not_change_it(place: str) -> None:
    algorithm = _algorithm(kl={"place": place, "coefficient": 2.0})
    loss, slope = _one_token(
        0.0, 3.0, algorithm, ref_log_probs=torch.full((1, 1), -5.0, dtype=torch.float64)
    )
    assert (loss.loss.item(), loss.sums.kl_loss, slope) == (-3.0, 0.0, -3.0)


def test_importance_weights_scale_only_the_policy_loss_without_gradient() -> None:
    # A = -2, r = 1.1, weight 0.5: policy loss 0.5 * 2.2 = 1.1 with the same derivative; entropy 0.7
    # * -0.1 and KL 0.3 * (0.5 * ln(1.1)^2) = 0.3 * 0.00454201 stay as they are: loss 1.0313626
    importance = torch.full((1, 1), 0.5, dtype=torch.float64, requires_grad=True)
    log_probs = torch.tensor([[math.log(1.1)]], dtype=torch.float64, requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    algorithm = _algorithm(
        entropy_coefficient=0.1, kl={"place": "loss", "coefficient": 0.3, "estimator": "mse"}
    )
    zeros = torch.zeros(1, 1, dtype=torch.float64)
    tokens = _tokens(
        zeros, [-2.0], mask, torch.ones(1, 1), importance_weights=importance, ref_log_probs=zeros
    )
    loss = policy_loss(log_probs, torch.full((1, 1), 0.7, dtype=torch.float64), tokens, algorithm)
    loss.loss.backward()
    assert loss.sums.pg_loss == pytest.approx(1.1, abs=1e-12)
    assert loss.loss.item() == pytest.approx(1.0313626, abs=1e-7)
    assert log_probs.grad is not None
    assert log_probs.grad.item() == pytest.approx(1.1 + 0.3 * math.log(1.1), abs=1e-12)
    assert importance.grad is None
