"""Balancing: nothing is lost, limits hold, ranks and micro-batches cost nearly the same."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_core.algorithm.balance import balance_over_ranks, micro_batches, split_batch, workload
from dapo_core.algorithm.batch import Batch, build_batch
from tests.batches import make_group


def test_workload_counts_matrices_and_causal_attention() -> None:
    # H = 4: 12 * 4 = 48 per token; 48 * 10 + 10^2 = 580, 48 * 100 + 100^2 = 14,800
    assert workload(np.array([0, 10, 100]), 4).tolist() == [0.0, 580.0, 14_800.0]


@settings(deadline=None)
@given(st.lists(st.integers(1, 3000), max_size=60), st.integers(1, 9))
def test_balancing_assigns_every_index_to_exactly_one_rank(
    costs: list[int], num_ranks: int
) -> None:
    parts = balance_over_ranks(np.array(costs, dtype=np.float64), num_ranks)
    assert len(parts) == num_ranks
    assert sorted(index for part in parts for index in part.tolist()) == list(range(len(costs)))
    loads = [sum(costs[index] for index in part) for part in parts]
    # the heaviest rank got its last sequence while it was the lightest
    assert max(loads) - min(loads) <= max(costs, default=0)


@pytest.mark.parametrize("shape", ["uniform", "lognormal", "one in ten at the limit"])
def test_a_large_batch_is_balanced_evenly(shape: str) -> None:
    draw = np.random.default_rng(1)
    lengths = {
        "uniform": draw.integers(50, 20_000, size=16_384),
        "lognormal": draw.lognormal(7.5, 1.0, size=16_384).clip(20, 22_528).astype(np.int64),
        "one in ten at the limit": np.where(
            draw.random(16_384) < 0.1, 20_480, draw.integers(200, 3000, 16_384)
        ),
    }[shape]
    costs = workload(lengths, 4096)
    loads = np.array([costs[part].sum() for part in balance_over_ranks(costs, 64)])
    assert loads.max() / loads.mean() <= 1.001


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(50, 300), st.integers(1, 9)
)
def test_micro_batches_contain_every_sequence_once_within_the_limit(
    lengths: list[int], max_tokens: int, at_least: int
) -> None:
    tokens = np.array(lengths)
    parts = micro_batches(tokens, workload(tokens, 1), max_tokens, at_least)
    assert sorted(index for part in parts for index in part.tolist()) == list(range(len(lengths)))
    assert all(tokens[part].sum() <= max_tokens for part in parts)
    assert len(parts) >= at_least
    # best fit leaves no two sets that would fit into one, so all but one are more than half full
    assert len(parts) <= max(at_least, 2 * tokens.sum() / max_tokens + 1)


def test_micro_batches_are_few_and_balanced() -> None:
    lengths = np.array([2, 9, 7, 2, 8, 1])
    costs = workload(lengths, 1)  # T^2 + 12 T: [28, 189, 133, 28, 160, 13]
    # 29 tokens fill two sets of 16. Longest first to the cheaper: 9 | 8, then 7 to 8 (15 tokens,
    # cost 293), both 2s (13, 245) and 1 (14, 258) to 9; the costlier set comes first
    assert [part.tolist() for part in micro_batches(lengths, costs, 16)] == [[2, 4], [0, 1, 3, 5]]
    # another rank needs three: 9 | 8 | 7 (133), 2 to 7 (161), 2 to 8 (188), 1 to the one of 7 (174)
    three = micro_batches(lengths, costs, 16, at_least=3)
    assert [part.tolist() for part in three] == [[1], [3, 4], [0, 2, 5]]
    lengths = np.array([6, 4, 4, 3, 3])
    # 20 tokens fit two sets of 10: best fit 6 + 4 | 4 + 3 + 3. To the cheaper they would not: 6 | 4
    # + 4, then 3 to 6 (9 tokens), and no set has room for the last 3
    assert [part.tolist() for part in micro_batches(lengths, workload(lengths, 1), 10)] == [
        [0, 1],
        [2, 3, 4],
    ]


def test_siblings_share_a_prompt_of_at_least_a_quarter_of_their_tokens() -> None:
    # of 4 prompt tokens: a quarter with 12 response tokens, less with 13
    groups = [make_group([1.0] * 3, 0, [2, 13, 12]), make_group([1.0], 1, 1)]
    batch = build_batch(groups, mask_truncated=False)
    assert batch.prompt_owners.tolist() == [0, 1, 0, 3]


def test_prompts_with_unlike_routing_to_replay_are_not_shared() -> None:
    batch = build_batch([make_group([1.0, 1.0], n, 2) for n in range(2)], mask_truncated=False)
    routing = [np.zeros((6, 1, 2), np.uint8) for _ in range(4)]
    routing[1][4:] = 5  # of a response
    routing[3][3] = 5  # of a prompt
    assert replace(batch, routing=routing).prompt_owners.tolist() == [0, 0, 2, 3]


def _num_tokens(batch: Batch) -> int:
    """Tokens of a row, with a quarter of a shared prompt's for each further sibling."""
    owners, prompts = batch.prompt_owners, batch.prompt_lengths.numpy()
    saved = prompts[owners != np.arange(len(owners))] * 3 // 4
    return int(batch.lengths.sum() - saved.sum())


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.tuples(st.integers(1, 30), st.lists(st.integers(0, 30), min_size=1, max_size=8)),
        min_size=1,
        max_size=8,
    ),
    st.integers(60, 300),
    st.integers(1, 5),
)
def test_siblings_are_trained_together_within_the_limit_of_a_micro_batch(
    sizes: list[tuple[int, list[int]]], max_tokens: int, num_ranks: int
) -> None:
    batch = build_batch(
        [make_group([1.0] * len(each), n, each, prompt) for n, (prompt, each) in enumerate(sizes)],
        mask_truncated=False,
    )
    shares, indices = split_batch(batch, num_ranks, max_tokens)
    assert sorted(np.concatenate(indices).tolist()) == list(range(batch.num_responses))
    together: dict[int, tuple[int, int]] = {}  # rank and micro-batch of each row
    for rank, (share, rows) in enumerate(zip(shares, indices, strict=True)):
        assert sorted(np.concatenate(share.micro_batches).tolist()) == list(range(len(rows)))
        assert len(share.micro_batches) == len(shares[0].micro_batches)
        for number, chosen in enumerate(share.micro_batches):
            assert _num_tokens(batch.select(rows[chosen])) <= max_tokens if len(chosen) else True
            together |= dict.fromkeys(rows[chosen].tolist(), (rank, number))
    owners = batch.prompt_owners
    limit = workload(batch.lengths, 4096).sum() / (4 * num_ranks)
    for row in np.flatnonzero(owners != np.arange(len(owners))).tolist():
        siblings = owners == owners[row]
        fits = _num_tokens(batch.select(np.flatnonzero(siblings))) <= max_tokens
        if fits and workload(batch.lengths[siblings], 4096).sum() <= limit:
            assert together[row] == together[owners[row]]
