"""What a draw says: its progress, a hint when nothing has signal, and why it ended without enough groups."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from dapo_core.errors import DapoError, RewardError, RolloutError
from dapo_core.token_account import NO_SIGNAL, TokenAccount

if TYPE_CHECKING:
    from dapo_core.config.sampler import SamplerConfig

logger = logging.getLogger(__name__)

WORD_SECONDS = 10.0
HINT_GROUPS = 100


class NotEnoughSignal(DapoError, RuntimeError):
    """Dynamic sampling drew its bound of batches, or an epoch without signal, and kept too few groups."""


class DrawProgress:
    """Logs the progress of each draw; one that ends within 10 s says nothing."""

    def __init__(self, train_prompts: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.train_prompts = train_prompts
        self._clock = clock
        self._has_hinted = False
        self._step = 0
        self._began = self._next_word = 0.0
        self._num_waiting = 0  # groups with signal that the step began with
        self._last = (0.0, 0)  # time and tokens of the last line

    def begin(self, step: int, num_waiting: int) -> None:
        """The draw of training step `step` begins with `num_waiting` groups that have signal."""
        self._step, self._num_waiting = step, num_waiting
        self._began = now = self._clock()
        self._next_word, self._last = now + WORD_SECONDS, (now, 0)

    def show(self, account: TokenAccount, num_drawn: int, num_ready: int, num_open_tokens: int) -> None:
        """Log how far the draw is, if it is time; `num_open_tokens`, sampled in this step, are in flight."""
        if not self._has_hinted and not num_ready and account.finished_groups >= HINT_GROUPS:
            self._has_hinted = True
            logger.warning("%s", _hint(account))
        now = self._clock()
        if now < self._next_word:
            return
        num_tokens = account.generated_tokens + num_open_tokens
        pace = max(num_tokens - self._last[1], 0) / (now - self._last[0])
        self._next_word, self._last = now + WORD_SECONDS, (now, num_tokens)
        logger.info(
            "training step %d draws: %d groups drawn, %d finished, %d of %d kept, %s; %.0f tokens/s, %s",
            self._step,
            num_drawn,
            account.finished_groups,
            min(num_ready, self.train_prompts),
            self.train_prompts,
            account.without_signal,
            pace,
            self._end(now, num_ready),
        )

    def _end(self, now: float, num_ready: int) -> str:
        num_new, num_left = num_ready - self._num_waiting, self.train_prompts - num_ready
        if num_left <= 0:
            return "waiting for longer responses of earlier prompts"
        if num_new <= 0:
            return "no end to be seen: no group with signal finished yet"
        return f"about {(now - self._began) / num_new * num_left:.0f} s left"


def _hint(account: TokenAccount) -> str:
    seen = (
        f"the first {account.finished_groups} groups have no signal: {account.without_signal} "
        f"(mean accuracy {account.num_right / max(account.num_finished, 1):.1%})."
    )
    if account.groups["all_right"] > account.finished_groups / 2:
        return f"{seen} The prompts are too easy for the model: take harder ones, or raise rollout.temperature"
    cut = account.lengths["finished"]
    if cut.num_cut > cut.num_responses / 2:
        return (
            f"{seen} {cut.num_cut / cut.num_responses:.0%} of the responses are cut by "
            "rollout.max_response_tokens: raise it, or take a model that ends its answers"
        )
    return (
        f"{seen} The model answers in another form than the scorer reads (`dapo doctor CONFIG` shows both), or "
        "the prompts are too hard: take easier ones, or raise rollout.group_size"
    )


def finished_groups(account: TokenAccount) -> str:
    """The step's finished groups by what they are worth, as a clause of an error."""
    unscored = f"{account.num_unscored} responses have no score, " if account.num_unscored else ""
    groups, num_finished = account.groups, account.finished_groups
    equal = f"{groups['all_equal']} all equal, " if groups["all_equal"] else ""
    num_even = sum(groups[fate] for fate in NO_SIGNAL)
    return (
        f"of {num_finished} finished groups {groups['all_right']} were all right and {groups['all_wrong']} all "
        f"wrong, {equal}{unscored}{1 - num_even / max(num_finished, 1):.1%} had signal (mean accuracy "
        f"{account.num_right / max(account.num_finished, 1):.1%})"
    )


def out_of_draws(seen: str, num_since_signal: int, num_prompts: int, settings: SamplerConfig) -> str:
    """Why a draw that saw this draws no more; under `on_exhausted: raise`, an error, also what helps."""
    bound, reason = " or sampler.max_num_gen_batches", seen
    if not settings.max_num_gen_batches:
        bound = ""
        reason += (
            f" The last {num_since_signal} groups had no signal, and the data has {num_prompts} prompts: drawing "
            "on would not end (sampler.max_num_gen_batches=0)."
        )
    if settings.on_exhausted != "raise":
        return reason
    return (
        f"{reason} Use prompts nearer to the model's ability, raise rollout.group_size{bound}, lower "
        "train.train_prompts, or set sampler.on_exhausted to train_partial or skip_step"
    )


def no_scores(account: TokenAccount) -> RewardError:
    """The error of a step in which the scorer failed on every response."""
    return RewardError(
        f"the scorer raised or ran out of time on all {account.num_finished} responses that finished in this "
        "step; the log has its first tracebacks: correct the file of custom_reward.path, or raise "
        "reward.timeout_seconds"
    )


def silence(seconds: float, step: int, num_since_signal: int, seen: str) -> DapoError:
    """The error of a draw that kept no group for these seconds, in which `num_since_signal` finished."""
    message = f"no group was kept for {seconds:.0f} s of training step {step}. {seen}"
    if num_since_signal:
        return NotEnoughSignal(
            f"{message} Use prompts nearer to the model's ability, raise rollout.group_size, or raise "
            "sampler.max_seconds_without_kept"
        )
    return RolloutError(
        f"{message} In this time no group finished. With few tokens in flight an engine hangs, and "
        "rollout.engine=hf shows whether it is that one; with as many as there can be, scoring does: lower "
        "reward.timeout_seconds; else raise sampler.max_seconds_without_kept or lower rollout.max_response_tokens"
    )
