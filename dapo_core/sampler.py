"""Dynamic sampling: draw prompts until enough groups carry signal, and account for every token."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from dapo_core.data import Prompt, PromptStream
from dapo_core.errors import NotEnoughSignal
from dapo_core.rollout import Group

if TYPE_CHECKING:
    from dapo_core.config import SamplerConfig

logger = logging.getLogger(__name__)

Fate = Literal["kept", "all_right", "all_wrong", "surplus", "stale", "aborted"]
FATES: tuple[Fate, ...] = ("kept", "all_right", "all_wrong", "surplus", "stale", "aborted")
WASTED: tuple[Fate, ...] = ("all_right", "all_wrong", "stale", "aborted")


class GroupSource(Protocol):
    """Rollout workers seen as one: groups go in by prompt and come out scored, in the order they finish."""

    @property
    def num_in_flight(self) -> int:
        """Groups submitted and neither returned nor aborted."""

    def submit(self, prompts: Sequence[tuple[str, Prompt]]) -> None:
        """Queue one group for each (group id, prompt)."""

    def finished(self) -> list[Group]:
        """Wait until at least one group finished and return all that did."""

    def abort(self) -> tuple[list[Group], int, int]:
        """Drop what is in flight: groups that finished meanwhile, then groups and response tokens dropped."""


@dataclass
class TokenAccount:
    """Where a step's groups and response tokens went.

    Over a step: generated + carried in = kept + all_right + all_wrong + surplus + stale + aborted.
    """

    groups: dict[Fate, int] = field(default_factory=lambda: dict.fromkeys(FATES, 0))
    tokens: dict[Fate, int] = field(default_factory=lambda: dict.fromkeys(FATES, 0))
    generated_tokens: int = 0  # by the engines in this step, whatever became of them
    num_right: int = 0  # responses, among the groups that finished in this step
    num_finished: int = 0  # responses
    reward_seconds: float = 0.0  # the step's sampling waited for scores alone, the engines having nothing left

    def add(self, fate: Fate, num_groups: int, num_tokens: int) -> None:
        """Book groups and their response tokens under a fate."""
        self.groups[fate] += num_groups
        self.tokens[fate] += num_tokens

    def add_group(self, fate: Fate, group: Group) -> None:
        """Book one group under a fate."""
        self.add(fate, 1, group.num_response_tokens)

    @property
    def waste_ratio(self) -> float:
        """Share of the tokens whose fate is decided that no update learned from."""
        wasted = sum(self.tokens[fate] for fate in WASTED)
        return wasted / max(wasted + self.tokens["kept"], 1)


@dataclass(frozen=True)
class Draw:
    """What one training step learns from."""

    groups: list[Group]  # P of them, fewer only under on_exhausted train_partial or skip_step
    num_gen_batches: int
    account: TokenAccount


class Sampler:
    """Fills training steps with groups that carry signal. Groups are judged as they finish."""

    def __init__(
        self, source: GroupSource, stream: PromptStream, train_prompts: int, settings: SamplerConfig
    ) -> None:
        self.source = source
        self.stream = stream
        self.train_prompts = train_prompts
        self.settings = settings
        self.surplus: list[tuple[int, Group]] = []  # (step that generated it, group)

    def draw(self, step: int) -> Draw:
        """The groups of training step `step`: surplus of earlier steps first, then fresh ones.

        Fresh prompts are drawn `gen_prompts` at a time, whenever the groups in flight could not fill the step.
        Once the step is full, finished groups become surplus and unfinished ones are aborted. Raises
        NotEnoughSignal when the bound on draws is reached under `on_exhausted: raise`.
        """
        account = TokenAccount()
        kept = self._take_surplus(step, account)
        num_gen_batches = 0
        while len(kept) < self.train_prompts:
            if len(kept) + self.source.num_in_flight < self.train_prompts:
                if num_gen_batches < self.settings.max_num_gen_batches:
                    self._submit()
                    num_gen_batches += 1
                elif not self.source.num_in_flight:
                    kept = self._exhausted(kept, account, num_gen_batches)
                    break
            for group in self.source.finished():
                self._judge(group, kept, step, account)
        self._abort(kept, step, account)
        for group in kept:
            account.add_group("kept", group)
        return Draw(kept, num_gen_batches, account)

    def _take_surplus(self, step: int, account: TokenAccount) -> list[Group]:
        kept: list[Group] = []
        waiting, self.surplus = self.surplus, []
        for born, group in waiting:
            if step - born > self.settings.max_staleness:
                account.add_group("stale", group)
            elif len(kept) < self.train_prompts:
                kept.append(group)
            else:
                self._set_aside(born, group, account)
        return kept

    def _submit(self) -> None:
        first = self.stream.position
        prompts = self.stream.take(self.settings.gen_prompts)
        self.source.submit([(str(first + offset), prompt) for offset, prompt in enumerate(prompts)])

    def _judge(self, group: Group, kept: list[Group], step: int, account: TokenAccount) -> None:
        right = group.metric("acc")
        account.generated_tokens += group.num_response_tokens
        account.num_right += int(sum(right))
        account.num_finished += len(right)
        values = group.metric(self.settings.metric)
        if self.settings.dynamic and min(values) == max(values):
            account.add_group("all_right" if min(right) == 1.0 else "all_wrong", group)
        elif len(kept) < self.train_prompts:
            kept.append(group)
        else:
            self._set_aside(step, group, account)

    def _set_aside(self, born: int, group: Group, account: TokenAccount) -> None:
        self.surplus.append((born, group))
        account.add_group("surplus", group)

    def _abort(self, kept: list[Group], step: int, account: TokenAccount) -> None:
        late, num_groups, num_tokens = self.source.abort()
        for group in late:
            self._judge(group, kept, step, account)
        account.generated_tokens += num_tokens
        account.add("aborted", num_groups, num_tokens)

    def _exhausted(self, kept: list[Group], account: TokenAccount, num_gen_batches: int) -> list[Group]:
        num_groups = num_gen_batches * self.settings.gen_prompts
        num_even = account.groups["all_right"] + account.groups["all_wrong"]
        accuracy = account.num_right / max(account.num_finished, 1)
        message = (
            f"{num_gen_batches} draws of {self.settings.gen_prompts} prompts gave {len(kept)} groups with signal, "
            f"{self.train_prompts} are needed: of {num_groups} groups {account.groups['all_right']} were all "
            f"right and {account.groups['all_wrong']} all wrong, {1 - num_even / num_groups:.1%} were kept (mean "
            f"accuracy {accuracy:.1%}). "
        )
        if self.settings.on_exhausted == "raise":
            raise NotEnoughSignal(
                message + "Use prompts nearer to the model's ability, raise rollout.group_size or "
                "sampler.max_num_gen_batches, lower train.train_prompts, or set sampler.on_exhausted to "
                "train_partial or skip_step"
            )
        if self.settings.on_exhausted == "train_partial":
            logger.warning("%sTraining on these (sampler.on_exhausted=train_partial)", message)
            return kept
        logger.warning("%sSkipping the step (sampler.on_exhausted=skip_step)", message)
        for group in kept:
            account.add_group("stale", group)
        return []
