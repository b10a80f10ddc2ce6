"""Group advantages: hand-computed values, exactly zero without signal, independent of row order."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dapo_core.algorithm.advantage import ADVANTAGES, WHITENED, response_advantages, weigh
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
    advantages = response_advantages(rewards, _one_group(rewards), DAPO)
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
@pytest.mark.parametrize("name", sorted({*ADVANTAGES} - {*WHITENED}))
def test_a_group_with_equal_rewards_or_one_response_gets_exactly_zero(
    rewards: np.ndarray, name: str
) -> None:
    algorithm = _algorithm(advantage=name)
    assert response_advantages(rewards, _one_group(rewards), algorithm).tolist() == [0.0] * len(
        rewards
    )


# Rewards 1 0 0 1 | 1 1 -1 0.5 of responses with 3 2 4 1 | 5 5 2 8 tokens. Group means 0.5 and
# 0.375; deviations +-0.5 and 0.625 0.625 -1.375 0.125.
# grpo: variances 1 / 3 and (0.390625 * 2 + 1.890625 + 0.015625) / 3 = 0.895833, std 0.577350 and
# 0.946485; rloo: deviations * 4 / 3; opo: means 4 / 10 and (5 + 5 - 2 + 4) / 20 = 0.6;
# batch-std: sqrt((5.25 - 8 * 0.4375^2) / 7) = 0.728869.
# reinforce++: over 30 tokens, mean (3 + 1 + 5 + 5 - 2 + 4) / 30 = 0.533333, sum of squares 3 + 1 +
# 5 + 5 + 2 + 8 / 4 = 18, variance (18 - 30 * 0.284444) / 29 = 0.326437, std 0.571346: 0.466667 /
# 0.571346 = 0.816784.
# reinforce++-baseline: mean (0.5 * (3 - 2 - 4 + 1) + 0.625 * 10 - 2.75 + 1) / 30 = 0.116667, sum
# of squares 0.25 * 10 + 3.90625 + 3.78125 + 0.125 = 10.3125, variance (10.3125 - 0.408333) / 29 =
# 0.341523, std 0.584399: (0.5 - 0.116667) / 0.584399 = 0.655944
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "grpo",
            [0.866024, -0.866024, -0.866024, 0.866024, 0.660337, 0.660337, -1.452742, 0.132067],
        ),
        ("dr-grpo", [0.5, -0.5, -0.5, 0.5, 0.625, 0.625, -1.375, 0.125]),
        (
            "rloo",
            [0.666667, -0.666667, -0.666667, 0.666667, 0.833333, 0.833333, -1.833333, 0.166667],
        ),
        ("opo", [0.6, -0.4, -0.4, 0.6, 0.4, 0.4, -1.6, -0.1]),
        (
            "reinforce++-baseline",
            [0.655944, -1.055214, -1.055214, 0.655944, 0.869838, 0.869838, -2.552477, 0.01426],
        ),
        (
            "reinforce++",
            [0.816784, -0.933467, -0.933467, 0.816784, 0.816784, 0.816784, -2.683719, -0.058342],
        ),
        (
            "batch-std",
            [0.685993, -0.685993, -0.685993, 0.685993, 0.857492, 0.857492, -1.886481, 0.171498],
        ),
    ],
)
def test_each_advantage_has_its_published_values(name: str, expected: list[float]) -> None:
    rewards = np.array([1.0, 0.0, 0.0, 1.0, 1.0, 1.0, -1.0, 0.5])
    groups, num_tokens = np.array([7] * 4 + [2] * 4), np.array([3, 2, 4, 1, 5, 5, 2, 8])
    algorithm = _algorithm(advantage=name)
    found = response_advantages(rewards, groups, algorithm, num_tokens=num_tokens)
    assert found.dtype == np.float32
    assert found.tolist() == pytest.approx(expected, abs=1e-6)
    order = np.array([5, 0, 7, 3, 1, 6, 2, 4])
    shuffled = response_advantages(
        rewards[order], groups[order], algorithm, num_tokens=num_tokens[order]
    )
    assert shuffled.tolist() == pytest.approx(found[order].tolist(), abs=1e-7)
    if name in ("grpo", "dr-grpo", "rloo"):  # verl has these, in float32
        verls = _algorithm(advantage=name, compat="verl")
        assert response_advantages(rewards, groups, verls).tolist() == pytest.approx(
            expected, abs=1e-6
        )


def test_compat_verl_keeps_rounding_noise_of_equal_rewards() -> None:
    # float32: the mean of eight -1.3 is -1.3000001, so the deviation is 2^-23 = 1.1920929e-7 and
    # the std 1.2744e-7 = 2^-23 * sqrt(8 / 7): 1.1920929e-7 / (1.2744e-7 + 1e-6) = 0.1057
    rewards = np.full(8, -1.3, dtype=np.float32)
    advantages = response_advantages(rewards, _one_group(rewards), _algorithm(compat="verl"))
    assert advantages.tolist() == pytest.approx([0.10573447] * 8, rel=1e-6)


def test_compat_verl_gives_a_group_of_one_its_reward() -> None:
    rewards, group_ids = np.array([2.0, 0.7, 1.0]), np.array([5, 3, 5])
    grpo, *raw = (
        response_advantages(rewards, group_ids, _algorithm(compat="verl", advantage=name))[1]
        for name in ("grpo", "dr-grpo", "rloo")
    )
    assert float(grpo) == pytest.approx(0.7 / (1 + 1e-6), abs=1e-7)  # mean 0, std 1
    assert list(map(float, raw)) == pytest.approx([0.7, 0.7], abs=1e-7)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_rewards_are_refused_and_counted(bad: float) -> None:
    rewards = np.array([1.0, bad, bad, -1.0])
    with pytest.raises(ValueError, match="2 of 4 rewards are not finite"):
        response_advantages(rewards, _one_group(rewards), DAPO)


@pytest.mark.parametrize(
    ("name", "compat"), [*((name, "none") for name in ADVANTAGES), ("grpo", "verl")]
)
def test_uncounted_responses_do_not_affect_siblings(name: str, compat: str) -> None:
    algorithm = _algorithm(advantage=name, compat=compat)
    # 1, -1, -1 and their mean -1/3 for the one without a score: as a fourth sibling it would leave
    # the mean alone, but make the std sqrt(8/9) instead of sqrt(4/3), and the leave-one-out
    # baseline of the first -7/9, not -1
    rewards = np.array([1.0, -1.0, -1 / 3, -1.0])
    counts = np.array([True, True, False, True])
    advantages = response_advantages(rewards, _one_group(rewards), algorithm, counts)
    assert advantages[2] == 0
    assert (
        advantages[counts].tolist()
        == response_advantages(rewards[counts], np.zeros(3, int), algorithm).tolist()
    )
    assert (
        response_advantages(rewards, _one_group(rewards), algorithm, ~np.isfinite(rewards)).tolist()
        == [0.0] * 4
    )


def test_unscored_responses_are_left_out_of_their_group() -> None:
    batch = build_batch([make_group([1.0, UNSCORED, -1.0])], mask_truncated=False)
    batch = replace(batch, rewards=torch.tensor([1.0, 0.6, -1.0], dtype=torch.float64))
    config = make_config(algorithm={"advantage": "dr-grpo"})
    assert weigh(batch, config).advantages.tolist() == [1.0, 0.0, -1.0]


def test_masked_tokens_do_not_count_in_the_baseline() -> None:
    # tokens 3 and 1 of rewards 1 and 0, the second response cut and masked: the baseline is 1
    groups = [make_group([1.0, 0.0], num_response_tokens=[3, 1])]
    batch = build_batch(groups, mask_truncated=False)
    assert weigh(batch, make_config(algorithm={"advantage": "opo"})).advantages.tolist() == [
        0.25,
        -0.75,
    ]
    batch.response_mask[1] = False
    assert weigh(batch, make_config(algorithm={"advantage": "opo"})).advantages.tolist() == [0, -1]
