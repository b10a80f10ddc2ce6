"""Group advantages: worked by hand, exactly zero without signal, blind to the order of groups."""

from __future__ import annotations

import numpy as np
import pytest

from dapo_core.advantage import group_advantages


def _one_group(rewards: list[float] | np.ndarray) -> np.ndarray:
    return np.zeros(len(rewards), dtype=np.int64)


def test_one_right_of_sixteen() -> None:
    # mean (1 - 15) / 16 = -0.875; deviations 1.875 and -0.125; unbiased variance (1.875^2 + 15 * 0.125^2) / 15
    # = 3.75 / 15 = 0.25; std 0.5; in float32 0.5 + 1e-6 = 0.500001013, 1.875 / that = 3.7499923706
    rewards = np.array([1.0] + [-1.0] * 15)
    advantages = group_advantages(rewards, _one_group(rewards))
    assert float(advantages[0]) == pytest.approx(3.7499923706, abs=1e-10)
    assert advantages[1:].tolist() == pytest.approx([-0.2499994934] * 15, abs=1e-10)


@pytest.mark.parametrize(
    "rewards",
    [np.full(8, -1.3, dtype=np.float32), np.array([0.1] * 3), np.array([1.0] * 16), np.array([0.7])],
    ids=["eight float32 -1.3", "three 0.1", "all right", "group of one"],
)
@pytest.mark.parametrize("normalize_by_std", [True, False])
def test_a_group_without_two_rewards_gets_exactly_zero(rewards: np.ndarray, normalize_by_std: bool) -> None:
    assert group_advantages(rewards, _one_group(rewards), normalize_by_std).tolist() == [0.0] * len(rewards)


def test_without_the_std_the_advantage_is_the_distance_from_the_mean() -> None:
    # mean (1 + 0 - 1 - 2) / 4 = -0.5
    rewards = np.array([1.0, 0.0, -1.0, -2.0])
    assert group_advantages(rewards, _one_group(rewards), normalize_by_std=False).tolist() == [
        1.5,
        0.5,
        -0.5,
        -1.5,
    ]


def test_each_group_is_measured_against_itself_wherever_its_members_stand() -> None:
    # group 3: 1, -1 -> mean 0, std sqrt(2); group 7: 5, 3 -> mean 4, std sqrt(2): 1 / 1.4142146 = 0.7071063
    rewards, group_ids = np.array([1.0, 5.0, -1.0, 3.0]), np.array([3, 7, 3, 7])
    advantages = group_advantages(rewards, group_ids)
    assert advantages.tolist() == pytest.approx([0.7071063, 0.7071063, -0.7071063, -0.7071063], abs=1e-7)
    order = np.array([2, 3, 0, 1])
    assert group_advantages(rewards[order], group_ids[order]).tolist() == advantages[order].tolist()


def test_the_order_of_groups_does_not_matter() -> None:
    draw = np.random.default_rng(0)
    rewards, group_ids = draw.normal(size=40), np.repeat(np.arange(5), 8)
    advantages = group_advantages(rewards, group_ids).reshape(5, 8)
    order = np.array([3, 0, 4, 1, 2])
    moved = group_advantages(rewards.reshape(5, 8)[order].ravel(), group_ids).reshape(5, 8)
    assert moved.tolist() == advantages[order].tolist()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_reward_that_is_not_finite_is_refused_and_counted(bad: float) -> None:
    rewards = np.array([1.0, bad, bad, -1.0])
    with pytest.raises(ValueError, match="2 of 4 rewards are not finite"):
        group_advantages(rewards, _one_group(rewards))
