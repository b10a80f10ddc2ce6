"""Dynamic sampling over several steps: what goes on in the next step, what is too old, and a resume anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from dapo_core.checkpoint.state import TrainerState, read_state, state_files
from dapo_core.data import PromptStream
from dapo_core.sampler import NotEnoughSignal, Sampler
from tests.sources import (
    MIXED,
    PROMPTS,
    RIGHT,
    TOKENS_PER_GROUP,
    WRONG,
    ScriptedSource,
    booked,
    make_sampler,
)


def test_unfinished_groups_are_continued_in_the_next_step_before_fresh_prompts() -> None:
    source = ScriptedSource([MIXED], burst=1, partial_tokens=4)
    sampler = make_sampler(source, train_prompts=2, in_flight="carry_over")
    first = sampler.draw(step=1)
    assert booked(first) == {"kept": 2}
    # two groups of the four are in flight, four tokens each: one response of 3 and one token of the other
    assert (first.account.carried_out_groups, first.account.carried_out_tokens) == (2, 8)
    assert first.account.generated_tokens == 2 * TOKENS_PER_GROUP + 8
    assert [(born, request.group_id) for born, request in sampler.unfinished] == [(1, 2), (1, 3)]
    second = sampler.draw(step=2)
    assert [(request.group_id, request.step) for request in source.continued] == [(2, 1), (3, 1)]
    assert [response.finish_reason for response in source.continued[0].responses] == ["stop", "abort"]
    assert [group.prompt.index for group in second.groups] == [2, 3]
    assert (second.num_gen_batches, sampler.stream.position) == (0, 4)
    assert (second.account.carried_in_groups, second.account.carried_in_tokens) == (2, 8)
    assert second.account.generated_tokens == 2 * (TOKENS_PER_GROUP - 4)
    assert second.account.tokens["kept"] == 2 * TOKENS_PER_GROUP


def test_a_group_is_as_old_as_its_oldest_token() -> None:
    source = ScriptedSource([MIXED], burst=1, partial_tokens=1)
    sampler = make_sampler(source, 1, gen_prompts=4, in_flight="carry_over", max_staleness=1)
    # each step keeps one group; the others begin in step 1 and are two steps old in step 3
    assert booked(sampler.draw(step=1)) == {"kept": 1}
    assert booked(sampler.draw(step=2)) == {"kept": 1}
    third = sampler.draw(step=3)
    assert booked(third) == {"kept": 1, "stale": 2}
    assert third.account.tokens["stale"] == 2 * 2  # one token in each of two steps
    assert third.num_gen_batches == 1


def test_a_group_without_a_token_does_not_age() -> None:
    source = ScriptedSource([MIXED], burst=1, partial_tokens=0)
    sampler = make_sampler(source, 1, in_flight="carry_over", max_staleness=0)
    draws = [sampler.draw(step) for step in (1, 2, 3)]
    assert [request.step for _, request in sampler.unfinished] == [1]  # that drew it, though it has no token
    draws += [sampler.draw(step) for step in (4, 5)]
    assert [request.step for _, request in sampler.unfinished] == [5, 5, 5]
    assert [draw.groups[0].prompt.index for draw in draws] == [0, 1, 2, 3, 4]
    assert [draw.num_gen_batches for draw in draws] == [1, 0, 0, 0, 1]
    assert all(draw.account.groups["stale"] == 0 for draw in draws)


def test_a_continued_group_that_becomes_surplus_keeps_its_age() -> None:
    source = ScriptedSource([MIXED], burst=1, partial_tokens=1)
    sampler = make_sampler(source, 1, in_flight="carry_over", max_staleness=1)
    sampler.draw(step=1)
    source.burst = 3
    assert booked(sampler.draw(step=2)) == {"kept": 1, "surplus": 2}
    assert [born for born, _ in sampler.surplus] == [1, 1]
    assert sampler.draw(step=3).account.groups["stale"] == 2


def test_a_step_that_surplus_fills_leaves_unfinished_groups_where_they_are() -> None:
    source = ScriptedSource([MIXED], burst=3, partial_tokens=2)
    sampler = make_sampler(source, 1, in_flight="carry_over", max_staleness=3)
    assert booked(sampler.draw(step=1)) == {"kept": 1, "surplus": 2}
    waiting = list(sampler.unfinished)
    second = sampler.draw(step=2)
    assert sampler.unfinished == waiting
    assert source.continued == []
    assert (second.account.generated_tokens, second.account.carried_out_tokens) == (0, 2)


@pytest.mark.parametrize("on_exhausted", ["raise", "train_partial", "skip_step"])
def test_draws_are_used_up_only_when_continued_groups_came_back_too(on_exhausted: str) -> None:
    source = ScriptedSource([MIXED, MIXED, WRONG, MIXED, WRONG, WRONG, WRONG, WRONG], burst=1, partial_tokens=1)
    sampler = make_sampler(source, 2, in_flight="carry_over", max_num_gen_batches=1, on_exhausted=on_exhausted)
    sampler.draw(step=1)
    if on_exhausted == "raise":
        with pytest.raises(NotEnoughSignal, match=r"1 draws of 4 prompts gave 1 groups .* of 6 finished groups"):
            sampler.draw(step=2)
        return
    draw = sampler.draw(step=2)
    kept = {"kept": 1} if on_exhausted == "train_partial" else {"stale": 1}
    assert booked(draw) == {**kept, "all_wrong": 5}
    assert [group.prompt.index for group in draw.groups] == ([3] if on_exhausted == "train_partial" else [])
    assert sampler.unfinished == []


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
    for name, text in state_files(state).items():
        (folder / name).write_text(text, encoding="utf-8")
    read = read_state(folder)
    assert read == state
    return read.prompt_position, read.surplus, read.unfinished


@pytest.mark.parametrize("in_flight", ["abort", "carry_over"])
@pytest.mark.parametrize(
    ("gen_prompts", "shuffle"),
    [(7, True), (7, False), (3, True), (10, True)],  # 7 prompts: at each epoch's end, and across it
)
def test_a_run_resumed_after_every_step_is_the_uninterrupted_one(
    in_flight: str, gen_prompts: int, shuffle: bool, tmp_path: Path
) -> None:
    def make(position: int = 0) -> Sampler:
        values = {"gen_prompts": gen_prompts, "in_flight": in_flight, "max_staleness": 2}
        source = ScriptedSource([WRONG, MIXED, MIXED, RIGHT, MIXED], burst=2, num_late=1, partial_tokens=2)
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
