"""Importance weights, masks and mismatch metrics, checked against hand-computed values."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from dapo_core.algorithm.batch import build_batch
from dapo_core.algorithm.correction import importance_weights, mask_rollouts
from dapo_core.config.algorithm import (
    PRESETS,
    VERL_PRESETS,
    AlgorithmConfig,
    RolloutCorrectionConfig,
)
from dapo_core.metrics.mismatch import correction_metrics, mismatch_metrics
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
    """Return (old, rollout, mask) of full rows with the given log-ratios."""
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
        # only the second token is stale
        ("stale", 10.0, [[1.0, 3.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]),
        ("stale", 2.5, [[1.0, 2.5, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]),
        # the limit is for stale ones alone
        ("stale", 0.5, [[1.0, 0.5, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]),
    ],
)
def test_importance_weights(
    importance: str, importance_max: float, expected: list[list[float]] | None
) -> None:
    settings = _settings(importance=importance, importance_max=importance_max)
    weights = importance_weights(OLD.clone().requires_grad_(), ROLLOUT, MASK, STALE, settings)
    assert mask_rollouts(OLD, ROLLOUT, MASK, settings).tolist() == MASK.tolist()
    if weights is None:
        assert expected is None
        return
    assert not weights.requires_grad
    torch.testing.assert_close(weights, torch.tensor(expected))


def test_weight_metrics_cover_only_weighted_tokens() -> None:
    # A response of 4 tokens at version 5, one of 2 at 3 and 3 at 5. Ratios: 3 and 1 of stale ones,
    # 0.5 elsewhere
    group = make_group([1.0, -1.0], num_response_tokens=[4, 5], policy_version=5)
    group.rollouts[1].versions[:] = [(3, 2), (5, 3)]
    batch = build_batch([group], mask_truncated=False, policy_version=5)
    assert batch.is_stale.tolist() == [[False] * 5, [True, True, False, False, False]]
    ratios = torch.tensor([[0.5] * 5, [3.0, 1.0, 0.5, 0.5, 0.5]])
    log_probs = batch.rollout_log_probs + ratios.log()
    of_stale = correction_metrics(log_probs, batch, _settings())
    assert of_stale == mismatch_metrics(log_probs, batch.rollout_log_probs, batch.response_mask) | {
        **{name: value for name, value in of_stale.items() if "/fresh_" in name},
        "rollout/importance_mean": pytest.approx(1.5),  # (2 + 1) / 2
        "rollout/importance_truncated_ratio": 0.5,
    }
    icepop = correction_metrics(
        log_probs, batch, _settings(importance_min=0.9, importance_normalize=True)
    )
    # (0 + 1) / 2, before it is divided by 8 / 9
    assert icepop["rollout/importance_mean"] == pytest.approx(0.5)
    assert icepop["rollout/importance_truncated_ratio"] == 0.5
    of_all = correction_metrics(log_probs, batch, _settings(importance="token"))
    assert of_all["rollout/importance_mean"] == pytest.approx(6.5 / 9)  # 2 + 1 + 7 * 0.5
    assert of_all["rollout/importance_truncated_ratio"] == pytest.approx(1 / 9)
    fresh = replace(batch, is_stale=torch.zeros_like(batch.is_stale))
    for without in (
        correction_metrics(log_probs, fresh, _settings()),
        correction_metrics(log_probs, batch, OFF),
    ):
        assert not [name for name in without if "importance" in name or "rollout_is" in name]


def test_a_changed_policy_does_not_look_like_an_engine_mismatch() -> None:
    # Version 5 trains. Log-ratios: 3 on the stale tokens, 0.1 on the 4 + 1 of version 5
    group = make_group([1.0, -1.0, 1.0], num_response_tokens=[4, 3, 2], policy_version=5)
    group.rollouts[1].versions[:] = [(3, 1), (4, 1), (5, 1)]
    group.rollouts[2].versions[:] = [(4, 2)]
    batch = build_batch([group], mask_truncated=False, policy_version=5)
    log_probs = batch.rollout_log_probs + torch.where(batch.is_stale, 3.0, 0.1)
    metrics = correction_metrics(log_probs, batch, _settings())
    assert metrics["rollout/kl"] == pytest.approx(-(4 * 3 + 5 * 0.1) / 9, rel=1e-5)
    engine, policy = math.exp(-1.5), math.exp(-1.4)  # make_group's log-prob is -1.5
    fresh = {name: value for name, value in metrics.items() if name.startswith("rollout/fresh_")}
    assert fresh == pytest.approx(
        {
            "rollout/fresh_kl": -0.1,
            "rollout/fresh_k3_kl": math.exp(0.1) - 1.1,
            "rollout/fresh_probs_diff_mean": policy - engine,
            "rollout/fresh_probs_diff_max": policy - engine,
            "rollout/fresh_probs_diff_high_ratio": 0.0,
            "rollout/fresh_log_probs_diff_mean": 0.1,
            "rollout/fresh_compared_tokens": 5.0,
        },
        rel=1e-4,
    )
    later = build_batch([group], mask_truncated=False, policy_version=6)  # every token is stale
    without = correction_metrics(log_probs, later, _settings())
    assert "rollout/kl" in without
    assert not [name for name in without if "fresh" in name]


@pytest.mark.parametrize(
    ("importance", "low", "high", "expected"),
    [
        # ratios 0.5, 3 | 2: ratios outside the interval get weight 0; they are neither truncated
        # nor masked
        ("token", 0.4, 2.5, [[0.5, 0.0, 1.0], [2.0, 1.0, 1.0], [1.0, 1.0, 1.0]]),
        # the bounds are inside
        ("token", 0.5, 2.0, [[0.5, 0.0, 1.0], [2.0, 1.0, 1.0], [1.0, 1.0, 1.0]]),
        ("token", 0.6, 3.5, [[0.0, 3.0, 1.0], [2.0, 1.0, 1.0], [1.0, 1.0, 1.0]]),
        # products 1.5 and 2
        ("sequence", 1.6, 2.5, [[0.0, 0.0, 1.0], [2.0, 1.0, 1.0], [1.0, 1.0, 1.0]]),
        # only the second token is stale
        ("stale", 0.6, 2.5, [[1.0, 0.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]),
    ],
)
def test_icepop_sets_weights_outside_the_interval_to_zero(
    importance: str, low: float, high: float, expected: list[list[float]]
) -> None:
    settings = _settings(importance=importance, importance_min=low, importance_max=high)
    torch.testing.assert_close(
        _weights((OLD, ROLLOUT, MASK), settings, STALE), torch.tensor(expected)
    )
    assert mask_rollouts(OLD, ROLLOUT, MASK, settings).tolist() == MASK.tolist()


@pytest.mark.parametrize(
    ("importance", "mean", "weights"),
    [
        ("token", (0.5 + 2.5 + 2.0) / 3, [0.5, 2.5, 2.0]),  # truncated at 2.5
        ("sequence", (1.5 + 2.0) / 2, [1.5, 1.5, 2.0]),  # each response once
        ("stale", (1.0 + 2.5 + 1.0) / 3, [1.0, 2.5, 1.0]),
    ],
)
def test_normalized_weights_have_mean_one(
    importance: str, mean: float, weights: list[float]
) -> None:
    settings = _settings(importance=importance, importance_max=2.5, importance_normalize=True)
    found = _weights((OLD, ROLLOUT, MASK), settings, STALE)[MASK]
    assert found.tolist() == pytest.approx([weight / mean for weight in weights], rel=1e-6)
    settings = _settings(
        importance="token", importance_min=5.0, importance_max=6.0, importance_normalize=True
    )
    # no mean to divide by
    assert _weights((OLD, ROLLOUT, MASK), settings)[MASK].tolist() == [0.0, 0.0, 0.0]


def test_contradictory_weight_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"importance_min=2\.0 is not below importance_max=2\.0"):
        _settings(importance="token", importance_min=2.0)
    for ignored in ({"importance_min": 0.5}, {"importance_normalize": True}):
        with pytest.raises(ValueError, match=r"have no effect with importance=off; remove them"):
            _settings(importance="off", **ignored)


@pytest.mark.parametrize("importance", ["token", "sequence"])
@pytest.mark.parametrize(("log_ratio", "expected"), [(50.0, math.exp(20)), (-50.0, math.exp(-20))])
def test_a_log_ratio_of_fifty_is_clamped_to_twenty(
    importance: str, log_ratio: float, expected: float
) -> None:
    settings = _settings(importance=importance, importance_max=1e12)
    assert _weights(_log_ratios([[log_ratio]]), settings).item() == pytest.approx(
        expected, rel=1e-6
    )
    # 30 - 25 = 5 is inside +-20, though both factors are beyond: e^5 = 148.413, in the product of
    # the response
    settings = _settings(importance="sequence", importance_max=1e12)
    assert _weights(_log_ratios([[30.0, -25.0]]), settings)[0].tolist() == pytest.approx(
        [148.4131591] * 2, rel=1e-6
    )


@pytest.mark.parametrize(
    ("mask", "low", "high", "expected"),
    [
        # 0.5, 3 | 2
        ("token", 0.6, 2.5, [[False, False, False], [True, False, False], [False] * 3]),
        ("token", 0.4, 2.5, [[True, False, False], [True, False, False], [False] * 3]),
        ("token", 0.6, 3.5, [[False, True, False], [True, False, False], [False] * 3]),
        # geometric means 1.5^0.5 = 1.2247 and 2
        ("sequence", 0.5, 1.3, [[True, True, False], [False] * 3, [False] * 3]),
        ("sequence", 1.3, 2.5, [[False] * 3, [True, False, False], [False] * 3]),
        ("sequence", 0.5, 1.2, [[False] * 3, [False] * 3, [False] * 3]),
        ("product", 0.5, 1.6, [[True, True, False], [False] * 3, [False] * 3]),  # 1.5 and 2
        ("product", 1.6, 2.5, [[False] * 3, [True, False, False], [False] * 3]),
    ],
)
def test_masks(mask: str, low: float, high: float, expected: list[list[bool]]) -> None:
    settings = _settings(mask=mask, mask_low=low, mask_high=high)
    assert mask_rollouts(OLD, ROLLOUT, MASK, settings).tolist() == expected


LN2, LN3 = math.log(2), math.log(3)


@pytest.mark.parametrize(
    ("divergence", "of_tokens"),
    [
        # log-ratios -ln 2, ln 3 | ln 2: squares 0.4805, 1.2069 | 0.4805
        ("token-k2", [LN2**2 / 2, LN3**2 / 2, LN2**2 / 2]),
        ("sum-k2", [(LN2**2 + LN3**2) / 2, (LN2**2 + LN3**2) / 2, LN2**2 / 2]),
        ("mean-k2", [(LN2**2 + LN3**2) / 4, (LN2**2 + LN3**2) / 4, LN2**2 / 2]),
        ("max-k2", [LN3**2 / 2, LN3**2 / 2, LN2**2 / 2]),
        # r - 1 - log r: 0.5 - 1 + 0.6931, 3 - 1 - 1.0986 | 2 - 1 - 0.6931
        ("token-k3", [LN2 - 0.5, 2 - LN3, 1 - LN2]),
        ("sum-k3", [1.5 + LN2 - LN3, 1.5 + LN2 - LN3, 1 - LN2]),
        ("mean-k3", [(1.5 + LN2 - LN3) / 2, (1.5 + LN2 - LN3) / 2, 1 - LN2]),
        ("max-k3", [2 - LN3, 2 - LN3, 1 - LN2]),
    ],
)
def test_divergence_masks_tokens_or_responses_above_the_limit(
    divergence: str, of_tokens: list[float]
) -> None:
    for limit in sorted(of_tokens):
        for bound in (limit * 0.9999, limit * 1.0001):
            kept = mask_rollouts(
                OLD, ROLLOUT, MASK, _settings(divergence=divergence, divergence_max=bound)
            )
            assert kept[MASK].tolist() == [value <= bound for value in of_tokens]
            assert not kept[~MASK].any()


def test_a_response_weight_includes_masked_tokens() -> None:
    # ratios 0.5 and 3; the mask removes 3; the product stays 1.5
    settings = _settings(importance="sequence", mask="token", mask_low=0.4, mask_high=2.5)
    assert _weights((OLD, ROLLOUT, MASK), settings)[0, 0].item() == pytest.approx(1.5, rel=1e-6)
    assert mask_rollouts(OLD, ROLLOUT, MASK, settings)[0].tolist() == [True, False, False]


def test_mask_and_divergence_combine() -> None:
    # ratios 0.5, 3 | 2: the mask drops 3; mean k3 of the second response is 0.307, of the first
    # 0.547
    settings = _settings(
        mask="token", mask_low=0.4, mask_high=2.5, divergence="mean-k3", divergence_max=0.4
    )
    kept = mask_rollouts(OLD, ROLLOUT, MASK, settings).tolist()
    assert kept == [[False] * 3, [True, False, False], [False] * 3]


def test_a_ratio_on_the_bound_is_kept() -> None:
    # exp of a float32 0 is exactly 1
    for mask in ("token", "sequence"):
        for low, high in ((1.0, 2.0), (0.5, 1.0)):
            settings = _settings(mask=mask, mask_low=low, mask_high=high)
            assert mask_rollouts(*_log_ratios([[0.0, 0.0]]), settings).tolist() == [[True, True]]


def test_sequence_masks_use_the_geometric_mean() -> None:
    # 20,000 tokens with log-ratio 0.001: the product is e^20, the geometric mean 1.001
    old, rollout, mask = _log_ratios([[0.001] * 20_000])
    assert mask_rollouts(old, rollout, mask, _settings(mask="sequence")).all()


@pytest.mark.parametrize("level", ["token", "sequence", "stale"])
@pytest.mark.parametrize("junk", [NAN, INF, -INF])
def test_masked_values_do_not_affect_correction(level: str, junk: float) -> None:
    settings = _settings(importance=level, mask=level.replace("stale", "token"))
    filler = torch.tensor(junk)
    noisy = (*(torch.where(MASK, values, filler) for values in (OLD, ROLLOUT)), MASK)
    assert torch.equal(
        _weights(noisy, settings, STALE), _weights((OLD, ROLLOUT, MASK), settings, STALE)
    )
    assert torch.equal(mask_rollouts(*noisy, settings), mask_rollouts(OLD, ROLLOUT, MASK, settings))
    assert mismatch_metrics(*noisy) == mismatch_metrics(OLD, ROLLOUT, MASK)


def test_mismatch_metrics() -> None:
    # perplexities of the policy (0.25 * 0.75)^-0.5 and 2, of the engine (0.5 * 0.25)^-0.5 and 4
    policy, engine = (0.1875**-0.5, 2.0), (0.125**-0.5, 4.0)
    differences = [math.log(mine / its) for mine, its in zip(policy, engine, strict=True)]
    metrics = mismatch_metrics(OLD, ROLLOUT, MASK)
    assert metrics == pytest.approx(
        {
            "rollout_corr/training_ppl": sum(policy) / 2,
            "rollout_corr/training_log_ppl": sum(map(math.log, policy)) / 2,
            "rollout_corr/rollout_ppl": sum(engine) / 2,
            "rollout_corr/rollout_log_ppl": sum(map(math.log, engine)) / 2,
            "rollout_corr/log_ppl_diff": sum(differences) / 2,
            "rollout_corr/log_ppl_abs_diff": (abs(differences[0]) + abs(differences[1])) / 2,
            "rollout_corr/log_ppl_diff_max": max(differences),
            "rollout_corr/log_ppl_diff_min": min(differences),
            **{
                f"rollout_corr/{name}": metrics[f"rollout/{name}"]
                for name in ("kl", "k3_kl", "ppl_ratio", "chi2_token", "chi2_seq")
            },
            "rollout/probs_diff_mean": 1 / 3,  # (0.25 + 0.5 + 0.25) / 3
            "rollout/probs_diff_max": 0.5,
            "rollout/probs_diff_high_ratio": 1.0,
            "rollout/log_probs_diff_mean": (LN2 + LN3 + LN2) / 3,
            "rollout/compared_tokens": 3.0,
            "rollout/kl": -LN3 / 3,  # ln 0.5 + ln 3 + ln 2 = ln 3
            "rollout/k3_kl": (5.5 - 3 - LN3) / 3,  # sum r = 5.5
            "rollout/ppl_ratio": (1.5**-0.5 + 0.5) / 2,  # mean log r: ln 1.5 / 2 and ln 2
            "rollout/chi2_token": 13.25 / 3 - 1,  # (0.25 + 9 + 4) / 3 - 1
            "rollout/chi2_seq": 2.125,  # (1.5^2 + 2^2) / 2 - 1
            "rollout/ess": 30.25 / 39.75,  # 5.5^2 / (3 * 13.25)
        },
        rel=1e-6,
    )


def test_an_overflowing_product_leaves_metrics_finite() -> None:
    # 100 tokens of log-ratio 1: product e^100 clamped to e^20; chi2_seq e^40 - 1
    metrics = mismatch_metrics(*_log_ratios([[1.0] * 100]))
    assert metrics["rollout/chi2_seq"] == pytest.approx(math.exp(40), rel=1e-9)
    assert metrics["rollout/kl"] == pytest.approx(-1.0)
    assert metrics["rollout/ppl_ratio"] == pytest.approx(math.exp(-1))
    assert mismatch_metrics(OLD, ROLLOUT, torch.zeros_like(MASK)) == {}  # without tokens


@pytest.mark.parametrize(
    ("sections", "importance"),
    [
        ({}, "stale"),
        ({"algorithm": {"old_log_probs": "engine"}}, "off"),
        ({"algorithm": {"compat": "verl"}}, "off"),
        ({"algorithm": {"compat": "verl", "rollout_correction": {"importance": "token"}}}, "token"),
    ],
)
def test_stale_weighting_is_off_where_log_probs_are_not_comparable(
    sections: dict[str, Any], importance: str
) -> None:
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
        ({"rollout_correction": {"mask": "sequence"}, "old_log_probs": "engine"}, True),
        ({"rollout_correction": {"importance": "token"}}, False),
        ({"rollout_correction": {"importance": "sequence"}}, True),
        ({"rollout_correction": {"mask": "token"}}, True),
        ({"rollout_correction": {"divergence": "token-k2"}}, True),
        ({"rollout_correction": {"importance_min": 0.5}}, False),
        ({"rollout_correction": {"importance_normalize": True}}, True),  # needs the whole batch
    ],
)
def test_old_log_probs_are_computed_before_updates_only_if_needed(
    algorithm: dict[str, Any], is_needed: bool
) -> None:
    assert make_config(algorithm=algorithm).anchors_before_updates == is_needed


# policy - engine log-probs 0.1 -0.2 1.5 | -3 0.05: ratios 1.105171 0.818731 4.481689 | 0.049787
# 1.051271, products exp(1.4) = 4.0552 and exp(-2.95) = 0.05234, geometric means exp(1.4 / 3) =
# 1.59467 and exp(-1.475) = 0.228779
RATIOS = [1.105171, 0.818731, 4.481689, 0.049787, 1.051271]


@pytest.mark.parametrize(
    ("keys", "weights", "kept"),
    [
        ({"preset": "tis-token"}, [*RATIOS[:2], 2.0, *RATIOS[3:]], [1, 1, 1, 1, 1]),
        ({"preset": "tis-sequence"}, [2.0] * 3 + [0.05234] * 2, [1, 1, 1, 1, 1]),
        ({"preset": "icepop"}, [*RATIOS[:3], 0.0, RATIOS[4]], [1, 1, 1, 1, 1]),
        ({"preset": "mis-token"}, [*RATIOS[:2], 2.0, *RATIOS[3:]], [1, 1, 0, 0, 1]),
        ({"preset": "mis-sequence"}, [2.0] * 3 + [0.05234] * 2, [0, 0, 0, 0, 0]),
        ({"preset": "geometric"}, [1.0] * 5, [0, 0, 0, 0, 0]),
        ({"preset": "geometric", "mask_low": 0.5, "mask_high": 2.0}, [1.0] * 5, [1, 1, 1, 0, 0]),
        ({"preset": "decoupled_seq_is"}, [2.0] * 3 + [0.05234] * 2, [1, 1, 1, 1, 1]),
    ],
    ids=str,
)
def test_presets_weigh_and_mask_as_published(
    keys: dict[str, Any], weights: list[float], kept: list[int]
) -> None:
    mask = torch.tensor([[True, True, True], [True, True, False]])
    policy = torch.tensor([[0.1, -0.2, 1.5], [-3.0, 0.05, 0.0]], dtype=torch.float64)
    engine, fresh = torch.zeros_like(policy), torch.zeros_like(mask)
    settings = RolloutCorrectionConfig.model_validate(keys)
    found = importance_weights(policy, engine, mask, fresh, settings)
    assert found is not None
    assert found[mask].tolist() == pytest.approx(weights, abs=1e-6)
    assert mask_rollouts(policy, engine, mask, settings)[mask].tolist() == kept


def test_a_preset_is_resolved_and_survives_a_dump() -> None:
    algorithm = AlgorithmConfig.model_validate(
        {"rollout_correction": {"preset": "bypass_ppo_clip_k3_rs"}}
    )
    correction = algorithm.rollout_correction
    assert (algorithm.old_log_probs, correction.preset) == ("engine", "bypass-k3")
    assert (correction.divergence, correction.divergence_max) == ("mean-k3", 0.01)
    assert AlgorithmConfig.model_validate(algorithm.model_dump()) == algorithm
    assert {*VERL_PRESETS.values()} <= {*PRESETS}
    for name in PRESETS:
        AlgorithmConfig.model_validate({"rollout_correction": {"preset": name}})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"rollout_correction": {"preset": "tis-token", "importance": "sequence"}},
            "importance=sequence contradicts preset=tis-token",
        ),
        (
            {"rollout_correction": {"preset": "bypass"}, "old_log_probs": "policy"},
            "old_log_probs=policy contradicts",
        ),
        ({"rollout_correction": {"preset": "tis_token"}}, "Input should be 'tis-token'"),
        ({"rollout_correction": {"preset": "bypass_pg_is"}}, "Input should be 'tis-token'"),
    ],
)
def test_keys_that_contradict_the_preset_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AlgorithmConfig.model_validate(keys)
