"""Dynamic sampling: draw prompts until enough groups carry signal, and account for every token."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from dapo_core.compat import OURS, Compat
from dapo_core.data import PromptStream
from dapo_core.draw_report import (
    DrawProgress,
    NotEnoughSignal,
    finished_groups,
    no_scores,
    out_of_draws,
    silence,
)
from dapo_core.engines.base import Response
from dapo_core.groups import Group, GroupRequest, Rollout
from dapo_core.token_account import Fate, LengthWatch, TokenAccount

if TYPE_CHECKING:
    from dapo_core.cluster.rollout_group import RolloutGroup
    from dapo_core.config.sampler import SamplerConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Draw:
    """What one training step learns from."""

    groups: list[Group]  # P of them; fewer only under on_exhausted train_partial or skip_step
    num_drawn: int  # prompts
    account: TokenAccount


@dataclass
class _Filling:
    """A step that does not have its P groups yet."""

    step: int
    account: TokenAccount
    last_signal: float  # when the last group with signal finished, by the sampler's clock
    ready: dict[int, tuple[int, Group]] = field(default_factory=dict)  # with signal, by id, as they finished
    dropped: list[Rollout | Response] = field(default_factory=list)  # that might have been trained on
    num_drawn: int = 0  # prompts
    finished_since_signal: int = 0  # groups
    is_skipped: bool = False


class Sampler:
    """Fills training steps with groups that carry signal.

    `sampler.order` says with which. stream: with the first ones in prompt order, so that a group's length has no
    say. Groups before them have finished; later ones, finished or not, go on into the next step. So that none gets
    older than `max_staleness` steps, no more prompts are open than `1 + max_staleness` steps train on: each step
    takes the first P of them. finish: with those that finish first, which are the shorter ones.

    With `is_deterministic` a step takes groups in prompt order, and only when none is in flight, so that speed
    decides nothing. `while_waiting` may be set; it is called about once a second, and whenever groups finished.
    """

    def __init__(
        self,
        source: RolloutGroup,
        stream: PromptStream,
        train_prompts: int,
        settings: SamplerConfig,
        compat: Compat = OURS,
        is_deterministic: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.source = source
        self.stream = stream
        self.train_prompts = train_prompts
        self.settings = settings
        self.compat = compat
        self.is_deterministic = is_deterministic
        self.is_in_prompt_order = settings.order == "stream" or is_deterministic
        self.carries_over = settings.order == "stream" or settings.in_flight == "carry_over"
        self.clock = clock
        self.while_waiting: Callable[[], None] = lambda: None
        self.progress = DrawProgress(train_prompts, clock)
        self.surplus: list[tuple[int, Group]] = []  # (step that sampled its oldest token, group with signal)
        self.unfinished: list[tuple[int, GroupRequest]] = []  # likewise
        # Groups in flight: group id -> (step of its oldest token, tokens when submitted).
        self._submitted: dict[int, tuple[int, int]] = {}
        self._watch = LengthWatch()

    def draw(self, step: int) -> Draw:
        """The groups of training step `step`.

        Surplus and unfinished groups of the steps before come first. Fresh prompts are drawn as `_num_to_draw`
        says. Once the step is full, finished groups with signal become surplus, and unfinished ones are carried
        over to the next step or aborted. Raises NotEnoughSignal when the bound on draws is reached under
        `on_exhausted: raise`, or the bound on time without signal; RolloutError when nothing finished in it.
        """
        filling = _Filling(step, TokenAccount(), self.clock())
        self._carry_in(filling)
        self.progress.begin(step, len(filling.ready))
        while len(self._chosen(filling)) < self.train_prompts:
            if num_fresh := self._num_to_draw(filling):
                self._refuse_no_scores(filling.account, self.settings.gen_prompts)
                self._submit_fresh(filling, num_fresh)
            elif not self.source.num_in_flight:
                self._refuse_no_scores(filling.account, self.train_prompts)
                self._give_up(filling)
                break
            self._record(self.source.finished(), filling)
            self.progress.show(filling.account, filling.num_drawn, len(filling.ready), self._num_open_tokens())
            self.while_waiting()
            self._refuse_silence(filling)
        self._stop(filling)
        if not self.settings.dynamic:  # else the step's groups have scores
            self._refuse_no_scores(filling.account, self.train_prompts)
        return self._finish(filling)

    def redraw(
        self, step: int, surplus: Sequence[tuple[int, Group]], unfinished: Sequence[tuple[int, GroupRequest]]
    ) -> None:
        """Begin the draw of step `step` with the prompts of these groups, without their responses."""
        prompts = {group.group_id: group.prompt for _, group in surplus}
        prompts |= {request.group_id: request.prompt for _, request in unfinished}
        self.unfinished = [(step, GroupRequest(number, prompts[number], step)) for number in sorted(prompts)]

    def _chosen(self, filling: _Filling) -> list[int]:
        """Ids of the groups that the step trains on, as far as that is decided: at most P."""
        if self.is_deterministic and self.source.num_in_flight:
            return []
        chosen = list(filling.ready)
        if self.is_in_prompt_order:
            open_ids = [*self._submitted, *(request.group_id for _, request in self.unfinished)]
            first_open = min(open_ids, default=self.stream.position)
            chosen = sorted(group_id for group_id in chosen if group_id < first_open)
        return chosen[: self.train_prompts]

    def _num_to_draw(self, filling: _Filling) -> int:
        """How many prompts to draw now.

        In stream order as many as have become free of `gen_prompts` that are in flight or wait, of which there
        are at least P and at most (1 + max_staleness) * P. In finishing order `gen_prompts`, whenever the groups
        in flight could not fill the step.
        """
        if self.is_deterministic and self.source.num_in_flight:
            return 0
        settings, num_open = self.settings, len(filling.ready) + self.source.num_in_flight
        if settings.order == "stream":
            most_open = min(settings.gen_prompts, (1 + settings.max_staleness) * self.train_prompts)
            wanted = max(most_open, self.train_prompts) - num_open
        else:
            wanted = settings.gen_prompts if num_open < self.train_prompts else 0
        if settings.max_num_gen_batches:
            wanted = min(wanted, settings.gen_prompts * settings.max_num_gen_batches - filling.num_drawn)
        elif filling.finished_since_signal >= max(len(self.stream.prompts), settings.gen_prompts):
            return 0  # an epoch without signal, and there is no bound
        return max(wanted, 0)

    def _carry_in(self, filling: _Filling) -> None:
        account, waiting, unfinished = filling.account, self.surplus, self.unfinished
        self.surplus, self.unfinished = [], []
        account.carried_in_groups = len(waiting) + len(unfinished)
        account.carried_in_tokens = sum(group.num_response_tokens for _, group in waiting)
        account.carried_in_tokens += sum(request.num_response_tokens for _, request in unfinished)
        oldest = filling.step - self.settings.max_staleness if self.settings.order == "finish" else 0
        for oldest_step, group in waiting:
            if oldest_step < oldest:
                account.add("stale", group.rollouts)
                filling.dropped += group.rollouts
            else:
                filling.ready[group.group_id] = (oldest_step, group)
        for oldest_step, request in unfinished:
            if oldest_step < oldest and request.num_response_tokens:
                account.add("stale", request.responses)
                filling.dropped += request.responses
            else:
                self.unfinished.append((oldest_step, request))
        if len(self._chosen(filling)) < self.train_prompts:
            self._submit_unfinished(filling.step)

    def _num_open_tokens(self) -> int:
        """Response tokens that this step has sampled of the groups in flight."""
        return self.source.num_tokens_in_flight - sum(num_tokens for _, num_tokens in self._submitted.values())

    def _submit_unfinished(self, step: int) -> None:
        continued, self.unfinished = self.unfinished, []
        for oldest_step, request in continued:
            num_tokens = request.num_response_tokens
            self._submitted[request.group_id] = (oldest_step if num_tokens else step, num_tokens)
        self.source.submit([request for _, request in continued])

    def _submit_fresh(self, filling: _Filling, count: int) -> None:
        first = self.stream.position
        prompts = self.stream.take(count)
        requests = [GroupRequest(first + offset, prompt, filling.step) for offset, prompt in enumerate(prompts)]
        self._submitted |= {request.group_id: (filling.step, 0) for request in requests}
        self.source.submit(requests)
        filling.num_drawn += count

    def _record(self, finished: Sequence[Group], filling: _Filling) -> None:
        """Book the groups that finished; those with signal are ready."""
        account = filling.account
        for group in finished:
            oldest_step, num_tokens = self._submitted.pop(group.group_id)
            account.generated_tokens += group.num_response_tokens - num_tokens
            account.add_finished(group)
            if self._has_signal(group):
                filling.ready[group.group_id] = (oldest_step, group)
                filling.last_signal, filling.finished_since_signal = self.clock(), 0
            else:
                account.add(_fate_without_signal(group), group.rollouts)
                filling.finished_since_signal += 1

    def _has_signal(self, group: Group) -> bool:
        if not self.settings.dynamic:
            return True
        values = group.metric(self.settings.metric)
        if self.compat.signal_by_std:  # rounding gives [0.1] * 3 a deviation of 1.4e-17
            return len(group.rollouts) == 1 or (len(values) > 1 and bool(np.std(values) > 0))
        return len(values) > 1 and min(values) != max(values)

    def _stop(self, filling: _Filling) -> None:
        """Carry what is in flight over to the next step, or abort it."""
        account = filling.account
        late, requests = self.source.suspend()
        self._record(late, filling)
        for request in requests:
            oldest_step, num_tokens = self._submitted.pop(request.group_id)
            account.generated_tokens += request.num_response_tokens - num_tokens
            if self.carries_over:
                self.unfinished.append((oldest_step, request))
            else:
                account.add("aborted", request.responses)
                filling.dropped += request.responses
        account.carried_out_groups = len(self.unfinished)
        account.carried_out_tokens = sum(request.num_response_tokens for _, request in self.unfinished)

    def _finish(self, filling: _Filling) -> Draw:
        """Take the step's groups; the other ready ones wait for the next step."""
        account = filling.account
        chosen = [] if filling.is_skipped else self._chosen(filling)
        groups = [filling.ready.pop(group_id)[1] for group_id in chosen]
        in_order = sorted(filling.ready) if self.is_in_prompt_order else filling.ready
        self.surplus = [filling.ready[group_id] for group_id in in_order]
        for group in groups:
            account.add("kept", group.rollouts)
        for _, group in self.surplus:
            account.add("surplus", group.rollouts)
        self._watch.add_step(groups, filling.dropped)
        account.reward_seconds = self.source.take_reward_seconds()
        return Draw(groups, filling.num_drawn, account)

    def _give_up(self, filling: _Filling) -> None:
        """Do as `on_exhausted` says: draws are used up and nothing is in flight."""
        outcome, num_prompts = self.settings.on_exhausted, len(self.stream.prompts)
        reason = out_of_draws(self._seen(filling), filling.finished_since_signal, num_prompts, self.settings)
        if outcome == "raise":
            raise NotEnoughSignal(reason)
        filling.is_skipped = outcome == "skip_step" or not filling.ready
        what = "Skipping the step" if filling.is_skipped else "Training on these"
        later = "; these wait for the next one" if filling.is_skipped else ""
        logger.warning("%s %s (sampler.on_exhausted=%s)%s", reason, what, outcome, later)

    def _refuse_no_scores(self, account: TokenAccount, num_groups: int) -> None:
        """Raise if at least `num_groups` groups finished in this step and none of their responses has a score."""
        if account.finished_groups >= num_groups and account.num_unscored == account.num_finished:
            raise no_scores(account)

    def _refuse_silence(self, filling: _Filling) -> None:
        """Raise, with what was seen, when no group with signal finished for too long."""
        seconds = self.clock() - filling.last_signal
        if seconds > self.settings.max_seconds_without_kept and len(self._chosen(filling)) < self.train_prompts:
            raise silence(seconds, filling.step, filling.finished_since_signal, self._seen(filling))

    def _seen(self, filling: _Filling) -> str:
        return (
            f"{filling.num_drawn} drawn prompts and the groups that waited gave {len(filling.ready)} groups with "
            f"signal, {self.train_prompts} are needed: {finished_groups(filling.account)}; "
            f"{self.source.num_in_flight} groups with {self.source.num_tokens_in_flight} response tokens are in "
            "flight."
        )


def _fate_without_signal(group: Group) -> Fate:
    """All right, all wrong, or equal with a mark in between; equal scores may also have different `acc`."""
    accs = group.metric("acc") or [0.0]
    if min(accs) >= 1.0:
        return "all_right"
    return "all_wrong" if max(accs) <= 0.0 else "all_equal"
