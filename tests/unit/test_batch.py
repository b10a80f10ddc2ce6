"""Batches: their layout, and splits that lose nothing and respect the token limit."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_core.algorithm.balance import RankShare, mini_batches, split_batch
from dapo_core.algorithm.batch import build_batch, random_order, shuffled
from dapo_core.algorithm.loss import LossTotals
from dapo_core.draw.groups import Group, Rollout
from dapo_core.draw.prompts import Prompt
from dapo_core.engines.base import FinishReason
from dapo_core.errors import DataError
from dapo_core.model.inputs import ImageReference, ModelInput
from tests.batches import UNSCORED, make_group, random_batch
from tests.plain import plain


def _rollout(response_ids: list[int], finish_reason: FinishReason = "stop") -> Rollout:
    log_probs = [-0.5 * (place + 1) for place in range(len(response_ids))]
    tokens = np.array(response_ids, np.int32), np.array(log_probs, np.float32)
    return Rollout(*tokens, finish_reason, 1.0, 0.0, "right", 1.0, [])


def _groups() -> list[Group]:
    prompts = [
        Prompt(0, ModelInput((5, 6)), "arithmetic", "1"),
        Prompt(1, ModelInput((3, 3, 3)), "arithmetic", "1"),
    ]
    first = [_rollout([7, 8, 2]), _rollout([9, 9, 9, 9], "length")]
    second = [_rollout([4]), _rollout([], "abort")]
    return [Group(0, prompts[0], first), Group(1, prompts[1], second)]


def test_layout_matches_the_documented_example() -> None:
    batch = replace(
        build_batch(_groups(), mask_truncated=False),
        advantages=torch.tensor([1.0, -1.0, 0.5, -0.5]),
    )
    # the widest row is 2 + 4 = 6 tokens, the longest response 4
    assert batch.token_ids.tolist() == [
        [5, 6, 7, 8, 2, 0],
        [5, 6, 9, 9, 9, 9],
        [3, 3, 3, 4, 0, 0],
        [3, 3, 3, 0, 0, 0],
    ]
    assert batch.token_ids.dtype == torch.int32  # half the memory of a step, and of what is sent
    assert batch.prompt_lengths.tolist() == [2, 2, 3, 3]
    assert batch.response_lengths.tolist() == [3, 4, 1, 0]
    assert batch.response_mask.int().tolist() == [
        [1, 1, 1, 0],
        [1, 1, 1, 1],
        [1, 0, 0, 0],
        [0, 0, 0, 0],
    ]
    assert batch.rollout_log_probs.tolist() == [
        [-0.5, -1.0, -1.5, 0.0],
        [-0.5, -1.0, -1.5, -2.0],
        [-0.5, 0.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 0.0],
    ]
    assert batch.old_log_probs is None
    assert not batch.is_stale.any()
    assert batch.advantages.tolist() == [1.0, -1.0, 0.5, -0.5]
    assert (batch.num_responses, LossTotals.of(batch)) == (
        4,
        LossTotals(8, 3, num_sequence_tokens=18),
    )
    assert batch.lengths.tolist() == [5, 6, 4, 3]


def test_mask_truncated_excludes_truncated_responses_from_the_loss() -> None:
    batch = build_batch(_groups(), mask_truncated=True)
    assert batch.response_mask.int().tolist() == [
        [1, 1, 1, 0],
        [0, 0, 0, 0],
        [1, 0, 0, 0],
        [0, 0, 0, 0],
    ]
    assert LossTotals.of(batch) == LossTotals(4, 2, num_sequence_tokens=18)


def test_select_orders_and_trims() -> None:
    batch = replace(
        build_batch(_groups(), mask_truncated=False),
        advantages=torch.tensor([1.0, -1.0, 0.5, -0.5]),
    )
    values = torch.arange(16.0).view(4, 4)
    later = {"old_log_probs": batch.rollout_log_probs * 2, "ref_log_probs": values}
    chosen = replace(batch, **later, importance_weights=values + 100).select([2, 0])
    assert chosen.token_ids.tolist() == [[3, 3, 3, 4, 0], [5, 6, 7, 8, 2]]
    assert chosen.response_mask.int().tolist() == [[1, 0, 0], [1, 1, 1]]
    assert chosen.rollout_log_probs.tolist() == [[-0.5, 0.0, 0.0], [-0.5, -1.0, -1.5]]
    assert chosen.old_log_probs.tolist() == [[-1.0, 0.0, 0.0], [-1.0, -2.0, -3.0]]
    assert chosen.ref_log_probs is not None
    assert chosen.importance_weights is not None
    assert chosen.ref_log_probs.tolist() == [[8.0, 9.0, 10.0], [0.0, 1.0, 2.0]]
    assert chosen.importance_weights.tolist() == [[108.0, 109.0, 110.0], [100.0, 101.0, 102.0]]
    assert chosen.advantages.tolist() == [0.5, 1.0]
    empty = batch.select([3])
    assert (empty.token_ids.tolist(), empty.response_mask.tolist()) == ([[3, 3, 3]], [[False]])
    assert (empty.ref_log_probs, empty.importance_weights) == (None, None)


def test_a_sequence_longer_than_a_micro_batch_is_refused_with_the_key() -> None:
    group = make_group([1.0] * 3, num_response_tokens=[2, 13, 1], num_prompt_tokens=4)
    batch = build_batch([group], mask_truncated=False)
    with pytest.raises(
        DataError, match=r"response 1 of the batch has 17 tokens .* raise train\.micro_batch_tokens"
    ):
        split_batch(batch, 1, max_tokens=16)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 5), st.integers(1, 4), st.integers(1, 9), st.integers(22, 90), st.integers(0, 50)
)
def test_ranks_get_equally_many_micro_batches_and_every_response_once(
    num_groups: int, group_size: int, num_ranks: int, max_tokens: int, seed: int
) -> None:
    batch = random_batch(num_groups, group_size, seed)
    shares, indices = split_batch(batch, num_ranks, max_tokens)
    assert len(shares) == len(indices) == num_ranks
    assert len({len(share.micro_batches) for share in shares}) == 1
    assert sorted(np.concatenate(indices).tolist()) == list(range(batch.num_responses))
    for share, rows in zip(shares, indices, strict=True):
        held = sorted(row for part in share.micro_batches for row in part.tolist())
        assert held == list(range(len(rows)))
        for local, row in enumerate(rows):
            length = batch.lengths[row]
            assert (
                share.batch.token_ids[local, :length].tolist()
                == batch.token_ids[row, :length].tolist()
            )


def test_ranks_without_responses_still_take_part() -> None:
    batch = random_batch(num_groups=1, group_size=2)
    shares, indices = split_batch(batch, 5, 4096)
    assert [len(rows) for rows in indices].count(1) == 2
    assert [len(rows) for rows in indices].count(0) == 3
    assert [sum(len(part) for part in share.micro_batches) for share in shares] == [
        len(rows) for rows in indices
    ]
    # something to run the forward pass on
    assert all(share.batch.num_responses == 1 for share in shares)


def test_unscored_responses_are_masked() -> None:
    batch = build_batch([make_group([1.0, UNSCORED]), make_group([-1.0])], mask_truncated=False)
    assert batch.group_ids.tolist() == [0, 0, 1]
    assert batch.rewards.tolist() == [1.0, 0.0, -1.0]
    assert batch.is_scored.tolist() == [True, False, True]
    assert batch.response_mask.tolist() == [[True] * 3, [False] * 3, [True] * 3]
    assert batch.select([2]).rewards.tolist() == [-1.0]


@pytest.mark.parametrize(
    ("versions", "stale"),
    [
        ([(3, 2), (4, 1), (5, 3)], "TTTFFF"),  # suspended twice
        ([(3, 1), (5, 2), (5, 3)], "TFFFFF"),
        ([(5, 6)], "FFFFFF"),
        ([(4, 6)], "TTTTTT"),
    ],
)
def test_each_token_is_stale_by_the_version_that_sampled_it(
    versions: list[tuple[int, int]], stale: str
) -> None:
    group = make_group([1.0, -1.0], num_response_tokens=[6, 2], policy_version=5)
    group.rollouts[0].versions[:] = versions
    batch = build_batch([group], mask_truncated=False, policy_version=5)
    assert batch.is_stale.tolist() == [[letter == "T" for letter in stale], [False] * 6]


def test_mini_batches_are_not_ordered_by_finishing_time() -> None:
    """A mini-batch of the shortest responses would weight their tokens more."""
    as_finished = [
        make_group([1.0, -1.0], number, num_response_tokens=number + 1) for number in range(64)
    ]
    groups = shuffled(as_finished, seed=3, step=1)
    assert sorted(group.prompt.index for group in groups) == list(range(64))
    tokens = np.array([group.num_response_tokens for group in groups]).reshape(4, 16).sum(axis=1)
    # 4 mini-batches of 16: as finished they have 272, 784, 1296 and 1808 tokens, at random 1040 +-
    # 129
    assert tokens.min() > 1040 - 3 * 129
    assert tokens.max() < 1040 + 3 * 129
    # a resumed step is the same
    assert plain(shuffled(as_finished, seed=3, step=1)) == plain(groups)
    assert plain(shuffled(as_finished, seed=3, step=2)) != plain(groups)


def test_mini_batches_contain_every_response_once() -> None:
    batch = random_batch(num_groups=5, group_size=2)
    parts = [batch.select(rows) for rows in mini_batches(batch, 2)]
    assert [part.num_responses for part in parts] == [4, 4, 2]
    assert torch.cat([part.advantages for part in parts]).tolist() == batch.advantages.tolist()
    (whole,) = mini_batches(batch, 5)
    assert whole.tolist() == list(range(10))


def test_mini_batches_keep_groups_whole() -> None:
    batch = random_batch(num_groups=5, group_size=2)
    rows = mini_batches(batch, 2, [3, 0, 4, 1, 2])
    assert [each.tolist() for each in rows] == [[6, 7, 0, 1], [8, 9, 2, 3], [4, 5]]
    assert (
        random_order(64, 3, 1, 1).tolist() != random_order(64, 3, 1, 2).tolist() != list(range(64))
    )
    assert random_order(64, 3, 1, 1).tolist() == random_order(64, 3, 1, 1).tolist()


def test_an_empty_micro_batch_is_a_masked_row() -> None:
    share = RankShare(random_batch(1, 2), [np.array([1]), np.array([], dtype=np.int64)])
    assert share.micro_batch(0).response_mask.any()
    empty = share.micro_batch(1)
    assert (empty.num_responses, empty.response_mask.any()) == (1, False)


def test_pictures_stay_with_their_rows_and_the_probe_shows_one() -> None:
    """Without a picture, the probe could not see an engine that keeps the features of old ones."""
    image = ImageReference("a.png", (1, 2, 4), first=0, num_tokens=2)
    text, pictured = make_group([1.0, -1.0], 0), make_group([1.0, -1.0], 1)
    assert build_batch([text], mask_truncated=False).images is None
    prompt = replace(pictured.prompt, input=replace(pictured.prompt.input, images=(image,)))
    batch = build_batch([text, replace(pictured, prompt=prompt)], mask_truncated=False)
    assert batch.images == [(), (), (image,), (image,)]
    assert batch.select([3, 0]).images == [(image,), ()]
    assert batch.probe.images == [(image,)]
    # vLLM scores a sequence only if it could sample one more token
    assert batch.probe.token_ids.tolist() == batch.select([2]).token_ids[:, :-1].tolist()
    one_token = build_batch([make_group([1.0], num_response_tokens=1)], mask_truncated=False)
    assert one_token.probe.response_lengths.tolist() == [1]
    long = build_batch([make_group([1.0], num_response_tokens=3000)], mask_truncated=False)
    assert long.probe.lengths.tolist() == [2048]  # vLLM holds the logits of all its tokens
    shares, _ = split_batch(batch, num_data_ranks=2, max_tokens=100)
    held = [len(images) for share in shares for images in share.batch.images or ()]
    assert sorted(held) == [0, 0, 1, 1]
