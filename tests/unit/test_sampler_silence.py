"""Dynamic sampling when nothing useful comes: it ends, and says what was seen."""

from __future__ import annotations

import itertools

import pytest

from dapo_core.errors import RolloutError
from dapo_core.sampler import NotEnoughSignal
from tests.sources import (
    MIXED,
    RIGHT,
    WRONG,
    Clock,
    SlowSource,
    make_sampler,
)


def test_silence_of_the_engines_ends_with_what_was_seen() -> None:
    clock = Clock()
    source = SlowSource([MIXED], clock, seconds=1.0, pause=10_000)
    sampler = make_sampler(source, 2, clock=clock, max_seconds_without_kept=30.0)
    with pytest.raises(RolloutError) as caught:
        sampler.draw(step=3)
    message = str(caught.value)
    assert "no group was kept for 31 s of training step 3" in message
    assert "1 draws of 4 prompts gave 0 groups with signal, 2 are needed: of 0 finished groups" in message
    assert "4 groups with 0 response tokens are in flight" in message
    assert "no group finished" in message
    assert "sampler.max_seconds_without_kept" in message


def test_groups_without_signal_for_too_long_end_with_what_was_seen() -> None:
    clock = Clock()
    source = SlowSource([RIGHT, WRONG, WRONG], clock, seconds=1.0, pause=2)
    sampler = make_sampler(source, 2, clock=clock, max_num_gen_batches=1000, max_seconds_without_kept=11.5)
    with pytest.raises(NotEnoughSignal) as caught:
        sampler.draw(step=1)
    # after 12 s six groups have come: two all right, four all wrong; two of the second draw's four are in flight
    message = str(caught.value)
    assert "no group was kept for 12 s" in message
    assert "of 6 finished groups 2 were all right and 4 all wrong, 0.0% were kept (mean accuracy 33.3%)" in message
    assert "2 groups with 0 response tokens are in flight" in message


def test_each_kept_group_gives_the_next_its_full_time() -> None:
    clock = Clock()
    source = SlowSource([MIXED], clock, seconds=1.0, pause=9)
    draw = make_sampler(source, 4, clock=clock, max_seconds_without_kept=9.5).draw(step=1)
    assert len(draw.groups) == 4
    assert clock.now == 100.0 + 4 * 9


def test_engines_that_fall_silent_after_a_kept_group_are_noticed() -> None:
    clock = Clock()
    source = SlowSource([MIXED], clock, seconds=1.0, pause=1)
    source.waits = itertools.chain([True], itertools.repeat(False))  # type: ignore[assignment]
    with pytest.raises(RolloutError, match=r"gave 1 groups with signal, 2 .* no group finished"):
        make_sampler(source, 2, clock=clock, max_seconds_without_kept=5.0).draw(step=1)
