"""Dynamic sampling: draw prompts until enough groups carry signal, and account for every token."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from dapo_core.compat import OURS, Compat
from dapo_core.data import PromptStream
from dapo_core.errors import DapoError, RewardError, RolloutError
from dapo_core.rollout import Group, GroupRequest

if TYPE_CHECKING:
    from dapo_core.cluster.rollout_group import RolloutGroup
    from dapo_core.config.training import SamplerConfig

logger = logging.getLogger(__name__)

Fate = Literal["kept", "all_right", "all_wrong", "surplus", "stale", "aborted"]
FATES: tuple[Fate, ...] = ("kept", "all_right", "all_wrong", "surplus", "stale", "aborted")
WASTED: tuple[Fate, ...] = ("all_right", "all_wrong", "stale", "aborted")


class NotEnoughSignal(DapoError, RuntimeError):
    """Dynamic sampling drew its bound of batches and kept too few groups."""


@dataclass
class TokenAccount:
    """Where a step's groups and response tokens went.

    Over a step, of tokens: generated + carried in = kept + all_right + all_wrong + surplus + stale + aborted +
    carried out; of groups the same with those drawn in place of generated. What is carried in is the surplus and
    the carried-out part of the step before.
    """

    groups: dict[Fate, int] = field(default_factory=lambda: dict.fromkeys(FATES, 0))
    tokens: dict[Fate, int] = field(default_factory=lambda: dict.fromkeys(FATES, 0))
    carried_in_groups: int = 0  # surplus and unfinished groups that waited for this step
    carried_in_tokens: int = 0
    carried_out_groups: int = 0  # unfinished, to be continued in the next step
    carried_out_tokens: int = 0  # all their tokens, of whichever step
    generated_tokens: int = 0  # sampled by the engines in this step, whatever their fate
    finished_groups: int = 0  # in this step
    num_right: int = 0  # responses, among the groups that finished in this step
    num_finished: int = 0  # responses
    num_unscored: int = 0  # responses without a score
    reward_seconds: float = 0.0  # engines were idle; only scoring was pending

    def add(self, fate: Fate, num_groups: int, num_tokens: int) -> None:
        """Book groups and their response tokens under a fate."""
        self.groups[fate] += num_groups
        self.tokens[fate] += num_tokens

    def add_group(self, fate: Fate, group: Group) -> None:
        """Book one group under a fate."""
        self.add(fate, 1, group.num_response_tokens)

    @property
    def waste_ratio(self) -> float:
        """Share of tokens that no update will learn from, among those of decided fate."""
        wasted = sum(self.tokens[fate] for fate in WASTED)
        return wasted / max(wasted + self.tokens["kept"], 1)


@dataclass(frozen=True)
class Draw:
    """What one training step learns from."""

    groups: list[Group]  # P of them; fewer only under on_exhausted train_partial or skip_step
    num_gen_batches: int
    account: TokenAccount


@dataclass
class _Filling:
    """A step that does not have its P groups yet."""

    step: int
    account: TokenAccount
    last_kept: float  # time by the sampler's clock
    kept: list[Group] = field(default_factory=list)
    undecided: dict[int, Group] = field(default_factory=dict)  # finished ones by group id
    num_gen_batches: int = 0
    finished_since_kept: int = 0  # groups


class Sampler:
    """Fills training steps with groups that carry signal, in the order in which they finish.

    With `is_deterministic` in prompt order once all of a draw have finished, so that speed decides nothing.
    `while_waiting` may be set; it is called about once a second, and whenever groups finished.
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
        self.clock = clock
        self.while_waiting: Callable[[], None] = lambda: None
        self.surplus: list[tuple[int, Group]] = []  # (step that sampled its oldest token, group)
        self.unfinished: list[tuple[int, GroupRequest]] = []  # likewise
        # Groups in flight: group id -> (step of its oldest token, tokens when submitted).
        self._submitted: dict[int, tuple[int, int]] = {}

    def draw(self, step: int) -> Draw:
        """The groups of training step `step`: surplus of earlier steps first, then those that finish.

        Unfinished groups of the step before continue first. Fresh prompts are drawn `gen_prompts` at a time,
        whenever the groups in flight could not fill the step. Once the step is full, finished groups become
        surplus, and unfinished ones are aborted or carried over. Raises NotEnoughSignal when the bound on draws is
        reached under `on_exhausted: raise`, or the bound on time without a kept group; RolloutError when nothing
        finished in that time.
        """
        filling = _Filling(step, TokenAccount(), self.clock())
        self._carry_in(filling)
        while len(filling.kept) < self.train_prompts:
            if len(filling.kept) + len(filling.undecided) + self.source.num_in_flight < self.train_prompts:
                self._refuse_no_scores(filling.account)
                if filling.num_gen_batches < self.settings.max_num_gen_batches:
                    self._submit_fresh(filling)
                elif not self.source.num_in_flight:
                    self._give_up(filling)
                    break
            self._record(self.source.finished(), filling)
            self.while_waiting()
            self._decide(filling)
            self._refuse_silence(filling)
        self._stop(filling)
        self._refuse_no_scores(filling.account)
        for group in filling.kept:
            filling.account.add_group("kept", group)
        filling.account.reward_seconds = self.source.take_reward_seconds()
        return Draw(filling.kept, filling.num_gen_batches, filling.account)

    def _carry_in(self, filling: _Filling) -> None:
        account, waiting, unfinished = filling.account, self.surplus, self.unfinished
        self.surplus, self.unfinished = [], []
        account.carried_in_groups = len(waiting) + len(unfinished)
        account.carried_in_tokens = sum(group.num_response_tokens for _, group in waiting)
        account.carried_in_tokens += sum(request.num_response_tokens for _, request in unfinished)
        oldest = filling.step - self.settings.max_staleness
        for oldest_step, group in waiting:
            if oldest_step < oldest:
                account.add_group("stale", group)
            elif len(filling.kept) < self.train_prompts:
                filling.kept.append(group)
            else:
                self._set_aside(oldest_step, group, account)
        for oldest_step, request in unfinished:
            if oldest_step < oldest and request.num_response_tokens:
                account.add("stale", 1, request.num_response_tokens)
            else:
                self.unfinished.append((oldest_step, request))
        if len(filling.kept) < self.train_prompts:
            self._submit_unfinished(filling.step)

    def _submit_unfinished(self, step: int) -> None:
        continued, self.unfinished = self.unfinished, []
        for oldest_step, request in continued:
            num_tokens = request.num_response_tokens
            self._submitted[request.group_id] = (oldest_step if num_tokens else step, num_tokens)
        self.source.submit([request for _, request in continued])

    def _submit_fresh(self, filling: _Filling) -> None:
        first = self.stream.position
        prompts = self.stream.take(self.settings.gen_prompts)
        requests = [GroupRequest(first + offset, prompt, filling.step) for offset, prompt in enumerate(prompts)]
        self._submitted |= {request.group_id: (filling.step, 0) for request in requests}
        self.source.submit(requests)
        filling.num_gen_batches += 1

    def _record(self, finished: Sequence[tuple[int, Group]], filling: _Filling) -> None:
        account = filling.account
        for group_id, group in finished:
            account.generated_tokens += group.num_response_tokens - self._submitted[group_id][1]
            account.finished_groups += 1
            account.num_right += sum(rollout.verdict == "right" for rollout in group.rollouts)
            account.num_finished += len(group.rollouts)
            account.num_unscored += sum(not rollout.is_scored for rollout in group.rollouts)
            filling.undecided[group_id] = group
            filling.finished_since_kept += 1

    def _decide(self, filling: _Filling) -> None:
        """Keep, set aside or drop the groups that finished; under `is_deterministic` once none is in flight."""
        if self.is_deterministic and self.source.num_in_flight:
            return
        account, groups = filling.account, filling.undecided
        filling.undecided = {}
        for group_id in sorted(groups) if self.is_deterministic else groups:
            group = groups[group_id]
            oldest_step, _ = self._submitted.pop(group_id)
            if not self._has_signal(group):
                is_right = min(group.metric("acc"), default=0.0) >= 1.0
                account.add_group("all_right" if is_right else "all_wrong", group)
            elif len(filling.kept) < self.train_prompts:
                filling.kept.append(group)
                filling.last_kept, filling.finished_since_kept = self.clock(), 0
            else:
                self._set_aside(oldest_step, group, account)

    def _has_signal(self, group: Group) -> bool:
        if not self.settings.dynamic:
            return True
        values = group.metric(self.settings.metric)
        if self.compat.signal_by_std:  # rounding gives [0.1] * 3 a deviation of 1.4e-17
            return len(group.rollouts) == 1 or (len(values) > 1 and bool(np.std(values) > 0))
        return len(values) > 1 and min(values) != max(values)

    def _set_aside(self, oldest_step: int, group: Group, account: TokenAccount) -> None:
        self.surplus.append((oldest_step, group))
        account.add_group("surplus", group)

    def _stop(self, filling: _Filling) -> None:
        """Abort what is in flight, or carry it over to the next step."""
        account = filling.account
        if self.settings.in_flight == "abort":
            late, num_groups, num_tokens = self.source.abort()
            self._record(late, filling)
            self._decide(filling)
            account.generated_tokens += num_tokens
            account.add("aborted", num_groups, num_tokens)
        else:
            late, requests = self.source.suspend()
            self._record(late, filling)
            self._decide(filling)
            for request in requests:
                oldest_step, num_tokens = self._submitted[request.group_id]
                account.generated_tokens += request.num_response_tokens - num_tokens
                self.unfinished.append((oldest_step, request))
            account.carried_out_groups = len(self.unfinished)
            account.carried_out_tokens = sum(request.num_response_tokens for _, request in self.unfinished)
        self._submitted.clear()

    def _give_up(self, filling: _Filling) -> None:
        """Do as `on_exhausted` says: draws are used up and nothing is in flight."""
        message = f"{self._seen(filling)} "
        if self.settings.on_exhausted == "raise":
            raise NotEnoughSignal(
                message + "Use prompts nearer to the model's ability, raise rollout.group_size or "
                "sampler.max_num_gen_batches, lower train.train_prompts, or set sampler.on_exhausted to "
                "train_partial or skip_step"
            )
        if self.settings.on_exhausted == "train_partial" and filling.kept:
            logger.warning("%sTraining on these (sampler.on_exhausted=train_partial)", message)
            return
        logger.warning("%sSkipping the step (sampler.on_exhausted=%s)", message, self.settings.on_exhausted)
        for group in filling.kept:
            filling.account.add_group("stale", group)
        filling.kept = []

    def _refuse_no_scores(self, account: TokenAccount) -> None:
        """Raise when no response that finished in this step has a score: the scorer is at fault."""
        if account.num_unscored and account.num_unscored == account.num_finished:
            raise RewardError(
                f"the scorer raised or ran out of time on all {account.num_finished} responses that finished in "
                "this step; the log has its first tracebacks: correct the file of custom_reward.path, or raise "
                "reward.timeout_seconds"
            )

    def _refuse_silence(self, filling: _Filling) -> None:
        """Raise, with what was seen, when no group was kept for too long."""
        seconds = self.clock() - filling.last_kept
        if len(filling.kept) >= self.train_prompts or seconds <= self.settings.max_seconds_without_kept:
            return
        message = f"no group was kept for {seconds:.0f} s of training step {filling.step}. {self._seen(filling)} "
        if not filling.finished_since_kept:
            raise RolloutError(
                message + "In this time no group finished. With few tokens in flight an engine hangs, and "
                "rollout.engine=hf shows whether it is that one; with as many as there can be, scoring does: "
                "lower reward.timeout_seconds; else raise sampler.max_seconds_without_kept or lower "
                "rollout.max_response_tokens"
            )
        raise NotEnoughSignal(
            message + "Use prompts nearer to the model's ability, raise rollout.group_size, or raise "
            "sampler.max_seconds_without_kept"
        )

    def _seen(self, filling: _Filling) -> str:
        account = filling.account
        unscored = f"{account.num_unscored} responses have no score, " if account.num_unscored else ""
        num_decided = account.finished_groups - len(filling.undecided)
        num_even = account.groups["all_right"] + account.groups["all_wrong"]
        return (
            f"{filling.num_gen_batches} draws of {self.settings.gen_prompts} prompts gave {len(filling.kept)} "
            f"groups with signal, {self.train_prompts} are needed: of {num_decided} finished groups "
            f"{account.groups['all_right']} were all right and {account.groups['all_wrong']} all wrong, "
            f"{unscored}{1 - num_even / max(num_decided, 1):.1%} were kept (mean accuracy "
            f"{account.num_right / max(account.num_finished, 1):.1%}); {self.source.num_in_flight} groups with "
            f"{self.source.num_tokens_in_flight} response tokens are in flight."
        )
