"""Messages of a draw: progress, a hint if no group has signal, and the reasons for giving up."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from dapo_core.draw.account import NO_SIGNAL, TokenAccount
from dapo_core.draw.texts import Decode, example
from dapo_core.errors import DapoError, RewardError, RolloutError, counted
from heartbeat import SECONDS

if TYPE_CHECKING:
    from dapo_core.config.sampler import SamplerConfig
    from dapo_core.draw.groups import Group, Rollout
    from dapo_core.draw.prompts import Prompt

logger = logging.getLogger(__name__)

STALL_ADVICE = (
    "If few tokens are in flight, an engine hangs: try rollout.engine=hf to confirm. If the "
    "number is near its maximum, scoring hangs: lower reward.timeout_seconds. Otherwise raise "
    "sampler.max_seconds_without_kept or lower rollout.max_response_tokens"
)
HINT_GROUPS = 20
NUM_EXAMPLES = 2


class NotEnoughSignal(DapoError, RuntimeError):
    """Dynamic sampling found too few groups with signal within its limits."""


class DrawProgress:
    """Logs the progress of a draw every 7 s; `decode` turns tokens into text."""

    def __init__(
        self, train_prompts: int, decode: Decode, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.train_prompts = train_prompts
        self.clock = clock
        self._decode = decode
        self._has_hinted = False
        self._examples: list[tuple[Prompt, Rollout]] = []
        self._step = 0
        self._began = self._next_log = 0.0
        self._num_carried = 0  # groups with signal carried over from earlier steps
        self._last = (0.0, 0)  # time and tokens of the last line

    def begin(self, step: int, num_carried: int) -> None:
        """Start the draw of training step `step`, which has `num_carried` groups already."""
        self._step, self._num_carried, self._examples = step, num_carried, []
        self._began = now = self.clock()
        self._next_log, self._last = now + SECONDS, (now, 0)

    def show(
        self, account: TokenAccount, num_drawn: int, num_ready: int, num_open_tokens: int
    ) -> None:
        """Log the progress, if due. `num_open_tokens`: in flight, sampled in this step."""
        if not self._has_hinted and not num_ready and account.finished_groups >= HINT_GROUPS:
            self._has_hinted = True
            logger.warning("%s%s", _hint(account), self.examples())
        now = self.clock()
        if now < self._next_log:
            return
        num_tokens = account.generated_tokens + num_open_tokens
        pace = max(num_tokens - self._last[1], 0) / (now - self._last[0])
        self._next_log, self._last = now + SECONDS, (now, num_tokens)
        logger.info(
            "training step %d: %d groups drawn, %d finished, %d of %d kept, %s; %.0f tokens/s, %s",
            self._step,
            num_drawn,
            account.finished_groups,
            min(num_ready, self.train_prompts),
            self.train_prompts,
            account.without_signal,
            pace,
            self._remaining(now, num_ready),
        )

    def end(self, num_ready: int) -> None:
        """Log the end of a draw whose progress was logged."""
        if (seconds := self.clock() - self._began) >= SECONDS:
            kept = min(num_ready, self.train_prompts), self.train_prompts
            logger.info("training step %d: %d of %d kept after %.0f s", self._step, *kept, seconds)

    def remember(self, group: Group) -> None:
        """Take a response of a group without signal as an example, if one is wanted."""
        if len(self._examples) < NUM_EXAMPLES:
            self._examples.append((group.prompt, group.rollouts[0]))

    def examples(self) -> str:
        """Return two responses of the step without signal, as the end of a message."""
        shown = [example(*pair, self._decode) for pair in self._examples]
        return f". Such as {'; '.join(shown)}" if shown else ""

    def _remaining(self, now: float, num_ready: int) -> str:
        num_new, num_left = num_ready - self._num_carried, self.train_prompts - num_ready
        if num_left <= 0:
            return "waiting for longer responses of earlier prompts"
        if num_new <= 0:
            return "time left unknown: no group with signal has finished yet"
        return f"about {(now - self._began) / num_new * num_left:.0f} s left"


def _hint(account: TokenAccount) -> str:
    return (
        f"the first {account.finished_groups} groups have no signal: {account.without_signal} "
        f"(mean accuracy {account.num_right / max(account.num_finished, 1):.1%}). "
        f"{cause_of(account)}"
    )


def cause_of(account: TokenAccount) -> str:
    """Say why groups have no signal, as far as the responses show it, and what to change."""
    num_finished = max(account.num_finished, 1)
    if account.groups["all_right"] > account.finished_groups / 2:
        return (
            "The prompts are too easy for the model: use harder ones, or raise rollout.temperature"
        )
    num_cut = account.lengths["finished"].num_cut
    if num_cut > num_finished / 2:
        return (
            f"{num_cut / num_finished:.0%} of the responses are cut by "
            "rollout.max_response_tokens: raise it, use a model that ends its answers, or show "
            "solved examples in the prompt (data.prompt_template)"
        )
    if account.num_unread > num_finished / 2:
        return (
            f"The scorer finds no answer in {account.num_unread / num_finished:.0%} of the "
            "responses: ask for the form that it reads, with solved examples if need be "
            "(data.prompt_template, model.chat_template), or choose another scorer "
            "(reward.scorers; exact reads every form)"
        )
    too_hard = (
        "the prompts are too hard: use easier ones, show solved examples in the prompt "
        "(data.prompt_template), or raise rollout.group_size"
    )
    if account.num_answers:
        return f"The scorer reads answers, so {too_hard}"
    return (
        "Either the model's answer format is not the one that the scorer reads (`dapo doctor "
        f"CONFIG` shows both), or {too_hard}"
    )


def finished_groups_message(account: TokenAccount) -> str:
    """Describe the step's finished groups by outcome, as a clause of an error."""
    unscored = f"{account.num_unscored} responses have no score, " if account.num_unscored else ""
    num_finished = account.finished_groups
    num_even = sum(account.groups[fate] for fate in NO_SIGNAL)
    return (
        f"of {num_finished} finished groups {account.without_signal}, "
        f"{unscored}{1 - num_even / max(num_finished, 1):.1%} had signal (mean accuracy "
        f"{account.num_right / max(account.num_finished, 1):.1%})"
    )


def draw_summary(
    account: TokenAccount,
    num_drawn: int,
    num_ready: int,
    num_needed: int,
    num_in_flight: int,
    num_tokens: int,
) -> str:
    """Describe how far a draw has come, as the first sentence of an error."""
    return (
        f"{num_drawn} new prompts and the groups carried over gave {num_ready} of {num_needed} "
        f"groups with signal: {finished_groups_message(account)}; {num_in_flight} groups with "
        f"{num_tokens} response tokens are in flight."
    )


def nothing_to_learn(account: TokenAccount, train_prompts: int) -> str:
    """Return the opening for a draw that was all right or all wrong; "" for other draws."""
    num_finished, groups = account.finished_groups, account.groups
    prompts = counted(num_finished, "prompt")
    openings = (
        (groups["all_right"], f"every response to the {prompts} was right"),
        (account.unread_groups, f"the scorer finds no answer in any response to the {prompts}"),
        (groups["all_wrong"], f"every response to the {prompts} was wrong"),
    )
    for num_even, opening in openings:
        if num_finished and num_even == num_finished and not account.num_unscored:
            return (
                f"{opening}, so there is nothing to learn from: this step needs "
                f"{counted(train_prompts, 'prompt')} with both right and wrong responses. "
            )
    return ""


def exhausted_message(
    account: TokenAccount,
    summary: str,
    num_since_signal: int,
    num_prompts: int,
    settings: SamplerConfig,
) -> str:
    """Explain why a draw ends without enough groups and, for on_exhausted=raise, what to change."""
    bound, reason = "raise sampler.max_num_gen_batches, ", summary
    if not settings.max_num_gen_batches:
        bound = ""
        reason += (
            f" The last {num_since_signal} groups had no signal, and the data has {num_prompts} "
            "prompts: drawing more would never end (sampler.max_num_gen_batches=0)."
        )
    if settings.on_exhausted != "raise":
        return reason
    return (
        f"{reason} {cause_of(account)}. Otherwise {bound}lower train.train_prompts, or set "
        "sampler.on_exhausted to train_partial or skip_step"
    )


def no_scores_error(account: TokenAccount) -> RewardError:
    """Return the error for a step in which the scorer failed on every response."""
    return RewardError(
        f"the scorer raised or timed out on all {account.num_finished} responses that finished in "
        "this step; its first tracebacks are in the log. Fix the file in custom_reward.path, or "
        "raise reward.timeout_seconds"
    )


def stalled_error(
    account: TokenAccount, summary: str, num_since_signal: int, seconds: float, step: int
) -> DapoError:
    """Return the error for a draw that kept no group for `seconds`."""
    message = f"no group was kept for {seconds:.0f} s of training step {step}. {summary}"
    if num_since_signal:
        return NotEnoughSignal(
            f"{message} {cause_of(account)}. Otherwise raise sampler.max_seconds_without_kept"
        )
    return RolloutError(f"{message} No group finished in this time. {STALL_ADVICE}")
