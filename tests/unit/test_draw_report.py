"""Messages of a draw: a progress line every 10 s, and a hint if no group has signal."""

from __future__ import annotations

import pytest

from dapo_core.draw.account import Lengths, TokenAccount
from dapo_core.draw.report import DrawProgress, NotEnoughSignal
from dapo_core.errors import RolloutError
from tests.sources import Clock, ScriptedSource, make_sampler


def account(
    wrong: int = 0, right: int = 0, finished: int | None = None, cut: int = 0, equal: int = 0
) -> TokenAccount:
    """Groups of two responses."""
    count = TokenAccount(finished_groups=wrong + right + equal if finished is None else finished)
    count.groups["all_wrong"], count.groups["all_right"] = wrong, right
    count.groups["all_equal"] = equal
    count.lengths["finished"] = Lengths(2 * count.finished_groups, 0, cut)
    count.num_right = 2 * right
    return count


def test_progress_is_logged_every_ten_seconds_with_rate_and_time_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    clock = Clock()
    progress = DrawProgress(16, clock)
    progress.begin(3, num_carried=2)
    for _ in range(25):
        clock.now += 1
        seen = account(wrong=9, right=20, finished=39)
        seen.generated_tokens = int(clock.now - 100) * 50  # and 30 a second of groups in flight
        progress.show(seen, 96, num_ready=10, num_open_tokens=int(clock.now - 100) * 30)
    assert caplog.messages == [  # 8 groups in 10 s: 7.5 s for the 6 that are left
        "training step 3: 96 groups drawn, 39 finished, 10 of 16 kept, 20 all right, 9 all wrong; "
        f"80 tokens/s, about {seconds} s left"
        for seconds in (8, 15)
    ]


@pytest.mark.parametrize(
    ("seen", "advice"),
    [
        (account(wrong=4, right=96), "too easy for the model"),
        (account(wrong=100), "answer format is not the one that the scorer reads"),
        (
            account(right=1, equal=99),
            "0 all wrong, 99 all equal (mean accuracy 1.0%). Either the model's answer format",
        ),
        (
            account(wrong=99, right=1, cut=150),
            "75% of the responses are cut by rollout.max_response_tokens",
        ),
    ],
)
def test_a_hundred_groups_without_signal_log_one_hint(
    caplog: pytest.LogCaptureFixture, seen: TokenAccount, advice: str
) -> None:
    progress = DrawProgress(16, Clock())
    progress.begin(1, 0)
    progress.show(account(wrong=99), 200, 0, 0)
    assert caplog.messages == []
    for _ in range(2):
        progress.show(seen, 200, 0, 0)
    (message,) = caplog.messages
    assert message.startswith("the first 100 groups have no signal: ")
    assert advice in message


def test_a_waiting_draw_logs_progress(caplog: pytest.LogCaptureFixture) -> None:
    """The sampler logs progress until its time limit."""
    caplog.set_level("INFO")
    clock = Clock()
    source = ScriptedSource([[0.0, 0.0]] * 50, burst=0)
    source.tokens_in_flight = 70
    sampler = make_sampler(source, 2, clock=clock, max_seconds_without_kept=25.0)
    with pytest.raises((RolloutError, NotEnoughSignal)):
        sampler.draw(step=1, while_waiting=lambda: setattr(clock, "now", clock.now + 1))
    lines = [message for message in caplog.messages if message.startswith("training step 1: ")]
    assert len(lines) == 2
    assert "4 groups drawn, 0 finished, 0 of 2 kept" in lines[0]
    assert lines[0].endswith("time left unknown: no group with signal has finished yet")
