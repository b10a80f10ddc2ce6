"""Dynamic sampling with a scripted source: signal, errors, and token accounting."""

import itertools
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_core.config.compat import OURS, VERL
from dapo_core.draw.account import FATES, fate_without_signal
from dapo_core.draw.report import NotEnoughSignal
from dapo_core.draw.sampler import Sampler
from dapo_core.errors import RewardError, RolloutError
from tests.batches import UNSCORED, make_group
from tests.sources import (
    MIXED,
    RIGHT,
    TOKENS_PER_GROUP,
    WRONG,
    Clock,
    ScriptedSource,
    SlowSource,
    booked,
    make_sampler,
)


def test_only_groups_with_signal_are_kept_and_the_rest_is_accounted_for() -> None:
    source = ScriptedSource([RIGHT, MIXED, WRONG, MIXED], burst=4)
    draw = make_sampler(source, train_prompts=4).draw(step=1)
    # eight prompts give 4 mixed, 2 all right, 2 all wrong: 4 right + 4 * 1 right of 16 responses
    assert [group.metric("acc") for group in draw.groups] == [[1.0, 0.0]] * 4
    assert draw.num_drawn == 8
    assert booked(draw) == {"kept": 4, "all_right": 2, "all_wrong": 2}
    assert (draw.account.num_right, draw.account.num_finished) == (8, 16)
    assert draw.account.generated_tokens == 8 * TOKENS_PER_GROUP
    assert draw.account.tokens["kept"] == 4 * TOKENS_PER_GROUP
    assert draw.account.waste_ratio == 0.5  # (12 + 12) / (24 + 24)
    assert draw.account.reward_seconds == 0.5


def test_exhausted_draws_fail_with_counts_accuracy_and_keys() -> None:
    source = ScriptedSource([RIGHT, WRONG, WRONG, MIXED], burst=4)
    with pytest.raises(NotEnoughSignal) as caught:
        make_sampler(source, train_prompts=3, max_num_gen_batches=2).draw(step=1)
    message = str(caught.value)
    # 2 all right, 4 all wrong, 2 mixed: 4 + 2 of 16 responses are right
    assert "8 new prompts and the groups carried over gave 2 of 3 groups with signal" in message
    assert (
        "of 8 finished groups 2 all right, 4 all wrong, 25.0% had signal (mean accuracy "
        "37.5%)" in message
    )
    assert "sampler.max_num_gen_batches" in message


@pytest.mark.parametrize(
    ("outcome", "word", "advice"),
    [(WRONG, "wrong", r"raise rollout\.group_size"), (RIGHT, "right", "too easy for the model")],
)
def test_draws_without_any_signal_say_so_first(
    outcome: list[float], word: str, advice: str
) -> None:
    source = ScriptedSource([outcome], burst=4)
    opening = (
        rf"^every response to the 4 prompts was {word}, so there is nothing to learn from: this "
        rf"step needs 1 prompt with both right and wrong responses\. 4 new prompts .* {advice}"
    )
    with pytest.raises(NotEnoughSignal, match=opening):
        make_sampler(source, train_prompts=1, max_num_gen_batches=1).draw(step=1)


def test_without_a_draw_limit_a_step_draws_until_it_is_full() -> None:
    source = ScriptedSource([WRONG] * 6 + [MIXED], burst=4)  # of 7 prompts one has signal
    draw = make_sampler(source, train_prompts=4, max_num_gen_batches=0).draw(step=1)
    assert len(draw.groups) == 4
    assert draw.num_drawn >= 28  # 4 x 7: more than 5 draws of 4
    assert draw.account.groups["all_wrong"] == 24


@pytest.mark.parametrize(("on_exhausted", "num_trained"), [("train_partial", 2), ("skip_step", 0)])
def test_without_a_draw_limit_an_epoch_without_signal_ends_the_step(
    on_exhausted: str, num_trained: int
) -> None:
    script = [MIXED, RIGHT, MIXED, *[WRONG] * 60]

    def sampler(way: str) -> Sampler:
        return make_sampler(
            ScriptedSource(script, burst=1), 3, max_num_gen_batches=0, on_exhausted=way
        )

    with pytest.raises(NotEnoughSignal) as caught:
        sampler("raise").draw(1)
    # the third prompt was the last with signal; when 7 more have finished, up to 3 are still in
    # flight
    assert "2 of 3 groups with signal" in str(caught.value)
    assert re.search(
        r"The last (7|8|9|10) groups had no signal, and the data has 7 prompts: drawing more "
        r"would never end \(sampler\.max_num_gen_batches=0\)\. .* raise rollout\.group_size\. "
        r"Otherwise lower train\.train_prompts",
        str(caught.value),
    )
    assert len(sampler(on_exhausted).draw(1).groups) == num_trained


@pytest.mark.parametrize(
    ("script", "on_exhausted", "indices", "fates", "message"),
    [
        (
            [WRONG, MIXED],
            "train_partial",
            [1, 3, 5, 0],  # the eighth prompt drawn is the first of the next epoch
            {"kept": 4, "all_wrong": 4},
            "4 of 5 groups with signal",
        ),
        ([WRONG, MIXED], "skip_step", [], {"all_wrong": 4, "surplus": 4}, "Skipping the step"),
        (
            [WRONG],
            "train_partial",
            [],
            {"all_wrong": 8},
            "Skipping the step (sampler.on_exhausted=train_partial)",
        ),
    ],
)
def test_exhausted_draws_train_partially_or_skip_the_step(
    caplog: pytest.LogCaptureFixture,
    script: list[list[float]],
    on_exhausted: str,
    indices: list[int],
    fates: dict[str, int],
    message: str,
) -> None:
    sampler = make_sampler(
        ScriptedSource(script, burst=4), 5, max_num_gen_batches=2, on_exhausted=on_exhausted
    )
    draw = sampler.draw(step=1)
    assert [group.prompt.index for group in draw.groups] == indices
    assert booked(draw) == fates
    assert draw.account.waste_ratio == (0.5 if indices else 1.0)
    assert message in caplog.text
    # a skipped step leaves its groups to the next
    assert len(sampler.surplus) == fates.get("surplus", 0)


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("on_exhausted", ["raise", "train_partial", "skip_step"])
def test_a_scorer_that_always_fails_ends_training(dynamic: bool, on_exhausted: str) -> None:
    source = ScriptedSource([[UNSCORED, UNSCORED]], burst=4)
    sampler = make_sampler(source, 4, gen_prompts=4, dynamic=dynamic, on_exhausted=on_exhausted)
    with pytest.raises(RewardError, match=r"timed out on all 8 responses .* custom_reward\.path"):
        sampler.draw(step=1)
    assert len(source.fresh) == 4  # no second draw


def test_one_unscored_prompt_does_not_end_training() -> None:
    source = ScriptedSource([MIXED, [UNSCORED, UNSCORED], MIXED, MIXED], burst=1)
    sampler = make_sampler(source, train_prompts=1)
    assert [group.group_id for group in sampler.draw(step=1).groups] == [0]
    draw = sampler.draw(step=2)  # in which the second group finishes first
    assert [group.group_id for group in draw.groups] == [2]
    assert draw.account.num_unscored == 2


def test_without_dynamic_sampling_every_group_is_kept() -> None:
    source = ScriptedSource([RIGHT, WRONG, MIXED, RIGHT], burst=3)
    draw = make_sampler(source, train_prompts=4, dynamic=False).draw(step=1)
    assert [group.prompt.index for group in draw.groups] == [0, 1, 2, 3]
    assert booked(draw) == {"kept": 4}


@pytest.mark.parametrize(("metric", "num_kept"), [("acc", 0), ("score", 2)])
def test_the_filter_metric_decides_which_groups_have_signal(metric: str, num_kept: int) -> None:
    source = ScriptedSource([[-1.0, -0.5]], burst=4)  # both wrong, scored differently
    draw = make_sampler(
        source, 2, gen_prompts=2, max_num_gen_batches=1, metric=metric, on_exhausted="train_partial"
    ).draw(step=1)
    assert len(draw.groups) == num_kept


def test_rounding_noise_and_groups_of_one_have_signal_only_for_verl() -> None:
    # [0.1] * 3 has a numpy standard deviation of 1.4e-17
    source = ScriptedSource([[0.1] * 3, [1.0] * 3], burst=4)
    ours = make_sampler(
        source, 2, metric="score", max_num_gen_batches=1, on_exhausted="train_partial"
    ).draw(1)
    assert booked(ours) == {"all_right": 4}
    verl = make_sampler(source, 2, compat=VERL, metric="score", max_num_gen_batches=1).draw(1)
    assert booked(verl) == {"kept": 2, "all_right": 2}
    alone = ScriptedSource([[1.0]], burst=4)  # a group of one
    ours = make_sampler(alone, 1, max_num_gen_batches=1, on_exhausted="skip_step").draw(1)
    assert booked(ours) == {"all_right": 4}
    assert booked(make_sampler(alone, 4, compat=VERL).draw(1)) == {"kept": 4}


@pytest.mark.parametrize(
    ("accs", "fate"),
    [
        ([10.0, 10.0], "all_right"),  # a custom scorer that returns points
        ([0.0, 0.0], "all_wrong"),
        ([0.5, 0.5], "all_equal"),
        ([1.0, 0.0], "all_equal"),  # equal scores with different `acc`
    ],
)
def test_groups_without_signal_are_told_apart(accs: list[float], fate: str) -> None:
    group = make_group([0.5] * len(accs))
    rollouts = [replace(group.rollouts[0], acc=acc) for acc in accs]
    assert fate_without_signal(replace(group, rollouts=rollouts)) == fate


def test_unscored_responses_give_no_signal() -> None:
    script = [[1.0, 1.0, UNSCORED], [-1.0, UNSCORED], [UNSCORED, UNSCORED], [1.0, -1.0, UNSCORED]]
    for compat in (OURS, VERL):
        draw = make_sampler(ScriptedSource(script, burst=4), 1, compat=compat).draw(1)
        assert booked(draw) == {"kept": 1, "all_right": 1, "all_wrong": 2}
    assert [rollout.reward for rollout in draw.groups[0].rollouts] == [1.0, -1.0, 0.0]
    assert draw.groups[0].metric("seq_reward") == [1.0, -1.0]


@pytest.mark.parametrize(
    ("script", "pause", "max_seconds", "error", "seen"),
    [
        (
            [MIXED],
            10_000,
            30.0,
            RolloutError,
            "no group was kept for 31 s of training step 3. 4 new prompts and the groups carried "
            "over gave 0 of 2 groups with signal: of 0 finished groups|4 groups with 0 response "
            "tokens are in flight|No group finished",
        ),
        # after 12 s six groups have come: two all right, four all wrong; three others are in flight
        (
            [RIGHT, WRONG, WRONG],
            2,
            11.5,
            NotEnoughSignal,
            "no group was kept for 12 s|of 6 finished groups 2 all right, 4 all wrong, "
            "0.0% had signal (mean accuracy 33.3%)|3 groups with 0 response tokens are in flight",
        ),
    ],
)
def test_a_draw_without_signal_ends_with_a_report(
    script: list[list[float]], pause: int, max_seconds: float, error: type[Exception], seen: str
) -> None:
    clock = Clock()
    source = SlowSource(script, clock, seconds=1.0, pause=pause)
    sampler = make_sampler(
        source, 2, clock=clock, max_num_gen_batches=1000, max_seconds_without_kept=max_seconds
    )
    with pytest.raises(error) as caught:
        sampler.draw(step=3)
    for words in (*seen.split("|"), "sampler.max_seconds_without_kept"):
        assert words in str(caught.value)


def test_every_kept_group_restarts_the_time_limit() -> None:
    clock = Clock()
    source = SlowSource([MIXED], clock, seconds=1.0, pause=9)
    draw = make_sampler(source, 4, clock=clock, max_seconds_without_kept=9.5).draw(step=1)
    assert len(draw.groups) == 4
    assert clock.now == 100.0 + 4 * 9


def test_engines_that_stop_responding_are_detected() -> None:
    clock = Clock()
    source = SlowSource([MIXED], clock, seconds=1.0, pause=1)
    source.waits = itertools.chain([True], itertools.repeat(False))  # type: ignore[assignment]
    with pytest.raises(RolloutError, match=r"gave 1 of 2 groups with signal: .* No group finished"):
        make_sampler(source, 2, clock=clock, max_seconds_without_kept=5.0).draw(step=1)


@pytest.mark.slow
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
def test_token_accounts_balance_in_every_step(
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
    sampler = make_sampler(
        source,
        train_prompts,
        gen_prompts=gen_prompts,
        max_num_gen_batches=3,
        max_staleness=max_staleness,
        on_exhausted=on_exhausted,
        dynamic=dynamic,
    )
    for step in range(1, 7):
        carried, before = [*sampler.surplus, *sampler.unfinished], sampler.stream.position
        draw = sampler.draw(step)
        groups, tokens = draw.account.groups, draw.account.tokens
        num_drawn = sampler.stream.position - before
        assert num_drawn == draw.num_drawn <= 3 * gen_prompts
        assert draw.account.carried_in_groups == len(carried)
        assert draw.account.carried_in_tokens == sum(item.num_response_tokens for item in carried)
        assert draw.account.carried_out_groups == len(sampler.unfinished)
        assert draw.account.carried_out_tokens == sum(
            item.num_response_tokens for item in sampler.unfinished
        )
        assert num_drawn + len(carried) == sum(groups[fate] for fate in FATES) + len(
            sampler.unfinished
        )
        assert draw.account.generated_tokens + draw.account.carried_in_tokens == (
            sum(tokens[fate] for fate in FATES) + draw.account.carried_out_tokens
        )
        assert draw.account.generated_tokens >= 0
        assert groups["kept"] == len(draw.groups) <= train_prompts
        assert groups["surplus"] == len(sampler.surplus)
        assert source.num_in_flight == 0
        if dynamic:
            assert all(group.metric("acc") == [1.0, 0.0] for group in draw.groups)
