"""Messages of a draw: a progress line every 7 s, and a hint if no group has signal."""

import pytest

from dapo_core.draw.account import Lengths, TokenAccount
from dapo_core.draw.report import DrawProgress, NotEnoughSignal
from dapo_core.errors import RolloutError
from tests.batches import NO_ANSWER, make_group
from tests.sources import Clock, ScriptedSource, make_sampler


def account(
    wrong: int = 0, right: int = 0, cut: int = 0, equal: int = 0, unread: int = 0, read: int = 0
) -> TokenAccount:
    """Groups of two responses; `unread` of the wrong groups have no answer, `read` responses do."""
    count = TokenAccount(finished_groups=wrong + right + equal)
    count.groups["all_wrong"], count.groups["all_right"] = wrong, right
    count.groups["all_equal"] = equal
    count.lengths["finished"] = Lengths(2 * count.finished_groups, 0, cut)
    count.num_right, count.num_answers = 2 * right, read
    count.num_unread, count.unread_groups = 2 * unread, unread
    return count


def test_progress_is_logged_every_seven_seconds_with_rate_and_time_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    clock = Clock()
    progress = DrawProgress(16, str, clock)
    progress.begin(3, num_carried=2)
    for _ in range(25):
        clock.now += 1
        seen = account(wrong=9, right=20, unread=3)
        seen.finished_groups = 39
        seen.generated_tokens = int(clock.now - 100) * 50  # and 30 a second of groups in flight
        progress.show(seen, 96, num_ready=10, num_open_tokens=int(clock.now - 100) * 30)
    assert caplog.messages == [  # 8 groups in 7 s: 5.25 s for the 6 that are left
        "training step 3: 96 groups drawn, 39 finished, 10 of 16 kept, 20 all right, 6 all wrong, "
        f"3 without an answer; 80 tokens/s, about {seconds} s left"
        for seconds in (5, 10, 16)
    ]
    progress.end(num_ready=18)
    assert caplog.messages[3:] == ["training step 3: 16 of 16 kept after 25 s"]
    progress.begin(4, num_carried=0)
    progress.end(num_ready=16)  # at once
    assert len(caplog.messages) == 4


@pytest.mark.parametrize(
    ("seen", "advice"),
    [
        (account(wrong=1, right=19), "too easy for the model"),
        (account(wrong=20), "answer format is not the one that the scorer reads"),
        (account(wrong=20, read=5), "The scorer reads answers, so the prompts are too hard"),
        (account(wrong=20, unread=20), "The scorer finds no answer in 100% of the responses"),
        (
            account(right=1, equal=19),
            "0 all wrong, 19 all equal (mean accuracy 5.0%). Either the model's answer format",
        ),
        (
            account(wrong=20, cut=30, unread=15),
            "75% of the responses are cut by rollout.max_response_tokens",
        ),
    ],
)
def test_twenty_groups_without_signal_log_one_hint_with_the_likely_cause_and_two_responses(
    caplog: pytest.LogCaptureFixture, seen: TokenAccount, advice: str
) -> None:
    progress = DrawProgress(16, lambda ids: f"text {ids[0]} {'x' * 500} end", Clock())
    progress.begin(1, 0)
    for number in range(3):
        progress.remember(make_group([-1.0, -1.0], number))
    progress.show(account(wrong=19), 200, 0, 0)
    assert caplog.messages == []
    for _ in range(2):
        progress.show(seen, 200, 0, 0)
    (message,) = caplog.messages
    assert message.startswith("the first 20 groups have no signal: ")
    assert advice in message
    assert message.count("end' (wrong, gold '1')") == 2
    assert len(message) < 1300, "texts are shortened"


@pytest.mark.parametrize("way", ["raise", "skip_step"])
def test_responses_without_an_answer_are_not_called_wrong(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The scorer finds no answer in any response."""
    source = ScriptedSource([[NO_ANSWER, NO_ANSWER]], burst=4)
    sampler = make_sampler(source, 1, max_num_gen_batches=1, on_exhausted=way)
    if way == "raise":
        with pytest.raises(NotEnoughSignal) as caught:
            sampler.draw(step=1)
        message = str(caught.value)
    else:
        sampler.draw(step=1)
        message = caplog.messages[-1]
    assert message.startswith("the scorer finds no answer in any response to the 4 prompts, so")
    assert "of 4 finished groups 0 all right, 0 all wrong, 4 without an answer, 0.0%" in message
    assert message.count("(no answer, gold '1')") == 2
    assert "was wrong" not in message


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
    assert len(lines) == 3
    assert "4 groups drawn, 0 finished, 0 of 2 kept" in lines[0]
    assert lines[0].endswith("time left unknown: no group with signal has finished yet")
