"""Metrics of a step, from hand-made batches."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from dapo_core.algorithm.batch import Batch, build_batch
from dapo_core.algorithm.loss import LossSums
from dapo_core.algorithm.update import RoutingSums, Update
from dapo_core.config.algorithm import KLConfig
from dapo_core.draw.account import Draw, TokenAccount
from dapo_core.draw.groups import Group, Rollout
from dapo_core.draw.prompts import Prompt
from dapo_core.engines.base import FinishReason
from dapo_core.metrics.step import (
    batch_metrics,
    draw_metrics,
    response_metrics,
    routing_metrics,
    seqlen_metrics,
    update_metrics,
)
from dapo_core.model.inputs import ModelInput
from dapo_core.reward.scorers import Verdict
from tests.batches import UNSCORED, make_group


def _rollout(
    num_tokens: int, score: float, verdict: Verdict, finish: FinishReason, penalty: float
) -> Rollout:
    acc = float(verdict == "right")
    return Rollout(
        [7] * num_tokens,
        [-1.0] * num_tokens,
        finish,
        score,
        penalty,
        verdict,
        acc,
        [(0, num_tokens)],
    )


PROMPT = Prompt(0, ModelInput((5, 6)), "arithmetic", "1")


def _groups() -> list[Group]:
    first = [_rollout(3, 1.0, "right", "stop", 0.0), _rollout(4, -1.0, "wrong", "length", -0.5)]
    second = [
        _rollout(1, -1.0, "no_answer", "stop", 0.0),
        _rollout(0, -1.0, "no_answer", "abort", 0.0),
    ]
    return [
        Group(0, PROMPT, first),
        Group(1, Prompt(1, ModelInput((5, 6, 7)), "arithmetic", "1"), second),
    ]


def test_response_metrics_match_hand_computed_values() -> None:
    # scores + overlong - KL; of the empty response it says nothing
    rewards = torch.tensor([1.0, -1.75, -1.25, -9.0])
    assert response_metrics(_groups(), rewards, max_prompt_tokens=3) == pytest.approx(
        {
            "critic/score/mean": -1 / 3,  # (1 - 1 - 1) / 3 without the empty response
            "critic/score/max": 1.0,
            "critic/score/min": -1.0,
            "critic/rewards/mean": -2 / 3,  # (1 - 1.75 - 1.25) / 3
            "critic/rewards/max": 1.0,
            "critic/rewards/min": -1.75,
            "response_length/mean": 2.0,  # (3 + 4 + 1 + 0) / 4
            "response_length/max": 4.0,
            "response_length/min": 0.0,
            "response_length_non_aborted/mean": 8 / 3,
            "response_length_non_aborted/max": 4.0,
            "response_length_non_aborted/min": 1.0,
            "response/aborted_ratio": 0.25,
            "response_length/clip_ratio": 0.25,
            "prompt_length/mean": 2.5,  # (2 + 2 + 3 + 3) / 4
            "prompt_length/max": 3.0,
            "prompt_length/min": 2.0,
            "prompt_length/clip_ratio": 0.5,  # the second of two prompts has 3 tokens
            "reward/overlong_ratio": 0.25,
            "reward/right_ratio": 0.25,
            "reward/wrong_ratio": 0.25,
            "reward/no_answer_ratio": 0.5,
            "reward/error_ratio": 0.0,
            "reward/timeout_ratio": 0.0,
            "perf/total_num_tokens": 18.0,  # 8 + 2 + 2 + 3 + 3
        }
    )


def test_the_clip_ratio_counts_responses_stopped_at_the_limit() -> None:
    longest = make_group([1.0, -1.0, 1.0, 1.0], num_response_tokens=[9, 2, 9, 1])
    assert response_metrics([longest], torch.zeros(4), 9)["response_length/clip_ratio"] == 0.0
    cut = replace(
        longest,
        rollouts=[replace(longest.rollouts[0], finish_reason="length"), *longest.rollouts[1:]],
    )
    assert response_metrics([cut], torch.zeros(4), 9)["response_length/clip_ratio"] == 0.25


def test_unscored_responses_do_not_enter_score_means() -> None:
    group = make_group([1.0, UNSCORED, 0.5])
    metrics = response_metrics(
        [group], torch.tensor([rollout.reward for rollout in group.rollouts]), max_prompt_tokens=9
    )
    # without the 0.0
    assert (metrics["critic/score/mean"], metrics["critic/score/min"]) == (0.75, 0.5)
    assert metrics["critic/rewards/mean"] == 0.75
    failed = replace(
        group, rollouts=[replace(group.rollouts[0], verdict="error"), *group.rollouts[1:]]
    )
    metrics = response_metrics([failed], torch.zeros(3), 9)
    assert metrics["reward/error_ratio"] == metrics["reward/timeout_ratio"] == pytest.approx(1 / 3)


def test_empty_responses_do_not_enter_score_means() -> None:
    metrics = response_metrics([make_group([1.0, 1.0], num_response_tokens=0)], torch.zeros(2), 9)
    assert metrics["response/aborted_ratio"] == 1.0
    assert not [
        name for name in metrics if name.startswith(("critic/", "response_length_non_aborted/"))
    ]
    assert all(math.isfinite(value) for value in metrics.values())


def _two_responses() -> Batch:
    """Of 2 and 1 tokens, with advantages 1 and -2; NaN beyond the second."""
    batch = build_batch([make_group([1.0, 1.0], num_response_tokens=[2, 1])], mask_truncated=False)
    return replace(batch, advantages=torch.tensor([1.0, -2.0]))


@pytest.mark.parametrize(
    ("token_weights", "entropy"),
    [
        ([[1 / 3, 1 / 3], [1 / 3, 0.0]], 2.0),  # token-mean: (1 + 2 + 3) / 3
        ([[1 / 4, 1 / 4], [1 / 2, 0.0]], 2.25),  # seq-mean-token-mean: (1.5 + 3) / 2
    ],
)
def test_batch_metrics_match_hand_computed_values(
    token_weights: list[list[float]], entropy: float
) -> None:
    entropies = torch.tensor([[1.0, 2.0], [3.0, float("nan")]])
    assert batch_metrics(_two_responses(), entropies, torch.tensor(token_weights)) == pytest.approx(
        {
            "critic/advantages/mean": 0.0,  # (1 + 1 - 2) / 3: weighted by length
            "critic/advantages/max": 1.0,
            "critic/advantages/min": -2.0,
            "critic/returns/mean": 0.0,
            "critic/returns/max": 1.0,
            "critic/returns/min": -2.0,
            "actor/entropy": entropy,
            "perf/trained_response_tokens": 3.0,
        },
        rel=1e-6,
        abs=1e-9,
    )


def test_masked_tokens_do_not_count_as_trained() -> None:
    batch = _two_responses()
    weights = torch.ones(2, 2)
    cut = replace(batch, response_mask=torch.tensor([[False, False], [True, False]]))
    metrics = batch_metrics(cut, torch.ones(2, 2), weights)
    assert metrics["perf/trained_response_tokens"] == 1.0
    assert metrics["critic/advantages/max"] == -2.0  # of the one token under the mask
    masked = replace(batch, response_mask=torch.zeros_like(batch.response_mask))
    assert batch_metrics(masked, torch.ones(2, 2), weights) == {"perf/trained_response_tokens": 0.0}


def test_load_balance_is_reported_with_and_without_balancing() -> None:
    # B = 6 rows on D = 2 ranks in mini-batches of 4 and 2: 9 | 1 1 1 and 4 | 8
    lengths = np.array([9, 1, 1, 1, 4, 8])
    metrics = seqlen_metrics(
        lengths, [_update(0.0, 1, 1.0, rank_tokens=tokens) for tokens in ((9, 3), (4, 8))]
    )
    assert metrics == {
        "global_seqlen/min": 11.0,  # 9 + 1 + 1 in the first half,
        "global_seqlen/max": 13.0,  # 1 + 4 + 8 in the second
        "global_seqlen/minmax_diff": 2.0,
        "global_seqlen/balanced_min": 11.0,  # 1 + 1 + 1 + 8
        "global_seqlen/balanced_max": 13.0,  # 9 + 4
        "global_seqlen/mean": 12.0,
    }
    two_passes = [_update(0.0, 1, 1.0, rank_tokens=tokens) for tokens in ((9, 3), (4, 8)) * 2]
    assert seqlen_metrics(lengths, two_passes, 2) == metrics
    more_ranks_than_rows = seqlen_metrics(
        np.array([5, 3]), [_update(0.0, 1, 1.0, rank_tokens=(5, 3, 0))]
    )
    assert (
        more_ranks_than_rows["global_seqlen/min"]
        == more_ranks_than_rows["global_seqlen/balanced_min"]
        == 0.0
    )


NO_KL = KLConfig()
KL_IN_LOSS = KLConfig(place="loss", coefficient=0.25)


def _update(
    loss: float,
    num_tokens: float,
    grad_norm: float,
    is_skipped: bool = False,
    learning_rate: float = 0.004,
    rank_tokens: tuple[int, ...] = (4, 7),
) -> Update:
    sums = LossSums(loss, loss / 2, num_tokens, num_tokens / 10, 1.0, num_tokens / 20 - 1)
    return Update(sums, grad_norm, is_skipped, learning_rate, 1, rank_tokens)


def test_clip_shares_are_weighted_by_tokens() -> None:
    expected = {
        "actor/pg_loss": 0.3,  # mean over mini-batches
        "actor/pg_clipfrac": 0.1,  # (1 + 3) / 40
        "actor/pg_clipfrac_lower": 0.05,  # (1 + 1) / 40
        "actor/ppo_kl": 0.0,  # (-0.5 + 0.5) / 40
        "actor/grad_norm": 2.0,
        "actor/skipped_updates": 0.0,
        "actor/lr": 0.004,  # of the last
    }
    updates = [_update(0.2, 10, 1.0, learning_rate=0.002), _update(0.4, 30, 3.0)]
    assert update_metrics(updates, NO_KL) == pytest.approx(expected)
    with_kl = {**expected, "actor/kl_loss": 0.15, "actor/kl_coef": 0.25}  # (0.1 + 0.2) / 2
    assert update_metrics(updates, KL_IN_LOSS) == pytest.approx(with_kl)


def test_skipped_updates_are_counted_and_do_not_spoil_the_means() -> None:
    nan = float("nan")
    overflown = _update(0.4, 30, float("inf"), is_skipped=True)
    broken = _update(nan, 30, nan, is_skipped=True, learning_rate=0.002)
    metrics = update_metrics([_update(0.2, 10, 1.0), overflown, broken], KL_IN_LOSS)
    assert metrics == pytest.approx(
        {
            "actor/pg_loss": 0.3,  # of the two mini-batches with a loss
            "actor/kl_loss": 0.15,
            "actor/kl_coef": 0.25,
            "actor/pg_clipfrac": 0.1,
            "actor/pg_clipfrac_lower": 0.05,
            "actor/ppo_kl": 0.0,
            "actor/grad_norm": 1.0,
            "actor/skipped_updates": 2.0,
            "actor/lr": 0.002,
        }
    )
    assert "actor/grad_norm" not in update_metrics([overflown], NO_KL)
    assert update_metrics([broken], NO_KL) == {"actor/skipped_updates": 1.0, "actor/lr": 0.002}


def test_updates_without_tokens_have_no_shares() -> None:
    empty = Update(LossSums(0.0, 0.0, 0.0, 0.0, 0.0, 0.0), 0.0, False, 0.5, 1)
    assert update_metrics([empty, empty], NO_KL) == {
        "actor/grad_norm": 0.0,
        "actor/skipped_updates": 0.0,
        "actor/lr": 0.5,
        "actor/pg_loss": 0.0,
    }


def test_uneven_experts_show_in_the_metrics_of_a_mixture() -> None:
    """Two layers of two experts, top-1, over two mini-batches of 3 and 5 tokens."""
    parts = [RoutingSums([[3, 0], [2, 1]], 2.0, 3, 1.5), RoutingSums([[5, 0], [2, 3]], 6.0, 5, 0.5)]
    updates = [replace(_update(0.1, 10, 1.0), routing=routing) for routing in parts]
    nan = replace(_update(float("nan"), 10, 1.0), routing=parts[0])
    assert routing_metrics([*updates, nan]) == pytest.approx(
        {
            "router/load/max": 2.0,  # [8, 0] and [4, 4], each with mean 4
            "router/load/min": 0.0,
            "router/load/std": math.sqrt(0.5),  # of 2, 0, 1, 1
            "router/unused_ratio": 0.25,
            "router/entropy": 0.5,  # 8 / (8 tokens x 2 layers)
            "router/aux_loss": 1.0,
        }
    )
    off = [replace(update, routing=replace(parts[0], balance_loss=None)) for update in updates]
    assert "router/aux_loss" not in routing_metrics(off)
    assert routing_metrics([_update(0.1, 10, 1.0)]) == {}


def test_draw_metrics_match_the_account() -> None:
    def rollouts(*lengths: int, finish: FinishReason = "stop") -> list[Rollout]:
        return [
            _rollout(length, 1.0, "right" if length == 10 else "wrong", finish, 0.0)
            for length in lengths
        ]

    account = TokenAccount(generated_tokens=70, carried_out_groups=4, carried_out_tokens=9)
    finished = {
        "kept": rollouts(10, 20),
        "surplus": rollouts(20, finish="length"),
        "all_wrong": rollouts(3, 7),
    }
    for name, own in finished.items():
        account.add(name, own)  # type: ignore[arg-type]
        account.add_finished(Group(0, PROMPT, own))
    draw = Draw(
        [replace(_groups()[0], rollouts=[replace(finished["kept"][0], versions=[(5, 4), (7, 6)])])],
        6,
        account,
    )
    metrics = draw_metrics(draw, gen_prompts=4, policy_version=7)
    expected = {
        "sampler/carried_out_groups": 4,
        "sampler/carried_out_tokens": 9,
        "sampler/waste_ratio": 0.25,  # 10 / (10 + 30): surplus is open
        "sampler/accuracy": 0.2,  # 1 of 5 finished responses
        "train/num_gen_batches": 1.5,  # 6 / 4
        "perf/generated_tokens": 70,
        "perf/trained_response_tokens": 0,
        "sampler/kept_groups": 1,
        "sampler/kept_tokens": 30,
        "sampler/all_right_tokens": 0,
        "sampler/finished_response_length": 12,  # (10 + 20 + 20 + 3 + 7) / 5
        "sampler/finished_clip_ratio": 0.2,
        "sampler/kept_response_length": 15,
        "sampler/surplus_response_length": 20,
        "sampler/surplus_clip_ratio": 1,
        "sampler/staleness/mean": 0.8,  # 4 tokens of 10 are two optimizer steps old
        "sampler/staleness/max": 2,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    nothing = draw_metrics(Draw([], 0, TokenAccount()), 4, 0)
    assert not [
        name for name in nothing if "length" in name or "clip" in name or "staleness" in name
    ]
    assert "sampler/accuracy" not in nothing  # nothing finished: neither right nor wrong
