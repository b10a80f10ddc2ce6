"""Which groups fill a step in stream and finishing order, over several steps and across a resume."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_core.checkpoint.state import TrainerState, read_state, state_files
from dapo_core.draw.groups import Group
from dapo_core.draw.prompts import PromptStream
from dapo_core.draw.report import NotEnoughSignal
from dapo_core.draw.sampler import Sampler
from tests.sources import (
    MIXED,
    ORDERS,
    PROMPTS,
    RIGHT,
    TOKENS_PER_GROUP,
    WRONG,
    LateSource,
    ScriptedSource,
    booked,
    make_sampler,
)

SCRIPTS = st.lists(st.sampled_from([RIGHT, WRONG, MIXED]), min_size=1, max_size=9)


def _ids(groups: list[Group]) -> list[int]:
    return [group.group_id for group in groups]


@pytest.mark.parametrize(
    ("order", "kept"),
    [
        ("stream", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (
            "finish",
            [[1, 2], [5, 6], [8, 9], [12, 13]],
        ),  # 0 and 4 are dropped, with what was in flight beside them
    ],
)
def test_long_groups_are_trained_in_stream_order_and_dropped_in_finishing_order(
    order: str, kept: list[list[int]]
) -> None:
    sampler = make_sampler(LateSource([MIXED], late={0, 4}, partial_tokens=2), 2, order=order)
    draws = [sampler.draw(step) for step in range(1, 5)]
    assert [_ids(draw.groups) for draw in draws] == kept
    assert [draw.account.groups["aborted"] for draw in draws] == [2 * (order == "finish")] * 4


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    script=SCRIPTS.filter(lambda script: MIXED in script),
    burst=st.integers(1, 9),
    num_late=st.integers(0, 3),
    seed=st.integers(0, 1000),
    train_prompts=st.integers(1, 4),
    gen_prompts=st.integers(1, 14),
    max_staleness=st.integers(0, 3),
)
def test_stream_order_trains_every_group_with_signal_within_max_staleness(
    script: list[list[float]],
    burst: int,
    num_late: int,
    seed: int,
    train_prompts: int,
    gen_prompts: int,
    max_staleness: int,
) -> None:
    source = ScriptedSource(script, burst, num_late, partial_tokens=1, order=random.Random(seed))
    sampler = make_sampler(
        source,
        train_prompts,
        gen_prompts=gen_prompts,
        max_num_gen_batches=1000,
        max_staleness=max_staleness,
    )
    kept: list[int] = []
    for step in range(1, 7):
        draw = sampler.draw(step)
        kept += _ids(draw.groups)
        assert booked(draw).keys().isdisjoint({"stale", "aborted"})
        num_open = len(sampler.surplus) + len(sampler.unfinished)
        assert num_open <= max(gen_prompts - train_prompts, 0)
        assert num_open <= max_staleness * train_prompts
        waiting = [
            *sampler.surplus,
            *((at, one) for at, one in sampler.unfinished if one.num_response_tokens),
        ]
        assert all(
            step < oldest_step + max_staleness or step == oldest_step for oldest_step, _ in waiting
        )
    with_signal = [
        number for number in range(sampler.stream.position) if script[number % len(script)] == MIXED
    ]
    assert kept == with_signal[: 6 * train_prompts]


def test_prompts_are_drawn_up_to_the_open_limit() -> None:
    source = ScriptedSource([MIXED, WRONG, MIXED, MIXED], burst=1, partial_tokens=1)
    sampler = make_sampler(source, train_prompts=2, gen_prompts=100, max_staleness=1)
    first = sampler.draw(step=1)
    # four open: 0 has signal, 1 has none and makes room for 4, 2 has signal and fills the step
    assert (_ids(first.groups), first.num_drawn, sampler.stream.position) == ([0, 2], 5, 5)
    assert (booked(first), first.account.carried_out_groups) == ({"kept": 2, "all_wrong": 1}, 2)
    second = sampler.draw(step=2)
    assert (_ids(second.groups), second.num_drawn) == ([3, 4], 2)
    assert (
        sampler.draw(step=3).num_drawn == 3
    )  # two for the groups of step 2, and one for 5, which has no signal


def test_finishing_order_draws_when_open_groups_cannot_fill_the_step() -> None:
    for script, num_drawn in (
        (
            [WRONG, MIXED, MIXED, MIXED],
            4,
        ),  # after the first, three in flight may still fill the step
        (
            [WRONG, MIXED, WRONG, MIXED, MIXED],
            8,
        ),  # after the third, one in flight and one with signal cannot
    ):
        source = ScriptedSource(script, burst=1)
        sampler = make_sampler(source, train_prompts=3, order="finish")
        assert sampler.draw(step=1).num_drawn == sampler.stream.position == num_drawn
        assert source.fresh == list(range(num_drawn))


@pytest.mark.parametrize("order", ["stream", "finish"])
def test_surplus_is_used_before_new_groups(order: str) -> None:
    source = ScriptedSource([MIXED], burst=4)
    sampler = make_sampler(source, train_prompts=3, order=order)
    first = sampler.draw(step=1)
    assert booked(first) == {"kept": 3, "surplus": 1}
    assert [(oldest_step, group.group_id) for oldest_step, group in sampler.surplus] == [(1, 3)]
    second = sampler.draw(step=2)
    assert _ids(second.groups) == [3, 4, 5]
    num_drawn = 3 if order == "stream" else 4
    assert (
        second.account.generated_tokens == num_drawn * TOKENS_PER_GROUP
    )  # surplus was generated in step 1
    assert booked(second) == {"kept": 3, "surplus": num_drawn - 2}


def test_finishing_order_drops_and_counts_stale_surplus() -> None:
    source = ScriptedSource([MIXED], burst=8)
    sampler = make_sampler(source, train_prompts=2, gen_prompts=8, max_staleness=2, order="finish")
    # 6 left after step 1, 4 after step 2, 2 after step 3, which are 3 steps old in step 4
    draws = [sampler.draw(step) for step in (1, 2, 3, 4)]
    assert [draw.account.groups["stale"] for draw in draws] == [0, 0, 0, 2]
    assert [draw.account.tokens["stale"] for draw in draws] == [0, 0, 0, 2 * TOKENS_PER_GROUP]
    assert [draw.num_drawn for draw in draws] == [8, 0, 0, 8]


@pytest.mark.parametrize("order", ["stream", "finish"])
def test_groups_that_finish_during_suspension_become_surplus(order: str) -> None:
    source = ScriptedSource(
        [MIXED, MIXED, MIXED, RIGHT, MIXED, MIXED], burst=2, num_late=2, partial_tokens=1
    )
    sampler = make_sampler(source, train_prompts=2, gen_prompts=6, max_staleness=2, order=order)
    draw = sampler.draw(step=1)
    rest = {"aborted": 2} if order == "finish" else {}
    assert booked(draw) == {"kept": 2, "surplus": 1, "all_right": 1, **rest}
    assert draw.account.carried_out_groups == (2 if order == "stream" else 0)
    assert [group.group_id for _, group in sampler.surplus] == [2]


def test_unfinished_groups_resume_before_new_prompts() -> None:
    source = ScriptedSource([MIXED], burst=1, partial_tokens=4)
    sampler = make_sampler(source, train_prompts=2)
    first = sampler.draw(step=1)
    assert booked(first) == {"kept": 2}
    # two groups of the four are in flight, four tokens each: one response of 3 and one token of the
    # other
    assert (first.account.carried_out_groups, first.account.carried_out_tokens) == (2, 8)
    assert first.account.generated_tokens == 2 * TOKENS_PER_GROUP + 8
    second = sampler.draw(step=2)
    assert [(request.group_id, request.step) for request in source.continued] == [(2, 1), (3, 1)]
    assert [response.finish_reason for response in source.continued[0].responses] == [
        "stop",
        "abort",
    ]
    assert (_ids(second.groups), second.num_drawn) == ([2, 3], 2)
    assert (second.account.carried_in_groups, second.account.carried_in_tokens) == (2, 8)
    assert (
        second.account.generated_tokens == 2 * (TOKENS_PER_GROUP - 4) + 2 * 4
    )  # fresh ones have begun as well
    assert second.account.tokens["kept"] == 2 * TOKENS_PER_GROUP


def test_finishing_order_dates_a_group_by_its_oldest_token() -> None:
    source = ScriptedSource([MIXED], burst=1, partial_tokens=1)
    sampler = make_sampler(source, 1, order="finish", in_flight="carry_over")
    # each step keeps one group; the others begin in step 1 and are two steps old in step 3
    assert booked(sampler.draw(step=1)) == {"kept": 1}
    source.burst = 2
    assert booked(sampler.draw(step=2)) == {"kept": 1, "surplus": 1}
    third = sampler.draw(step=3)
    assert booked(third) == {"kept": 1, "stale": 2, "surplus": 1}
    assert (
        third.account.tokens["stale"] == TOKENS_PER_GROUP + 2
    )  # one finished, one has a token of each step


def test_a_group_without_a_token_does_not_age() -> None:
    sampler = make_sampler(
        ScriptedSource([MIXED], burst=1), 1, order="finish", in_flight="carry_over", max_staleness=0
    )
    draws = [sampler.draw(step) for step in (1, 2, 3)]
    assert [request.step for _, request in sampler.unfinished] == [
        1
    ]  # that drew it, though it has no token
    draws += [sampler.draw(step) for step in (4, 5)]
    assert [_ids(draw.groups) for draw in draws] == [[0], [1], [2], [3], [4]]
    assert [draw.num_drawn for draw in draws] == [4, 0, 0, 0, 4]
    assert all(draw.account.groups["stale"] == 0 for draw in draws)


@pytest.mark.parametrize("order", ["stream", "finish"])
def test_a_step_filled_by_surplus_samples_nothing(order: str) -> None:
    source = ScriptedSource([MIXED], burst=3, partial_tokens=2)
    sampler = make_sampler(source, 1, order=order, in_flight="carry_over", max_staleness=3)
    assert booked(sampler.draw(step=1)) == {"kept": 1, "surplus": 2}
    waiting = list(sampler.unfinished)
    second = sampler.draw(step=2)
    assert sampler.unfinished == waiting
    assert source.continued == []
    assert (second.account.generated_tokens, second.account.carried_out_tokens) == (0, 2)


@pytest.mark.parametrize("on_exhausted", ["raise", "train_partial", "skip_step"])
@pytest.mark.parametrize("order", ["stream", "finish"])
def test_draws_are_exhausted_only_after_continued_groups_return(
    order: str, on_exhausted: str
) -> None:
    script = [MIXED, MIXED, WRONG, MIXED, *[WRONG] * 4]
    sampler = make_sampler(
        ScriptedSource(script, burst=1, partial_tokens=1),
        2,
        order=order,
        in_flight="carry_over",
        max_num_gen_batches=1,
        on_exhausted=on_exhausted,
    )
    sampler.draw(step=1)
    if on_exhausted == "raise":
        with pytest.raises(
            NotEnoughSignal, match=r"^4 new .* gave 1 of 2 groups with signal.* of 6 finished"
        ):
            sampler.draw(step=2)
        return
    draw = sampler.draw(step=2)
    fate = "kept" if on_exhausted == "train_partial" else "surplus"
    assert booked(draw) == {fate: 1, "all_wrong": 5}
    assert _ids(draw.groups) == ([3] if on_exhausted == "train_partial" else [])
    assert sampler.unfinished == []


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    script=SCRIPTS,
    burst=st.integers(1, 9),
    seed=st.integers(0, 1000),
    order=st.sampled_from(ORDERS),
)
def test_deterministic_draws_do_not_depend_on_timing(
    script: list[list[float]], burst: int, seed: int, order: tuple[str, str]
) -> None:
    values = {
        "gen_prompts": 5,
        "on_exhausted": "train_partial",
        "order": order[0],
        "in_flight": order[1],
    }
    steady = make_sampler(ScriptedSource(script, burst=1), 3, is_deterministic=True, **values)
    shuffled_source = ScriptedSource(
        script, burst, num_late=1, partial_tokens=1, order=random.Random(seed)
    )
    shuffled = make_sampler(shuffled_source, 3, is_deterministic=True, **values)
    for step in range(1, 5):
        expected = steady.draw(step)
        assert shuffled.draw(step) == expected
        assert expected.account.groups["aborted"] == expected.account.carried_out_groups == 0
        assert shuffled.surplus == steady.surplus


def _through_a_checkpoint(sampler: Sampler, folder: Path) -> tuple[int, list, list]:
    state = TrainerState(
        step=1,
        policy_version=1,
        prompt_position=sampler.stream.position,
        surplus=sampler.surplus,
        unfinished=sampler.unfinished,
        kl_coefficient=0.001,
        metrics={},
        identity={},
    )
    for name, content in state_files(state).items():
        (folder / name).write_bytes(content)
    read = read_state(folder)
    assert read == state
    return read.prompt_position, read.surplus, read.unfinished


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("gen_prompts", "shuffle"),
    [(7, True), (7, False), (3, True), (10, True)],  # 7 prompts: at each epoch's end, and across it
)
def test_a_run_resumed_after_every_step_equals_the_uninterrupted_one(
    order: tuple[str, str], gen_prompts: int, shuffle: bool, tmp_path: Path
) -> None:
    def make(position: int = 0) -> Sampler:
        values = {
            "gen_prompts": gen_prompts,
            "order": order[0],
            "in_flight": order[1],
            "max_staleness": 2,
        }
        source = ScriptedSource(
            [WRONG, MIXED, MIXED, RIGHT, MIXED], burst=2, num_late=1, partial_tokens=2
        )
        sampler = make_sampler(source, 2, max_num_gen_batches=9, **values)
        sampler.stream = PromptStream(PROMPTS, seed=5, shuffle=shuffle, position=position)
        return sampler

    whole, resumed = make(), make()
    for step in range(1, 9):
        assert resumed.draw(step) == whole.draw(step)
        assert resumed.stream.position == whole.stream.position
        position, surplus, unfinished = _through_a_checkpoint(resumed, tmp_path)
        resumed = make(position)
        resumed.surplus, resumed.unfinished = surplus, unfinished
    assert whole.stream.epoch > 1
    assert max(whole.source.fresh) == whole.stream.position - 1  # type: ignore[attr-defined]
