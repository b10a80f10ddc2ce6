"""Importance weights, masks and mismatch metrics of the engine's log-probs, worked by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from dapo_core.batch import build_batch
from dapo_core.config.algorithm import RolloutCorrectionConfig
from dapo_core.rollout_correction import (
    correction_metrics,
    importance_weights,
    mask_rollouts,
    mismatch_metrics,
)
from tests.batches import make_group
from tests.configs import make_config

NAN, INF = float("nan"), float("inf")
MASK = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
# ratios policy/engine: 0.5, 3 | 2 | none
ROLLOUT = torch.tensor([[0.5, 0.25, 1.0], [0.25, 1.0, 1.0], [1.0, 1.0, 1.0]]).log()
OLD = torch.tensor([[0.25, 0.75, 1.0], [0.5, 1.0, 1.0], [1.0, 1.0, 1.0]]).log()


STALE = torch.tensor([[False, True, True], [False] * 3, [False] * 3])


def _settings(**values: Any) -> RolloutCorrectionConfig:
    return RolloutCorrectionConfig.model_validate(values)


def _weights(
    log_probs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    settings: RolloutCorrectionConfig,
    stale: torch.Tensor | None = None,
) -> torch.Tensor:
    is_stale = torch.zeros_like(log_probs[2]) if stale is None else stale
    weights = importance_weights(*log_probs, is_stale, settings)
    assert weights is not None
    return weights


OFF = _settings(importance="off")


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
        ("stale", 10.0, [[1.0, 3.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]),  # only the second token is stale
        ("stale", 2.5, [[1.0, 2.5, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]),
        ("stale", 0.5, [[1.0, 0.5, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]),  # the limit is for stale ones alone
    ],
)
def test_importance_weights(importance: str, importance_max: float, expected: list[list[float]] | None) -> None:
    settings = _settings(importance=importance, importance_max=importance_max)
    weights = importance_weights(OLD.clone().requires_grad_(), ROLLOUT, MASK, STALE, settings)
    assert mask_rollouts(OLD, ROLLOUT, MASK, settings).tolist() == MASK.tolist()
    if weights is None:
        assert expected is None
        return
    assert not weights.requires_grad
    torch.testing.assert_close(weights, torch.tensor(expected))


def test_metrics_of_weights_are_over_the_weighed_tokens() -> None:
    # A response of 4 tokens at version 5, one of 2 at 3 and 3 at 5. Ratios: 3 and 1 of stale ones, 0.5 elsewhere
    group = make_group([1.0, -1.0], num_response_tokens=[4, 5], policy_version=5)
    group.rollouts[1].versions[:] = [(3, 2), (5, 3)]
    batch = build_batch([group], mask_truncated=False, policy_version=5)
    assert batch.is_stale.tolist() == [[False] * 5, [True, True, False, False, False]]
    ratios = torch.tensor([[0.5] * 5, [3.0, 1.0, 0.5, 0.5, 0.5]])
    log_probs = batch.rollout_log_probs + ratios.log()
    of_stale = correction_metrics(log_probs, batch, _settings())
    assert of_stale == mismatch_metrics(log_probs, batch.rollout_log_probs, batch.response_mask) | {
        "rollout/importance_mean": pytest.approx(1.5),  # (2 + 1) / 2
        "rollout/importance_truncated_ratio": 0.5,
    }
    of_all = correction_metrics(log_probs, batch, _settings(importance="token"))
    assert of_all["rollout/importance_mean"] == pytest.approx(6.5 / 9)  # 2 + 1 + 7 * 0.5
    assert of_all["rollout/importance_truncated_ratio"] == pytest.approx(1 / 9)
    fresh = replace(batch, is_stale=torch.zeros_like(batch.is_stale))
    for without in (correction_metrics(log_probs, fresh, _settings()), correction_metrics(log_probs, batch, OFF)):
        assert not [name for name in without if "importance" in name]


@pytest.mark.parametrize("importance", ["token", "sequence"])
@pytest.mark.parametrize(("log_ratio", "expected"), [(50.0, math.exp(20)), (-50.0, math.exp(-20))])
def test_a_log_ratio_of_fifty_is_clamped_to_twenty(importance: str, log_ratio: float, expected: float) -> None:
    settings = _settings(importance=importance, importance_max=1e12)
    assert _weights(_log_ratios([[log_ratio]]), settings).item() == pytest.approx(expected, rel=1e-6)
    # 30 - 25 = 5 is inside +-20, though both factors are beyond: e^5 = 148.413, in the product of the response
    settings = _settings(importance="sequence", importance_max=1e12)
    assert _weights(_log_ratios([[30.0, -25.0]]), settings)[0].tolist() == pytest.approx(
        [148.4131591] * 2, rel=1e-6
    )


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
    settings = _settings(mask=mask, mask_low=low, mask_high=high)
    assert mask_rollouts(OLD, ROLLOUT, MASK, settings).tolist() == expected


def test_a_ratio_on_the_bound_trains() -> None:
    # exp of a float32 0 is exactly 1
    for mask in ("token", "sequence"):
        for low, high in ((1.0, 2.0), (0.5, 1.0)):
            settings = _settings(mask=mask, mask_low=low, mask_high=high)
            assert mask_rollouts(*_log_ratios([[0.0, 0.0]]), settings).tolist() == [[True, True]]


def test_a_long_response_is_judged_by_its_mean_not_by_its_product() -> None:
    # 20,000 tokens with log-ratio 0.001: the product is e^20, the geometric mean 1.001
    old, rollout, mask = _log_ratios([[0.001] * 20_000])
    assert mask_rollouts(old, rollout, mask, _settings(mask="sequence")).all()


def test_the_weight_of_a_response_is_that_of_all_its_tokens_also_those_masked_out() -> None:
    # ratios 0.5 and 3; the mask leaves out 3; the product stays 1.5
    settings = _settings(importance="sequence", mask="token", mask_low=0.4, mask_high=2.5)
    assert _weights((OLD, ROLLOUT, MASK), settings)[0, 0].item() == pytest.approx(1.5, rel=1e-6)
    assert mask_rollouts(OLD, ROLLOUT, MASK, settings)[0].tolist() == [True, False, False]


@pytest.mark.parametrize("level", ["token", "sequence", "stale"])
@pytest.mark.parametrize("junk", [NAN, INF, -INF])
def test_what_stands_under_the_mask_does_not_matter(level: str, junk: float) -> None:
    settings = _settings(importance=level, mask=level.replace("stale", "token"))
    filler = torch.tensor(junk)
    noisy = (*(torch.where(MASK, values, filler) for values in (OLD, ROLLOUT)), MASK)
    assert torch.equal(_weights(noisy, settings, STALE), _weights((OLD, ROLLOUT, MASK), settings, STALE))
    assert torch.equal(mask_rollouts(*noisy, settings), mask_rollouts(OLD, ROLLOUT, MASK, settings))
    assert mismatch_metrics(*noisy) == mismatch_metrics(OLD, ROLLOUT, MASK)


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


@pytest.mark.parametrize(
    ("sections", "importance"),
    [
        ({}, "stale"),
        ({"rollout": {"top_k": 0}}, "stale"),  # all tokens, too
        ({"rollout": {"top_p": 0.95}}, "off"),
        ({"rollout": {"top_k": 20}}, "off"),
        ({"algorithm": {"old_log_probs": "engine"}}, "off"),
        ({"algorithm": {"compat": "verl"}}, "off"),
        ({"algorithm": {"compat": "verl", "rollout_correction": {"importance": "token"}}}, "token"),
    ],
)
def test_stale_tokens_are_weighed_where_their_log_probs_compare(sections: dict[str, Any], importance: str) -> None:
    config = make_config(**sections)
    assert config.rollout_correction.importance == importance
    untouched = {"importance"}
    before, after = config.algorithm.rollout_correction, config.rollout_correction
    assert after.model_dump(exclude=untouched) == before.model_dump(exclude=untouched)


@pytest.mark.parametrize(
    ("algorithm", "is_needed"),
    [
        ({}, False),
        ({"kl": {"place": "loss"}}, False),
        ({"kl": {"place": "reward"}}, True),
        ({"kl": {"place": "reward"}, "old_log_probs": "engine"}, False),
        ({"rollout_correction": {"importance": "token"}}, False),
        ({"rollout_correction": {"importance": "sequence"}}, True),
        ({"rollout_correction": {"mask": "token"}}, True),
    ],
)
def test_what_reads_old_log_probs_before_an_update(algorithm: dict[str, Any], is_needed: bool) -> None:
    assert make_config(algorithm=algorithm).anchors_before_updates == is_needed
