"""Prompts that give no signal wait 1, 2, 4 and then 8 epochs; one visit with signal ends that."""

from typing import Any

import pytest
from pydantic import ValidationError

from dapo_core.config.sampler import SamplerConfig
from dapo_core.draw.backoff import Backoff
from dapo_core.draw.prompts import PromptStream
from tests.batches import UNSCORED
from tests.sources import MIXED, PROMPTS, RIGHT, WRONG, ScriptedSource, make_sampler


def epochs_of(num_epochs: int, signal_in: set[int]) -> list[int]:
    """The epochs in which a prompt is drawn that gives signal in some of them."""
    backoff, drawn = Backoff(), []
    for epoch in range(num_epochs):
        if not backoff.skips(7, epoch):
            backoff.visit(7, epoch)
            backoff.record(7, epoch in signal_in)
            drawn.append(epoch)
    return drawn


def test_a_prompt_without_signal_waits_longer_each_time_but_never_for_ever() -> None:
    assert epochs_of(32, set()) == [0, 1, 3, 7, 15, 23, 31]  # 1, 2, 4, 8, 8, 8 epochs apart
    assert epochs_of(12, {7}) == [0, 1, 3, 7, 8, 9, 11]  # 8 follows a signal, 9 a first miss
    assert epochs_of(5, {0, 1, 2, 3, 4}) == [0, 1, 2, 3, 4]


def test_a_prompt_in_flight_does_not_wait() -> None:
    backoff = Backoff()
    backoff.visit(7, 0)
    assert not backoff.skips(7, 1)  # nothing is known about its first visit
    backoff.record(7, has_signal=False)
    assert not backoff.skips(7, 1)
    assert not backoff.skips(8, 0)


def test_a_sampler_with_backoff_samples_fewer_tokens_for_the_same_groups() -> None:
    """Of seven prompts in file order, the last two alone give signal; two fill a step."""
    script = [WRONG, RIGHT, WRONG, RIGHT, WRONG, MIXED, MIXED]
    values: dict[str, Any] = {"gen_prompts": 7, "max_num_gen_batches": 9, "max_staleness": 0}
    plain = make_sampler(ScriptedSource(script, burst=7), 2, **values)
    patient = make_sampler(ScriptedSource(script, burst=7), 2, **values)
    patient.stream = PromptStream(PROMPTS, seed=0, shuffle=False, backoff=Backoff())
    tokens = []
    for sampler in (plain, patient):
        draws = [sampler.draw(step) for step in range(1, 9)]
        assert {group.prompt.index for draw in draws for group in draw.groups} == {5, 6}
        wasted = [
            draw.account.tokens["all_wrong"] + draw.account.tokens["all_right"] for draw in draws
        ]
        tokens.append(wasted)
    assert tokens[0] == [30] * 8  # five groups of six tokens in every epoch
    assert tokens[1] == [30, 30, 0, 30, 0, 0, 0, 30]


def test_a_scorer_that_fails_says_nothing_about_a_prompt() -> None:
    script = [[1.0, UNSCORED], [UNSCORED, UNSCORED], MIXED, MIXED, MIXED, WRONG, MIXED]
    sampler = make_sampler(ScriptedSource(script, burst=7), 4, gen_prompts=7, max_staleness=0)
    sampler.stream = PromptStream(PROMPTS, seed=0, shuffle=False, backoff=Backoff())
    sampler.draw(step=1)
    assert sampler.stream.backoff is not None
    # 0 and 1 were drawn and are unknown still; 5 has one miss
    assert sampler.stream.backoff.visits == {0: [0, 0], 1: [0, 0], 5: [1, 0]}


def test_backoff_needs_dynamic_sampling() -> None:
    with pytest.raises(ValidationError, match=r"sampler\.dynamic=false would leave out prompts"):
        SamplerConfig(backoff=True, dynamic=False)
