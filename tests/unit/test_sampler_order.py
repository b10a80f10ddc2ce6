"""Which groups fill a step, over several steps and across a resume."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_core.checkpoint.state import TrainerState, read_state, state_files
from dapo_core.draw.backoff import Backoff
from dapo_core.draw.groups import Group, GroupRequest
from dapo_core.draw.prompts import PromptStream
from dapo_core.draw.report import NotEnoughSignal
from dapo_core.draw.sampler import Sampler
from tests.batches import make_group
from tests.plain import plain
from tests.sources import (
    MIXED,
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


def test_long_groups_are_trained_on_in_prompt_order() -> None:
    late = LateSource([MIXED], late={0, 4}, partial_tokens=2)
    sampler = make_sampler(late, 2, window=0, max_staleness=3)
    draws = [sampler.draw(step) for step in range(1, 5)]
    assert [_ids(draw.groups) for draw in draws] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_step_does_not_wait_for_a_long_group_within_the_window() -> None:
    late = LateSource([MIXED], late={0}, partial_tokens=2)
    sampler = make_sampler(late, 2, window=0.5, max_staleness=2, gen_prompts=6)
    draws = [sampler.draw(step) for step in range(1, 5)]
    # the first three in line may fill a step of two; step 3 waits for 0, drawn by step 1
    assert [_ids(draw.groups) for draw in draws] == [[1, 2], [3, 4], [0, 5], [6, 7]]
    assert [len(request.responses) for request in late.continued if not request.group_id] == [2, 2]


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    script=SCRIPTS.filter(lambda script: MIXED in script),
    burst=st.integers(1, 9),
    num_late=st.integers(0, 3),
    seed=st.integers(0, 1000),
    train_prompts=st.integers(1, 4),
    gen_prompts=st.integers(1, 24),
    max_staleness=st.integers(0, 4),
    window=st.one_of(st.just(0.0), st.floats(0, 1)),
)
def test_a_window_trains_every_group_with_signal_within_max_staleness(
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
        gen_prompts=gen_prompts,
        max_num_gen_batches=1000,
        max_staleness=max_staleness,
        window=window,
    )
    kept: list[int] = []
    drawn_in: dict[int, int] = {}
    for step in range(1, 9):
        first_new = sampler.stream.position
        chosen = _ids(sampler.draw(step).groups)
        drawn_in |= dict.fromkeys(range(first_new, sampler.stream.position), step)
        assert len(chosen) == train_prompts
        assert max(step - drawn_in[group_id] for group_id in chosen) <= max_staleness
        kept += chosen
        waiting: list[Group | GroupRequest] = [*sampler.surplus, *sampler.unfinished]
        open_ids = [group.group_id for group in waiting]
        num_passed = sum(group_id < max(chosen) for group_id in open_ids)
        assert num_passed <= round(window * train_prompts)
        assert len(waiting) <= max(gen_prompts - train_prompts, 0)
        assert len(waiting) <= max_staleness * train_prompts
        with_signal = [each for each in drawn_in if script[each % len(script)] == MIXED]
        assert set(with_signal) <= {*kept, *open_ids}
    assert len(set(kept)) == len(kept)
    assert set(kept) <= set(with_signal)


def test_prompts_are_drawn_up_to_the_open_limit() -> None:
    source = ScriptedSource([MIXED, WRONG, MIXED, MIXED], burst=1, partial_tokens=1)
    sampler = make_sampler(source, train_prompts=2, gen_prompts=100, max_staleness=1)
    first = sampler.draw(step=1)
    # four open: 0 has signal, 1 has none and makes room for 4, 2 has signal and fills the step
    assert (_ids(first.groups), first.num_drawn, sampler.stream.position) == ([0, 2], 5, 5)
    assert (booked(first), first.account.carried_out_groups) == ({"kept": 2, "all_wrong": 1}, 2)
    second = sampler.draw(step=2)
    assert (_ids(second.groups), second.num_drawn) == ([3, 4], 2)
    # two for the groups of step 2, and one for 5, which has no signal
    assert sampler.draw(step=3).num_drawn == 3


def test_surplus_is_used_before_new_groups() -> None:
    source = ScriptedSource([MIXED], burst=4)
    sampler = make_sampler(source, train_prompts=3)
    first = sampler.draw(step=1)
    assert booked(first) == {"kept": 3, "surplus": 1}
    assert _ids(sampler.surplus) == [3]
    second = sampler.draw(step=2)
    assert _ids(second.groups) == [3, 4, 5]
    assert second.account.generated_tokens == 3 * TOKENS_PER_GROUP  # surplus is of step 1
    assert booked(second) == {"kept": 3, "surplus": 1}


def test_groups_that_finish_during_suspension_become_surplus() -> None:
    source = ScriptedSource(
        [MIXED, MIXED, MIXED, RIGHT, MIXED, MIXED], burst=2, num_late=2, partial_tokens=1
    )
    sampler = make_sampler(source, train_prompts=2, gen_prompts=6, max_staleness=2)
    draw = sampler.draw(step=1)
    assert booked(draw) == {"kept": 2, "surplus": 1, "all_right": 1}
    assert draw.account.carried_out_groups == 2
    assert _ids(sampler.surplus) == [2]


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
    # fresh ones have begun as well
    assert second.account.generated_tokens == 2 * (TOKENS_PER_GROUP - 4) + 2 * 4
    assert second.account.tokens["kept"] == 2 * TOKENS_PER_GROUP


def test_a_step_filled_by_surplus_samples_nothing() -> None:
    source = ScriptedSource([MIXED], burst=3, partial_tokens=2)
    sampler = make_sampler(source, 1, max_staleness=3)
    assert booked(sampler.draw(step=1)) == {"kept": 1, "surplus": 2}
    waiting = list(sampler.unfinished)
    second = sampler.draw(step=2)
    assert sampler.unfinished == waiting
    assert source.continued == []
    assert (second.account.generated_tokens, second.account.carried_out_tokens) == (0, 2)


@pytest.mark.parametrize("on_exhausted", ["raise", "train_partial", "skip_step"])
def test_draws_are_exhausted_only_after_continued_groups_return(on_exhausted: str) -> None:
    script = [MIXED, MIXED, WRONG, MIXED, *[WRONG] * 4]
    sampler = make_sampler(
        ScriptedSource(script, burst=1, partial_tokens=1),
        2,
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


def test_groups_of_other_settings_are_sampled_again_in_prompt_order() -> None:
    source = ScriptedSource([MIXED], burst=1, partial_tokens=4)
    sampler = make_sampler(source, train_prompts=2, max_staleness=2, gen_prompts=6)
    sampler.draw(step=1)
    assert [request.num_response_tokens for request in sampler.unfinished] == [4] * 4
    surplus = [replace(make_group(MIXED), group_id=9)]
    sampler.redraw(step=2, surplus=surplus, unfinished=sampler.unfinished[::-1])
    assert [(each.group_id, each.step) for each in sampler.unfinished] == [
        (group_id, 2) for group_id in (2, 3, 4, 5, 9)
    ]
    assert not any(each.responses or each.versions for each in sampler.unfinished)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(script=SCRIPTS, burst=st.integers(1, 9), seed=st.integers(0, 1000))
def test_deterministic_draws_do_not_depend_on_timing(
    script: list[list[float]], burst: int, seed: int
) -> None:
    values: dict[str, Any] = {"gen_prompts": 5, "on_exhausted": "train_partial"}
    steady = make_sampler(ScriptedSource(script, burst=1), 3, is_deterministic=True, **values)
    shuffled_source = ScriptedSource(
        script, burst, num_late=1, partial_tokens=1, order=random.Random(seed)
    )
    shuffled = make_sampler(shuffled_source, 3, is_deterministic=True, **values)
    for step in range(1, 5):
        expected = steady.draw(step)
        assert plain(shuffled.draw(step)) == plain(expected)
        assert expected.account.carried_out_groups == 0
        assert plain(shuffled.surplus) == plain(steady.surplus)


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
    assert plain(read) == plain(state)
    return read.prompt_position, read.surplus, read.unfinished


@pytest.mark.parametrize(
    ("gen_prompts", "shuffle", "window", "backoff"),
    # 7 prompts: at each epoch's end, and across it
    [
        (7, True, 0.5, False),
        (7, True, 0, True),
        (7, False, 0, False),
        (3, True, 0, True),
        (10, True, 0, False),
    ],
)
def test_a_run_resumed_after_every_step_equals_the_uninterrupted_one(
    gen_prompts: int, shuffle: bool, window: float, backoff: bool, tmp_path: Path
) -> None:
    def make(position: int = 0) -> Sampler:
        values: dict[str, Any] = {"gen_prompts": gen_prompts, "max_staleness": 2, "window": window}
        source = ScriptedSource(
            [WRONG, MIXED, MIXED, RIGHT, MIXED], burst=2, num_late=1, partial_tokens=2
        )
        sampler = make_sampler(source, 2, max_num_gen_batches=9, **values)
        sampler.stream = PromptStream(PROMPTS, seed=5, shuffle=shuffle, position=position)
        sampler.stream.backoff = Backoff() if backoff else None
        return sampler

    whole, resumed = make(), make()
    for step in range(1, 9):
        assert plain(resumed.draw(step)) == plain(whole.draw(step))
        assert resumed.stream.position == whole.stream.position
        position, surplus, unfinished = _through_a_checkpoint(resumed, tmp_path)
        kept = resumed.stream.backoff
        resumed = make(position)
        resumed.stream.backoff = kept
        resumed.surplus, resumed.unfinished = surplus, unfinished
    assert whole.stream.epoch > 1
    assert max(whole.source.fresh) == whole.stream.position - 1  # type: ignore[attr-defined]
