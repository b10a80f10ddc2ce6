"""Engines that run ahead: groups stay in flight between draws, and every token is accounted for."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_core.draw.account import FATES
from dapo_core.draw.groups import Group, GroupRequest
from tests.sources import (
    MIXED,
    RIGHT,
    TOKENS_PER_GROUP,
    WRONG,
    ScriptedSource,
    booked,
    make_sampler,
)


def test_engines_keep_decoding_open_prompts_until_the_pause() -> None:
    source = ScriptedSource([MIXED], burst=2, partial_tokens=2)
    sampler = make_sampler(source, 2, runs_ahead=True, max_staleness=2, gen_prompts=6)
    first = sampler.draw(step=1)
    assert [group.group_id for group in first.groups] == [0, 1]
    # 2 of 6 open prompts are taken; the weights of step 1 sample for 2 steps more
    assert sorted(source.in_flight) == [2, 3, 4, 5]
    assert {request.step for request in source.in_flight.values()} == {1}
    assert (first.num_drawn, first.account.carried_out_groups) == (6, 4)
    # what these four sample from now on belongs to step 2
    assert first.account.generated_tokens == 2 * TOKENS_PER_GROUP

    sampler.pause()
    assert source.num_in_flight == 0
    assert [request.num_response_tokens for request in sampler.unfinished] == [2, 2, 2, 2]
    second = sampler.draw(step=2)
    assert [request.group_id for request in source.continued] == [2, 3, 4, 5]
    assert [group.group_id for group in second.groups] == [2, 3]
    assert (second.account.carried_in_groups, second.account.carried_in_tokens) == (4, 0)
    # 2 groups in whole; 4 and 5 are in flight again, with the 2 tokens that the pause counted
    assert second.account.generated_tokens == 2 * TOKENS_PER_GROUP + 2 * 2
    assert second.account.carried_out_tokens == 2 * 2


def test_groups_that_finish_ahead_wait_in_prompt_order() -> None:
    source = ScriptedSource([MIXED], burst=2, num_late=3)
    sampler = make_sampler(source, 2, runs_ahead=True, max_staleness=2, gen_prompts=8)
    sampler.draw(step=1)
    sampler.pause()
    assert [group.group_id for group in sampler.surplus] == [2, 3, 4]
    second = sampler.draw(step=2)
    assert [group.group_id for group in second.groups] == [2, 3]
    assert booked(second) == {"kept": 2, "surplus": 1}
    assert second.account.finished_groups == 3
    # the step is full at once, so engines go on with what was suspended
    assert sorted(source.in_flight) == [5, 6, 7]


def test_a_skipped_step_leaves_nothing_in_flight() -> None:
    source = ScriptedSource([WRONG], burst=4)
    values = {"max_num_gen_batches": 1, "on_exhausted": "skip_step"}
    sampler = make_sampler(source, 2, runs_ahead=True, **values)
    assert sampler.draw(step=1).groups == []
    assert source.num_in_flight == 0


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    script=st.lists(st.sampled_from([RIGHT, WRONG, MIXED]), min_size=1, max_size=20).filter(
        lambda script: MIXED in script
    ),
    burst=st.integers(1, 9),
    num_late=st.integers(0, 5),
    seed=st.integers(0, 1000),
    train_prompts=st.integers(1, 4),
    gen_prompts=st.integers(1, 20),
    max_staleness=st.integers(1, 4),
    window=st.floats(0, 1),
)
def test_tokens_balance_and_no_group_is_lost_or_too_old(
    script: list[list[float]],
    burst: int,
    num_late: int,
    seed: int,
    train_prompts: int,
    gen_prompts: int,
    max_staleness: int,
    window: float,
) -> None:
    source = ScriptedSource(script, burst, num_late, partial_tokens=1, order=random.Random(seed))
    sampler = make_sampler(
        source,
        train_prompts,
        runs_ahead=True,
        gen_prompts=gen_prompts,
        max_num_gen_batches=1000,
        max_staleness=max_staleness,
        window=window,
    )
    kept: list[int] = []
    drawn_in: dict[int, int] = {}
    carried = (0, 0)
    for step in range(1, 9):
        first_new = sampler.stream.position
        draw = sampler.draw(step)
        account = draw.account
        drawn_in |= dict.fromkeys(range(first_new, sampler.stream.position), step)
        assert (account.carried_in_groups, account.carried_in_tokens) == carried
        out = account.carried_out_groups, account.carried_out_tokens
        fates = [sum(account.groups.values()), sum(account.tokens.values())]
        assert set(account.groups) == set(FATES)
        assert draw.num_drawn + carried[0] == fates[0] + out[0]
        assert account.generated_tokens + carried[1] == fates[1] + out[1]
        carried = out[0] + account.groups["surplus"], out[1] + account.tokens["surplus"]

        chosen = [group.group_id for group in draw.groups]
        assert len(chosen) == train_prompts
        assert max(step - drawn_in[group_id] for group_id in chosen) <= max_staleness
        kept += chosen
        sampler.pause()
        waiting: list[Group | GroupRequest] = [*sampler.surplus, *sampler.unfinished]
        open_ids = [group.group_id for group in waiting]
        with_signal = [each for each in drawn_in if script[each % len(script)] == MIXED]
        assert set(with_signal) <= {*kept, *open_ids}
    assert len(set(kept)) == len(kept)
