"""Dynamic sampling against a scripted source: what is kept, carried over, refused, and booked."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_core.config import SamplerConfig
from dapo_core.data import Prompt, PromptStream
from dapo_core.errors import NotEnoughSignal
from dapo_core.rollout import Group
from dapo_core.sampler import FATES, Draw, Sampler
from tests.batches import make_group

RIGHT, WRONG, MIXED = [1.0, 1.0], [-1.0, -1.0], [1.0, -1.0]
TOKENS_PER_GROUP = 6  # two responses of three tokens
PROMPTS = [Prompt(index, (index + 5,), "arithmetic", "1") for index in range(7)]


class ScriptedSource:
    """Groups whose rewards come from a script in submission order, handed out `burst` at a time.

    At an abort, up to `num_late` groups in flight turn out to be finished; each of the others had produced
    `partial_tokens` response tokens.
    """

    def __init__(
        self, script: Sequence[list[float]], burst: int, num_late: int = 0, partial_tokens: int = 0
    ) -> None:
        self.script = itertools.cycle(script)
        self.burst = burst
        self.num_late = num_late
        self.partial_tokens = partial_tokens
        self.in_flight: list[Group] = []
        self.submitted: list[str] = []

    @property
    def num_in_flight(self) -> int:
        return len(self.in_flight)

    def submit(self, prompts: Sequence[tuple[str, Prompt]]) -> None:
        for group_id, prompt in prompts:
            self.submitted.append(group_id)
            self.in_flight.append(make_group(next(self.script), prompt.index))

    def finished(self) -> list[Group]:
        done, self.in_flight = self.in_flight[: self.burst], self.in_flight[self.burst :]
        return done

    def abort(self) -> tuple[list[Group], int, int]:
        late, dropped = self.in_flight[: self.num_late], self.in_flight[self.num_late :]
        self.in_flight = []
        return late, len(dropped), self.partial_tokens * len(dropped)


def _sampler(source: ScriptedSource, train_prompts: int, **settings: object) -> Sampler:
    values = {"gen_prompts": 4, "max_num_gen_batches": 5, **settings}
    stream = PromptStream(PROMPTS, seed=0, shuffle=False)
    return Sampler(source, stream, train_prompts, SamplerConfig.model_validate(values))


def _booked(draw: Draw) -> dict[str, int]:
    return {fate: count for fate, count in draw.account.groups.items() if count}


def test_only_mixed_groups_are_kept_and_the_rest_is_booked() -> None:
    source = ScriptedSource([RIGHT, MIXED, WRONG, MIXED], burst=4)
    draw = _sampler(source, train_prompts=4).draw(step=1)
    # two draws of four give 4 mixed, 2 all right, 2 all wrong: 4 right + 4 * 1 right of 16 responses
    assert [group.metric("acc") for group in draw.groups] == [[1.0, 0.0]] * 4
    assert draw.num_gen_batches == 2
    assert _booked(draw) == {"kept": 4, "all_right": 2, "all_wrong": 2}
    assert (draw.account.num_right, draw.account.num_finished) == (8, 16)
    assert draw.account.generated_tokens == 8 * TOKENS_PER_GROUP
    assert draw.account.tokens["kept"] == 4 * TOKENS_PER_GROUP
    assert draw.account.waste_ratio == 0.5  # (12 + 12) / (24 + 24)


def test_the_draw_ends_as_soon_as_the_step_is_full() -> None:
    source = ScriptedSource([MIXED], burst=1, partial_tokens=2)
    draw = _sampler(source, train_prompts=2, gen_prompts=6).draw(step=1)
    assert [group.prompt.index for group in draw.groups] == [0, 1]
    assert _booked(draw) == {"kept": 2, "aborted": 4}
    assert draw.account.tokens["aborted"] == 4 * 2
    assert draw.account.generated_tokens == 2 * TOKENS_PER_GROUP + 4 * 2
    assert source.num_in_flight == 0


@pytest.mark.parametrize(
    ("script", "num_gen_batches"),
    [
        ([WRONG, MIXED, MIXED, MIXED], 1),  # after the first, three in flight may still fill the step
        ([WRONG, MIXED, WRONG, MIXED, MIXED], 2),  # after the third, one in flight and one kept cannot
    ],
)
def test_fresh_prompts_are_drawn_only_when_those_in_flight_cannot_fill_the_step(
    script: list[list[float]], num_gen_batches: int
) -> None:
    source = ScriptedSource(script, burst=1)
    sampler = _sampler(source, train_prompts=3)
    assert sampler.draw(step=1).num_gen_batches == num_gen_batches
    assert sampler.stream.position == 4 * num_gen_batches
    assert source.submitted == [str(number) for number in range(4 * num_gen_batches)]


def test_surplus_is_carried_to_the_next_step_before_fresh_groups() -> None:
    source = ScriptedSource([MIXED], burst=4)
    sampler = _sampler(source, train_prompts=3)
    first = sampler.draw(step=1)
    assert _booked(first) == {"kept": 3, "surplus": 1}
    assert [(born, group.prompt.index) for born, group in sampler.surplus] == [(1, 3)]
    second = sampler.draw(step=2)
    assert [group.prompt.index for group in second.groups] == [3, 4, 5]
    assert _booked(second) == {"kept": 3, "surplus": 2}
    assert second.account.generated_tokens == 4 * TOKENS_PER_GROUP  # the carried one was generated in step 1


def test_a_step_filled_by_surplus_generates_nothing() -> None:
    source = ScriptedSource([MIXED], burst=8)
    sampler = _sampler(source, train_prompts=2, gen_prompts=6, max_staleness=2)
    sampler.draw(step=1)
    second = sampler.draw(step=2)
    assert second.num_gen_batches == 0
    assert second.account.generated_tokens == 0
    assert _booked(second) == {"kept": 2, "surplus": 2}
    assert len(source.submitted) == 6


@pytest.mark.parametrize(("max_staleness", "num_stale", "num_left"), [(0, 4, 0), (1, 0, 2)])
def test_surplus_beyond_the_staleness_bound_is_dropped_and_counted(
    max_staleness: int, num_stale: int, num_left: int
) -> None:
    source = ScriptedSource([MIXED] * 6 + [WRONG] * 6, burst=8)
    sampler = _sampler(
        source, train_prompts=2, gen_prompts=6, max_staleness=max_staleness, on_exhausted="train_partial"
    )
    sampler.draw(step=1)
    second = sampler.draw(step=2)
    assert second.account.groups["stale"] == num_stale
    assert second.account.tokens["stale"] == num_stale * TOKENS_PER_GROUP
    assert [born for born, _ in sampler.surplus[:num_left]] == [1] * num_left


def test_staleness_counts_from_the_step_that_generated_the_group() -> None:
    source = ScriptedSource([MIXED], burst=8)
    sampler = _sampler(source, train_prompts=2, gen_prompts=8, max_staleness=2)
    # 6 left after step 1, 4 after step 2, 2 after step 3, which are 3 steps old in step 4
    draws = [sampler.draw(step) for step in (1, 2, 3, 4)]
    assert [draw.account.groups["stale"] for draw in draws] == [0, 0, 0, 2]
    assert [draw.num_gen_batches for draw in draws] == [1, 0, 0, 1]


def test_groups_that_finish_during_the_abort_become_surplus() -> None:
    source = ScriptedSource([MIXED, MIXED, MIXED, RIGHT, MIXED, MIXED], burst=2, num_late=2, partial_tokens=1)
    sampler = _sampler(source, train_prompts=2, gen_prompts=6)
    draw = sampler.draw(step=1)
    # in flight at the abort: mixed and all right finished meanwhile, two more dropped
    assert _booked(draw) == {"kept": 2, "surplus": 1, "all_right": 1, "aborted": 2}
    assert [group.prompt.index for _, group in sampler.surplus] == [2]


def test_exhausted_raises_with_counts_accuracy_and_keys() -> None:
    source = ScriptedSource([RIGHT, WRONG, WRONG, MIXED], burst=4)
    with pytest.raises(NotEnoughSignal) as caught:
        _sampler(source, train_prompts=3, max_num_gen_batches=2).draw(step=1)
    message = str(caught.value)
    # two draws: 2 all right, 4 all wrong, 2 mixed: 4 + 2 of 16 responses are right
    assert "2 draws of 4 prompts gave 2 groups with signal, 3 are needed" in message
    assert "of 8 groups 2 were all right and 4 all wrong, 25.0% were kept (mean accuracy 37.5%)" in message
    for key in (
        "sampler.max_num_gen_batches",
        "rollout.group_size",
        "train.train_prompts",
        "sampler.on_exhausted",
    ):
        assert key in message


def test_exhausted_can_train_on_what_there_is(caplog: pytest.LogCaptureFixture) -> None:
    source = ScriptedSource([WRONG, MIXED], burst=4)
    with caplog.at_level(logging.WARNING):
        draw = _sampler(source, 5, max_num_gen_batches=2, on_exhausted="train_partial").draw(step=1)
    assert [group.prompt.index for group in draw.groups] == [1, 3, 5, 0]
    assert _booked(draw) == {"kept": 4, "all_wrong": 4}
    assert "gave 4 groups with signal, 5 are needed" in caplog.text


def test_exhausted_can_skip_the_step(caplog: pytest.LogCaptureFixture) -> None:
    source = ScriptedSource([WRONG, MIXED], burst=4)
    with caplog.at_level(logging.WARNING):
        draw = _sampler(source, 5, max_num_gen_batches=2, on_exhausted="skip_step").draw(step=1)
    assert draw.groups == []
    assert _booked(draw) == {"all_wrong": 4, "stale": 4}
    assert draw.account.waste_ratio == 1.0
    assert "Skipping the step" in caplog.text


def test_without_dynamic_sampling_every_group_is_kept() -> None:
    source = ScriptedSource([RIGHT, WRONG, MIXED, RIGHT], burst=3)
    draw = _sampler(source, train_prompts=4, dynamic=False).draw(step=1)
    assert [group.prompt.index for group in draw.groups] == [0, 1, 2, 3]
    assert _booked(draw) == {"kept": 4}


@pytest.mark.parametrize(("metric", "num_kept"), [("acc", 0), ("score", 2)])
def test_the_metric_decides_what_differs(metric: str, num_kept: int) -> None:
    source = ScriptedSource([[-1.0, -0.5]], burst=4)  # both wrong, scored differently
    draw = _sampler(
        source, 2, gen_prompts=2, max_num_gen_batches=1, metric=metric, on_exhausted="train_partial"
    ).draw(step=1)
    assert len(draw.groups) == num_kept


@settings(max_examples=150, deadline=None)
@given(
    script=st.lists(st.sampled_from([RIGHT, WRONG, MIXED]), min_size=1, max_size=20),
    burst=st.integers(1, 6),
    num_late=st.integers(0, 3),
    train_prompts=st.integers(1, 5),
    gen_prompts=st.integers(1, 9),
    max_staleness=st.integers(0, 3),
    on_exhausted=st.sampled_from(["train_partial", "skip_step"]),
    dynamic=st.booleans(),
)
def test_the_account_balances_in_every_step(
    script: list[list[float]],
    burst: int,
    num_late: int,
    train_prompts: int,
    gen_prompts: int,
    max_staleness: int,
    on_exhausted: str,
    dynamic: bool,
) -> None:
    source = ScriptedSource(script, burst, num_late, partial_tokens=2)
    sampler = _sampler(
        source,
        train_prompts,
        gen_prompts=gen_prompts,
        max_num_gen_batches=3,
        max_staleness=max_staleness,
        on_exhausted=on_exhausted,
        dynamic=dynamic,
    )
    for step in range(1, 7):
        carried, before = len(sampler.surplus), len(source.submitted)
        draw = sampler.draw(step)
        groups, tokens = draw.account.groups, draw.account.tokens
        num_generated = len(source.submitted) - before
        assert num_generated == gen_prompts * draw.num_gen_batches
        assert num_generated + carried == sum(groups[fate] for fate in FATES)
        assert draw.account.generated_tokens + carried * TOKENS_PER_GROUP == sum(tokens[fate] for fate in FATES)
        assert draw.account.generated_tokens == (
            (num_generated - groups["aborted"]) * TOKENS_PER_GROUP + 2 * groups["aborted"]
        )
        assert groups["kept"] == len(draw.groups) <= train_prompts
        assert groups["surplus"] == len(sampler.surplus)
        assert draw.num_gen_batches <= 3
        assert source.num_in_flight == 0
        assert all(step - born <= max_staleness for born, _ in sampler.surplus)
        if dynamic:
            assert all(group.metric("acc") == [1.0, 0.0] for group in draw.groups)
