"""Batches: the layout by hand, and splits that lose nothing and keep their cap."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_core.batch import balance_over_ranks, build_batch, micro_batches, split_batch
from dapo_core.data import Prompt
from dapo_core.engines import FinishReason
from dapo_core.rollout import Group, Rollout
from tests.batches import make_group, random_batch

NAN = float("nan")


def _rollout(response_ids: list[int], finish_reason: FinishReason = "stop") -> Rollout:
    log_probs = [-0.5 * (place + 1) for place in range(len(response_ids))]
    return Rollout(response_ids, log_probs, finish_reason, 1.0, 0.0, "right", 1.0)


def _groups() -> list[Group]:
    return [
        Group(Prompt(0, (5, 6), "arithmetic", "1"), [_rollout([7, 8, 2]), _rollout([9, 9, 9, 9], "length")], 0),
        Group(Prompt(1, (3, 3, 3), "arithmetic", "1"), [_rollout([4]), _rollout([], "abort")], 0),
    ]


def test_layout() -> None:
    batch = build_batch(_groups(), np.array([1.0, -1.0, 0.5, -0.5]), mask_truncated=False)
    # the widest row is 2 + 4 = 6 tokens, the longest response 4
    assert batch.token_ids.tolist() == [
        [5, 6, 7, 8, 2, 0],
        [5, 6, 9, 9, 9, 9],
        [3, 3, 3, 4, 0, 0],
        [3, 3, 3, 0, 0, 0],
    ]
    assert batch.prompt_lengths.tolist() == [2, 2, 3, 3]
    assert batch.response_lengths.tolist() == [3, 4, 1, 0]
    assert batch.response_mask.int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert batch.rollout_log_probs.tolist() == [
        [-0.5, -1.0, -1.5, 0.0],
        [-0.5, -1.0, -1.5, -2.0],
        [-0.5, 0.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 0.0],
    ]
    assert batch.old_log_probs.isnan().all()
    assert batch.advantages.tolist() == [1.0, -1.0, 0.5, -0.5]
    assert (batch.num_responses, batch.num_loss_tokens, batch.num_loss_responses) == (4, 8, 3)
    assert batch.lengths.tolist() == [5, 6, 4, 4]  # the empty response still takes one column


def test_truncated_responses_can_be_left_out_of_the_loss() -> None:
    batch = build_batch(_groups(), np.zeros(4), mask_truncated=True)
    assert batch.response_mask.int().tolist() == [[1, 1, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert (batch.num_loss_tokens, batch.num_loss_responses) == (4, 2)


def test_select_orders_and_trims() -> None:
    batch = build_batch(_groups(), np.array([1.0, -1.0, 0.5, -0.5]), mask_truncated=False)
    chosen = batch.with_old_log_probs(batch.rollout_log_probs * 2).select([2, 0])
    assert chosen.token_ids.tolist() == [[3, 3, 3, 4, 0], [5, 6, 7, 8, 2]]
    assert chosen.response_mask.int().tolist() == [[1, 0, 0], [1, 1, 1]]
    assert chosen.rollout_log_probs.tolist() == [[-0.5, 0.0, 0.0], [-0.5, -1.0, -1.5]]
    assert chosen.old_log_probs.tolist() == [[-1.0, 0.0, 0.0], [-1.0, -2.0, -3.0]]
    assert chosen.advantages.tolist() == [0.5, 1.0]
    empty = batch.select([3])
    assert (empty.token_ids.tolist(), empty.response_mask.tolist()) == ([[3, 3, 3, 0]], [[False]])


@settings(deadline=None)
@given(st.lists(st.integers(1, 3000), max_size=60), st.integers(1, 9))
def test_balance_gives_every_index_to_exactly_one_rank(lengths: list[int], num_ranks: int) -> None:
    parts = balance_over_ranks(np.array(lengths, dtype=np.int64), num_ranks)
    assert len(parts) == num_ranks
    assert sorted(index for part in parts for index in part.tolist()) == list(range(len(lengths)))
    loads = [sum(lengths[index] for index in part) for part in parts]
    # the heaviest rank got its last sequence while it was the lightest
    assert max(loads) - min(loads) <= max(lengths, default=0)


def test_balance_is_close_to_even_on_uneven_lengths() -> None:
    lengths = np.random.default_rng(1).integers(50, 20_000, size=512)
    loads = np.array([lengths[part].sum() for part in balance_over_ranks(lengths, 8)])
    assert loads.max() / loads.mean() < 1.005


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(50, 300))
def test_micro_batches_hold_everything_once_within_the_cap(lengths: list[int], max_tokens: int) -> None:
    parts = micro_batches(np.array(lengths), max_tokens)
    assert sorted(index for part in parts for index in part.tolist()) == list(range(len(lengths)))
    for part in parts:
        assert len(part) * max(lengths[index] for index in part) <= max_tokens


def test_micro_batches_put_similar_lengths_together() -> None:
    # longest first: 9 alone (2 x 9 > 16), 8 and 7 as 2 x 8 = 16, 2 and 2 and 1 as 3 x 2 = 6
    parts = micro_batches(np.array([2, 9, 7, 2, 8, 1]), 16)
    assert [part.tolist() for part in parts] == [[1], [4, 2], [0, 3, 5]]


def test_a_sequence_that_fits_no_micro_batch_is_named_with_the_key() -> None:
    with pytest.raises(ValueError, match=r"response 1 has 17 tokens .* raise train\.micro_batch_tokens"):
        micro_batches(np.array([3, 17, 5]), 16)


def test_the_cap_counts_the_column_of_empty_responses() -> None:
    group = make_group([1.0] * 4, num_response_tokens=0, num_prompt_tokens=10)
    batch = build_batch([group], np.zeros(4), mask_truncated=False)
    (share,), _ = split_batch(batch, 1, max_tokens=20)
    sizes = [share.batch.select(rows).token_ids.numel() for rows in share.micro_batches]
    assert max(sizes) <= 20, sizes  # rows are 11 wide, so one each


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 9), st.integers(22, 90), st.integers(0, 50))
def test_every_rank_gets_as_many_micro_batches_and_each_response_once(
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
            assert share.batch.token_ids[local, :length].tolist() == batch.token_ids[row, :length].tolist()
        for part in (part for part in share.micro_batches if len(part)):
            assert share.batch.select(part).token_ids.numel() <= max_tokens


def test_more_ranks_than_responses() -> None:
    batch = random_batch(num_groups=1, group_size=2)
    shares, indices = split_batch(batch, 5, 4096)
    assert [len(rows) for rows in indices].count(1) == 2
    assert [len(rows) for rows in indices].count(0) == 3
    assert [sum(len(part) for part in share.micro_batches) for share in shares] == [len(rows) for rows in indices]
    assert all(share.batch.num_responses == 1 for share in shares)  # something to run the forward pass on


def test_anchoring_replaces_only_the_old_log_probs() -> None:
    batch = random_batch(2, 2)
    anchored = batch.with_old_log_probs(torch.full_like(batch.old_log_probs, -3.0))
    assert (anchored.old_log_probs == -3.0).all()
    for name in ("token_ids", "response_mask", "rollout_log_probs", "advantages"):
        assert torch.equal(getattr(anchored, name), getattr(batch, name))
    assert replace(anchored, old_log_probs=batch.old_log_probs).old_log_probs.isnan().all()
