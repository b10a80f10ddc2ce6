"""Dynamic sampling: draws prompts until enough groups have signal, and accounts for every token."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dapo_core.config.compat import OURS, Compat
from dapo_core.draw.account import Draw, TokenAccount, has_signal
from dapo_core.draw.groups import Group, GroupRequest
from dapo_core.draw.prompts import PromptStream
from dapo_core.draw.report import (
    DrawProgress,
    NotEnoughSignal,
    draw_summary,
    exhausted_message,
    no_scores_error,
    nothing_to_learn,
    stalled_error,
)
from dapo_core.draw.source import GroupSource

if TYPE_CHECKING:
    from dapo_core.config.sampler import SamplerConfig

logger = logging.getLogger(__name__)


@dataclass
class _DrawState:
    """State of a draw in progress."""

    step: int
    last_signal: float  # time at which the last group with signal finished
    account: TokenAccount = field(default_factory=TokenAccount)
    ready: dict[int, Group] = field(default_factory=dict)  # with signal, by group id
    num_drawn: int = 0  # prompts
    finished_since_signal: int = 0  # groups
    is_skipped: bool = False


class Sampler:
    """Fills training steps with groups that have signal.

    The line holds the open prompts, in prompt order. A step is full once P = train_prompts of the
    first (1 + window) * P in line are groups with signal; it takes the earliest P of them, whatever
    their length. Other groups, finished or not, carry over into the next step. At most
    (1 + max_staleness) * P prompts are open at a time, and a step waits for groups that it could
    not pass over without making them older than max_staleness steps.

    With `runs_ahead`, groups stay in flight after a draw, and prompts are drawn for the next one,
    until `pause`. They count as drawn in the step whose weights sample them.

    With `is_deterministic`, a step is complete only once no group is in flight, so the result does
    not depend on timing.
    """

    def __init__(
        self,
        source: GroupSource,
        stream: PromptStream,
        settings: SamplerConfig,
        progress: DrawProgress,
        compat: Compat = OURS,
        is_deterministic: bool = False,
        runs_ahead: bool = False,
    ) -> None:
        self.source = source
        self.stream = stream
        self.train_prompts = progress.train_prompts
        self.settings = settings
        self.progress = progress
        self.compat = compat
        self.is_deterministic = is_deterministic
        self.runs_ahead = runs_ahead
        self.clock = progress.clock
        self.surplus: list[Group] = []  # with signal, for later steps
        self.unfinished: list[GroupRequest] = []
        # groups in flight by id: the step that drew it, its tokens at submission
        self._submitted: dict[int, tuple[int, int]] = {}
        self._ahead: _DrawState | None = None  # the next step's, while its groups are in flight

    def draw(self, step: int, while_waiting: Callable[[], None] = lambda: None) -> Draw:
        """Return the groups of training step `step`; calls `while_waiting` about once a second.

        Starts with the surplus and unfinished groups of earlier steps, then draws new prompts. Once
        the step is full, other groups with signal become surplus, and unfinished ones carry over,
        in flight with `runs_ahead`.

        Raises NotEnoughSignal if the draws are exhausted (on_exhausted=raise) or no group with
        signal finishes for max_seconds_without_kept; RolloutError if none finishes at all;
        RewardError if no response could be scored.
        """
        state = self._ahead or self._begin(step)
        self._ahead = None
        self._carry_in(state)
        self.progress.begin(step, len(state.ready))
        while len(self._chosen(state)) < self.train_prompts:
            if num_fresh := self._num_to_draw(state, 1 + self.settings.max_staleness):
                self._check_scores(state.account, self.settings.gen_prompts)
                self._submit_fresh(state, num_fresh)
            elif not self.source.num_in_flight:
                self._check_scores(state.account, self.train_prompts)
                self._give_up(state)
                break
            self._record(self.source.finished(), state)
            num_before = sum(num_tokens for _, num_tokens in self._submitted.values())
            num_new_tokens = self.source.num_tokens_in_flight - num_before
            self.progress.show(state.account, state.num_drawn, len(state.ready), num_new_tokens)
            while_waiting()
            self._check_progress(state)
        if not self.runs_ahead:
            self._suspend(state)
        self.progress.end(len(state.ready))
        if not self.settings.dynamic:  # with dynamic sampling, a full step has scores
            self._check_scores(state.account, self.train_prompts)
        return self._finish(state)

    def pause(self) -> None:
        """Suspend the groups that run ahead of the next draw, which resumes them."""
        if self._ahead is not None:
            self._suspend(self._ahead)
            self.surplus += self._ahead.ready.values()
            self.surplus.sort(key=lambda group: group.group_id)
            self._ahead.ready = {}

    def redraw(
        self, step: int, surplus: Sequence[Group], unfinished: Sequence[GroupRequest]
    ) -> None:
        """Resample the prompts of these groups in step `step`, discarding their responses."""
        items: list[Group | GroupRequest] = [*surplus, *unfinished]
        items.sort(key=lambda item: item.group_id)
        self.unfinished = [GroupRequest(item.group_id, item.prompt, step) for item in items]

    def _chosen(self, state: _DrawState) -> list[int]:
        """Return the ids of the groups that the step takes if it ends now; at most P."""
        if self.is_deterministic and self.source.num_in_flight:
            return []
        waiting = {request.group_id: request.step for request in self.unfinished}
        waiting |= {group_id: step for group_id, (step, _) in self._submitted.items()}
        oldest = state.step - self.settings.max_staleness
        due = [group_id for group_id, step in waiting.items() if step <= oldest]
        first_due = min(due, default=self.stream.position)
        num_ahead = self.train_prompts + round(self.settings.window * self.train_prompts)
        line = sorted([*state.ready, *waiting])[:num_ahead]
        taken = [group_id for group_id in line if group_id in state.ready and group_id < first_due]
        return taken[: self.train_prompts]

    def _num_to_draw(self, state: _DrawState, num_steps: int) -> int:
        """Return how many prompts to draw: gen_prompts are open, within P and those of the steps.

        `num_steps` is how many steps may still take what this one draws.
        """
        settings = self.settings
        if self.is_deterministic and self.source.num_in_flight:
            return 0
        max_open = min(settings.gen_prompts, num_steps * self.train_prompts)
        num_open = len(state.ready) + self.source.num_in_flight
        num_new = max(max_open, self.train_prompts) - num_open
        if settings.max_num_gen_batches:
            max_drawn = settings.gen_prompts * settings.max_num_gen_batches
            num_new = min(num_new, max_drawn - state.num_drawn)
        elif state.finished_since_signal >= max(len(self.stream.prompts), settings.gen_prompts):
            return 0  # no limit on draws, but a whole epoch without signal
        return max(num_new, 0)

    def _begin(self, step: int) -> _DrawState:
        """Return the state of a draw, with an account of what earlier ones left."""
        state = _DrawState(step, self.clock())
        groups, tokens = self._open_work()
        state.account.carried_in_groups = len(self.surplus) + groups
        surplus_tokens = sum(group.num_response_tokens for group in self.surplus)
        state.account.carried_in_tokens = surplus_tokens + tokens
        return state

    def _open_work(self) -> tuple[int, int]:
        """Return the number of unfinished groups, and their tokens as of the last suspension."""
        waiting = [request.num_response_tokens for request in self.unfinished]
        running = [num_tokens for _, num_tokens in self._submitted.values()]
        return len(waiting) + len(running), sum(waiting) + sum(running)

    def _carry_in(self, state: _DrawState) -> None:
        state.last_signal = self.clock()
        state.ready = {group.group_id: group for group in self.surplus}
        self.surplus = []
        if len(self._chosen(state)) < self.train_prompts:
            self._submit(self.unfinished)
            self.unfinished = []

    def _submit_fresh(self, state: _DrawState, count: int) -> None:
        prompts = self.stream.take(count)
        self._submit([GroupRequest(number, prompt, state.step) for number, prompt in prompts])
        state.num_drawn += count

    def _submit(self, requests: Sequence[GroupRequest]) -> None:
        self._submitted |= {
            request.group_id: (request.step, request.num_response_tokens) for request in requests
        }
        self.source.submit(requests)

    def _record(self, finished: Sequence[Group], state: _DrawState) -> None:
        """Account for finished groups; those with signal become ready."""
        account = state.account
        for group in finished:
            _, num_before = self._submitted.pop(group.group_id)
            account.generated_tokens += group.num_response_tokens - num_before
            account.add_finished(group)
            gives_signal = has_signal(group, self.settings.metric, self.compat)
            is_scored = all(rollout.is_scored for rollout in group.rollouts)
            if self.stream.backoff is not None and is_scored:
                self.stream.backoff.record(group.prompt.index, gives_signal)
            if not self.settings.dynamic or gives_signal:
                state.ready[group.group_id] = group
                state.last_signal, state.finished_since_signal = self.clock(), 0
            else:
                account.add_without_signal(group)
                self.progress.remember(group)
                state.finished_since_signal += 1

    def _suspend(self, state: _DrawState) -> None:
        """Suspend the groups in flight; the next draw continues them."""
        late, requests = self.source.suspend()
        self._record(late, state)
        for request in requests:
            _, num_before = self._submitted.pop(request.group_id)
            state.account.generated_tokens += request.num_response_tokens - num_before
        self.unfinished += requests

    def _finish(self, state: _DrawState) -> Draw:
        """Return the step's groups; other ready groups become surplus for the next step."""
        account = state.account
        chosen = [] if state.is_skipped else self._chosen(state)
        groups = [state.ready.pop(group_id) for group_id in chosen]
        self.surplus = [state.ready[group_id] for group_id in sorted(state.ready)]
        for group in groups:
            account.add("kept", group.rollouts)
        for group in self.surplus:
            account.add("surplus", group.rollouts)
        account.reward_seconds = self.source.take_reward_seconds()
        if self.runs_ahead and not state.is_skipped:
            self._run_ahead(state)
        account.carried_out_groups, account.carried_out_tokens = self._open_work()
        return Draw(groups, state.num_drawn, account)

    def _run_ahead(self, state: _DrawState) -> None:
        """Keep the engines busy until `pause`."""
        self._submit(self.unfinished)
        self.unfinished = []
        self._submit_fresh(state, self._num_to_draw(state, self.settings.max_staleness))
        self._ahead = self._begin(state.step + 1)

    def _give_up(self, state: _DrawState) -> None:
        """Apply on_exhausted: all draws are used up and nothing is in flight."""
        outcome, num_prompts = self.settings.on_exhausted, len(self.stream.prompts)
        since_signal = state.finished_since_signal
        reason = exhausted_message(
            state.account, self._summary(state), since_signal, num_prompts, self.settings
        )
        if not state.ready:
            reason = nothing_to_learn(state.account, self.train_prompts) + reason
        examples = self.progress.examples()
        if outcome == "raise":
            raise NotEnoughSignal(f"{reason}{examples}")
        state.is_skipped = outcome == "skip_step" or not state.ready
        action = "Skipping the step" if state.is_skipped else "Training on these groups"
        later = "; its groups wait for the next step" if state.is_skipped else ""
        way = f"{action} (sampler.on_exhausted={outcome}){later}"
        logger.warning("%s %s%s", reason, way, examples)

    def _check_scores(self, account: TokenAccount, num_groups: int) -> None:
        """Raise RewardError if `num_groups` groups finished and no response has a score."""
        if account.finished_groups >= num_groups and account.num_unscored == account.num_finished:
            raise no_scores_error(account)

    def _check_progress(self, state: _DrawState) -> None:
        """Raise if no group with signal finished for max_seconds_without_kept."""
        seconds = self.clock() - state.last_signal
        is_late = seconds > self.settings.max_seconds_without_kept
        if is_late and len(self._chosen(state)) < self.train_prompts:
            summary, since_signal = self._summary(state), state.finished_since_signal
            error = stalled_error(state.account, summary, since_signal, seconds, state.step)
            raise type(error)(f"{error}{self.progress.examples()}")

    def _summary(self, state: _DrawState) -> str:
        in_flight = self.source.num_in_flight, self.source.num_tokens_in_flight
        num_ready, num_needed = len(state.ready), self.train_prompts
        return draw_summary(state.account, state.num_drawn, num_ready, num_needed, *in_flight)
