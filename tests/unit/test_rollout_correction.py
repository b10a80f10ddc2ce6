"""Importance weights, masks and mismatch metrics of the engine's log-probs, worked by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dapo_core.config.training import RolloutCorrectionConfig
from dapo_core.rollout_correction import correct_rollouts, mismatch_metrics

NAN, INF = float("nan"), float("inf")
MASK = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
# ratios policy/engine: 0.5, 3 | 2 | none
ROLLOUT = torch.tensor([[0.5, 0.25, 1.0], [0.25, 1.0, 1.0], [1.0, 1.0, 1.0]]).log()
OLD = torch.tensor([[0.25, 0.75, 1.0], [0.5, 1.0, 1.0], [1.0, 1.0, 1.0]]).log()


def _settings(**values: Any) -> RolloutCorrectionConfig:
    return RolloutCorrectionConfig.model_validate(values)


def _log_ratios(rows: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(old, rollout, mask) of full rows with the given log-ratios."""
    old = torch.tensor(rows)
    return old, torch.zeros_like(old), torch.ones_like(old, dtype=torch.bool)


@pytest.mark.parametrize(
    ("importance", "importance_max", "expected"),
    [
        ("off", 10.0, None),
        ("token", 10.0, [[0.5, 3.0, 1.0], [2.0, 1.0, 1.0], [1.0, 1.0, 1.0]]),
        ("token", 2.5, [[0.5, 2.5, 1.0], [2.0, 1.0, 1.0], [1.0, 1.0, 1.0]]),
        ("sequence", 10.0, [[1.5, 1.5, 1.0], [2.0, 1.0, 1.0], [1.0, 1.0, 1.0]]),  # 0.5 * 3
        ("sequence", 1.75, [[1.5, 1.5, 1.0], [1.75, 1.0, 1.0], [1.0, 1.0, 1.0]]),
    ],
)
def test_importance_weights(importance: str, importance_max: float, expected: list[list[float]] | None) -> None:
    settings = _settings(importance=importance, importance_max=importance_max)
    weights, mask = correct_rollouts(OLD.clone().requires_grad_(), ROLLOUT, MASK, settings)
    assert mask.tolist() == MASK.tolist()
    if weights is None:
        assert expected is None
        return
    assert not weights.requires_grad
    torch.testing.assert_close(weights, torch.tensor(expected))


@pytest.mark.parametrize("importance", ["token", "sequence"])
@pytest.mark.parametrize(("log_ratio", "expected"), [(50.0, math.exp(20)), (-50.0, math.exp(-20))])
def test_a_log_ratio_of_fifty_is_clamped_to_twenty(importance: str, log_ratio: float, expected: float) -> None:
    settings = _settings(importance=importance, importance_max=1e12)
    weights, _ = correct_rollouts(*_log_ratios([[log_ratio]]), settings)
    assert weights is not None
    assert weights.item() == pytest.approx(expected, rel=1e-6)
    # 30 - 25 = 5 is inside +-20, though both factors are beyond: e^5 = 148.413, in the product of the response
    settings = _settings(importance="sequence", importance_max=1e12)
    weights, _ = correct_rollouts(*_log_ratios([[30.0, -25.0]]), settings)
    assert weights is not None
    assert weights[0].tolist() == pytest.approx([148.4131591] * 2, rel=1e-6)


@pytest.mark.parametrize(
    ("mask", "low", "high", "expected"),
    [
        ("token", 0.6, 2.5, [[False, False, False], [True, False, False], [False] * 3]),  # 0.5, 3 | 2
        ("token", 0.4, 2.5, [[True, False, False], [True, False, False], [False] * 3]),
        ("token", 0.6, 3.5, [[False, True, False], [True, False, False], [False] * 3]),
        # geometric means 1.5^0.5 = 1.2247 and 2
        ("sequence", 0.5, 1.3, [[True, True, False], [False] * 3, [False] * 3]),
        ("sequence", 1.3, 2.5, [[False] * 3, [True, False, False], [False] * 3]),
        ("sequence", 0.5, 1.2, [[False] * 3, [False] * 3, [False] * 3]),
    ],
)
def test_masks(mask: str, low: float, high: float, expected: list[list[bool]]) -> None:
    weights, kept = correct_rollouts(OLD, ROLLOUT, MASK, _settings(mask=mask, mask_low=low, mask_high=high))
    assert weights is None
    assert kept.tolist() == expected


def test_a_ratio_on_the_bound_trains() -> None:
    # exp of a float32 0 is exactly 1
    for mask in ("token", "sequence"):
        for low, high in ((1.0, 2.0), (0.5, 1.0)):
            settings = _settings(mask=mask, mask_low=low, mask_high=high)
            assert correct_rollouts(*_log_ratios([[0.0, 0.0]]), settings)[1].tolist() == [[True, True]]


def test_a_long_response_is_judged_by_its_mean_not_by_its_product() -> None:
    # 20,000 tokens with log-ratio 0.001: the product is e^20, the geometric mean 1.001
    old, rollout, mask = _log_ratios([[0.001] * 20_000])
    assert correct_rollouts(old, rollout, mask, _settings(mask="sequence"))[1].all()


def test_the_weight_of_a_response_is_that_of_all_its_tokens_also_those_masked_out() -> None:
    # ratios 0.5 and 3; the mask leaves out 3; the product stays 1.5
    settings = _settings(importance="sequence", mask="token", mask_low=0.4, mask_high=2.5)
    weights, mask = correct_rollouts(OLD, ROLLOUT, MASK, settings)
    assert weights is not None
    assert weights[0, 0].item() == pytest.approx(1.5, rel=1e-6)
    assert mask[0].tolist() == [True, False, False]


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("junk", [NAN, INF, -INF])
def test_what_stands_under_the_mask_does_not_matter(level: str, junk: float) -> None:
    settings = _settings(importance=level, mask=level)
    filler = torch.tensor(junk)
    noisy = [torch.where(MASK, values, filler) for values in (OLD, ROLLOUT)]
    for found, expected in zip(
        correct_rollouts(*noisy, MASK, settings), correct_rollouts(OLD, ROLLOUT, MASK, settings), strict=True
    ):
        assert found is not None
        assert expected is not None
        assert found.tolist() == expected.tolist()
    assert mismatch_metrics(*noisy, MASK) == mismatch_metrics(OLD, ROLLOUT, MASK)


def test_mismatch_metrics() -> None:
    ln3 = math.log(3)
    assert mismatch_metrics(OLD, ROLLOUT, MASK) == pytest.approx(
        {
            "rollout/probs_diff_mean": 1 / 3,  # (0.25 + 0.5 + 0.25) / 3
            "rollout/probs_diff_max": 0.5,
            "rollout/kl": -ln3 / 3,  # ln 0.5 + ln 3 + ln 2 = ln 3
            "rollout/k3_kl": (5.5 - 3 - ln3) / 3,  # sum r = 5.5
            "rollout/ppl_ratio": (1.5**-0.5 + 0.5) / 2,  # mean log r: ln 1.5 / 2 and ln 2
            "rollout/chi2_token": 13.25 / 3 - 1,  # (0.25 + 9 + 4) / 3 - 1
            "rollout/chi2_seq": 2.125,  # (1.5^2 + 2^2) / 2 - 1
            "rollout/ess": 30.25 / 39.75,  # 5.5^2 / (3 * 13.25)
        },
        rel=1e-6,
    )


def test_a_product_out_of_range_leaves_the_metrics_finite() -> None:
    # 100 tokens of log-ratio 1: product e^100 clamped to e^20; chi2_seq e^40 - 1
    metrics = mismatch_metrics(*_log_ratios([[1.0] * 100]))
    assert metrics["rollout/chi2_seq"] == pytest.approx(math.exp(40), rel=1e-9)
    assert metrics["rollout/kl"] == pytest.approx(-1.0)
    assert metrics["rollout/ppl_ratio"] == pytest.approx(math.exp(-1))


def test_without_a_token_there_are_no_metrics() -> None:
    assert mismatch_metrics(OLD, ROLLOUT, torch.zeros_like(MASK)) == {}
