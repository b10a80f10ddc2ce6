"""Group advantages: hand-computed values, exactly zero without signal, independent of row order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dapo_core.algorithm.advantage import group_advantages, weigh
from dapo_core.algorithm.batch import build_batch
from dapo_core.config.algorithm import AlgorithmConfig
from tests.batches import UNSCORED, make_group
from tests.configs import make_config

DAPO = AlgorithmConfig()


def _algorithm(**values: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(values)


def _one_group(rewards: list[float] | np.ndarray) -> np.ndarray:
    return np.zeros(len(rewards), dtype=np.int64)


def test_one_right_of_sixteen_gives_the_papers_advantages() -> None:
    # mean (1 - 15) / 16 = -0.875; deviations 1.875 and -0.125; unbiased variance (1.875^2 + 15 *
    # 0.125^2) / 15 = 3.75 / 15 = 0.25; std 0.5; in float32 0.5 + 1e-6 = 0.500001013, 1.875 / that =
    # 3.7499923706
    rewards = np.array([1.0] + [-1.0] * 15)
    advantages = group_advantages(rewards, _one_group(rewards), DAPO)
    assert float(advantages[0]) == pytest.approx(3.7499923706, abs=1e-10)
    assert advantages[1:].tolist() == pytest.approx([-0.2499994934] * 15, abs=1e-10)


@pytest.mark.parametrize(
    "rewards",
    [
        np.full(8, -1.3, dtype=np.float32),
        np.array([0.1] * 3),
        np.array([1.0] * 16),
        np.array([0.7]),
    ],
    ids=["eight float32 -1.3", "three 0.1", "all right", "group of one"],
)
@pytest.mark.parametrize("normalize_by_std", [True, False])
@pytest.mark.parametrize("baseline", ["group-mean", "leave-one-out"])
def test_a_group_with_equal_rewards_or_one_response_gets_exactly_zero(
    rewards: np.ndarray, normalize_by_std: bool, baseline: str
) -> None:
    algorithm = _algorithm(normalize_by_std=normalize_by_std, baseline=baseline)
    assert group_advantages(rewards, _one_group(rewards), algorithm).tolist() == [0.0] * len(
        rewards
    )


# rewards 1, 0, -1, -2: mean -0.5, deviations 1.5, 0.5, -0.5, -1.5; leave-one-out 4 / 3 of them, for
# the first 1 - (0 - 1 - 2) / 3 = 2; variance (2.25 + 0.25 + 0.25 + 2.25) / 3 = 5 / 3, std
# 1.2909944, 1.5 / std = 1.1618941
@pytest.mark.parametrize("compat", ["none", "verl"])
@pytest.mark.parametrize(
    ("baseline", "normalize_by_std", "expected"),
    [
        ("group-mean", False, [1.5, 0.5, -0.5, -1.5]),
        ("leave-one-out", False, [2.0, 2 / 3, -2 / 3, -2.0]),
        ("group-mean", True, [1.1618941, 0.3872980, -0.3872980, -1.1618941]),
        ("leave-one-out", True, [1.5491921, 0.5163974, -0.5163974, -1.5491921]),
    ],
)
def test_baselines_with_and_without_the_std(
    baseline: str, normalize_by_std: bool, expected: list[float], compat: str
) -> None:
    rewards = np.array([1.0, 0.0, -1.0, -2.0])
    algorithm = _algorithm(baseline=baseline, normalize_by_std=normalize_by_std, compat=compat)
    advantages = group_advantages(rewards, _one_group(rewards), algorithm)
    assert advantages.dtype == np.float32
    assert advantages.tolist() == pytest.approx(expected, abs=1e-6)


def test_compat_verl_keeps_rounding_noise_of_equal_rewards() -> None:
    # float32: the mean of eight -1.3 is -1.3000001, so the deviation is 2^-23 = 1.1920929e-7 and
    # the std 1.2744e-7 = 2^-23 * sqrt(8 / 7): 1.1920929e-7 / (1.2744e-7 + 1e-6) = 0.1057
    rewards = np.full(8, -1.3, dtype=np.float32)
    advantages = group_advantages(rewards, _one_group(rewards), _algorithm(compat="verl"))
    assert advantages.tolist() == pytest.approx([0.10573447] * 8, rel=1e-6)


@pytest.mark.parametrize("baseline", ["group-mean", "leave-one-out"])
def test_compat_verl_gives_a_group_of_one_its_reward(baseline: str) -> None:
    rewards, group_ids = np.array([2.0, 0.7, 1.0]), np.array([5, 3, 5])
    algorithm = _algorithm(compat="verl", baseline=baseline)
    advantages = group_advantages(rewards, group_ids, algorithm)
    assert float(advantages[1]) == pytest.approx(0.7 / (1 + 1e-6), abs=1e-7)  # mean 0, std 1
    raw = group_advantages(
        rewards, group_ids, algorithm.model_copy(update={"normalize_by_std": False})
    )
    assert float(raw[1]) == pytest.approx(0.7, abs=1e-7)


def test_advantages_do_not_depend_on_row_order() -> None:
    # group 3: 1, -1 -> mean 0, std sqrt(2); group 7: 5, 3 -> mean 4, std sqrt(2): 1 / 1.4142146 =
    # 0.7071063
    rewards, group_ids = np.array([1.0, 5.0, -1.0, 3.0]), np.array([3, 7, 3, 7])
    advantages = group_advantages(rewards, group_ids, DAPO)
    assert advantages.tolist() == pytest.approx(
        [0.7071063, 0.7071063, -0.7071063, -0.7071063], abs=1e-7
    )
    order = np.array([2, 3, 0, 1])
    assert (
        group_advantages(rewards[order], group_ids[order], DAPO).tolist()
        == advantages[order].tolist()
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_rewards_are_refused_and_counted(bad: float) -> None:
    rewards = np.array([1.0, bad, bad, -1.0])
    with pytest.raises(ValueError, match="2 of 4 rewards are not finite"):
        group_advantages(rewards, _one_group(rewards), DAPO)


@pytest.mark.parametrize(
    ("baseline", "compat"),
    [("group-mean", "none"), ("leave-one-out", "none"), ("group-mean", "verl")],
)
@pytest.mark.parametrize("normalize_by_std", [True, False])
def test_uncounted_responses_do_not_affect_siblings(
    baseline: str, compat: str, normalize_by_std: bool
) -> None:
    algorithm = _algorithm(baseline=baseline, compat=compat, normalize_by_std=normalize_by_std)
    # 1, -1, -1 and their mean -1/3 for the one without a score: as a fourth sibling it would leave
    # the mean alone, but make the std sqrt(8/9) instead of sqrt(4/3), and the leave-one-out
    # baseline of the first -7/9, not -1
    rewards = np.array([1.0, -1.0, -1 / 3, -1.0])
    counts = np.array([True, True, False, True])
    advantages = group_advantages(rewards, _one_group(rewards), algorithm, counts)
    assert advantages[2] == 0
    assert (
        advantages[counts].tolist()
        == group_advantages(rewards[counts], np.zeros(3, int), algorithm).tolist()
    )
    assert (
        group_advantages(rewards, _one_group(rewards), algorithm, ~np.isfinite(rewards)).tolist()
        == [0.0] * 4
    )


def test_unscored_responses_are_left_out_of_their_group() -> None:
    batch = build_batch([make_group([1.0, UNSCORED, -1.0])], mask_truncated=False)
    batch = replace(batch, rewards=torch.tensor([1.0, 0.6, -1.0], dtype=torch.float64))
    config = make_config(algorithm={"normalize_by_std": False})
    assert weigh(batch, config).advantages.tolist() == [1.0, 0.0, -1.0]
