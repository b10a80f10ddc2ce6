"""Accounting of a step's groups and tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from dapo_core.config.compat import Compat
from dapo_core.draw.groups import Group, Rollout

Fate = Literal["kept", "all_right", "all_wrong", "all_equal", "surplus"]
FATES: tuple[Fate, ...] = get_args(Fate)
NO_SIGNAL: tuple[Fate, ...] = ("all_right", "all_wrong", "all_equal")  # all_equal: other values
WITH_LENGTHS = ("finished", "kept", "surplus")  # sets whose response lengths are reported


@dataclass
class Lengths:
    """Lengths of a set of responses."""

    num_responses: int = 0
    num_tokens: int = 0
    num_cut: int = 0  # by the length limit

    def add(self, responses: Iterable[Rollout]) -> None:
        for response in responses:
            self.num_responses += 1
            self.num_tokens += len(response.response_ids)
            self.num_cut += response.finish_reason == "length"


@dataclass
class TokenAccount:
    """Where a step's groups and response tokens went.

    Tokens balance over a step: generated + carried in = kept + all_right + all_wrong + all_equal +
    surplus + carried out. Groups balance likewise, with drawn in place of generated. Carried in is
    the previous step's surplus plus its carried out.
    """

    groups: dict[Fate, int] = field(default_factory=lambda: dict.fromkeys(FATES, 0))
    tokens: dict[Fate, int] = field(default_factory=lambda: dict.fromkeys(FATES, 0))
    lengths: dict[str, Lengths] = field(
        default_factory=lambda: {name: Lengths() for name in WITH_LENGTHS}
    )
    carried_in_groups: int = 0  # surplus and unfinished groups of earlier steps
    carried_in_tokens: int = 0
    carried_out_groups: int = 0  # unfinished; continued in the next step
    carried_out_tokens: int = 0  # all their tokens, from any step
    generated_tokens: int = 0  # sampled in this step, whatever their fate
    finished_groups: int = 0  # in this step
    num_right: int = 0  # right responses in the groups that finished in this step
    num_unscored: int = 0  # responses without a score in these groups
    num_unread: int = 0  # responses with the verdict no_answer in these groups
    num_answers: int = 0  # responses with an answer that the scorer reports in these groups
    unread_groups: int = 0  # without signal, and no response has an answer; a part of all_wrong
    # by set: (score, is right)
    scores: dict[str, list[tuple[float, bool]]] = field(default_factory=dict)
    reward_seconds: float = 0.0  # engines were idle; only scoring was pending

    def add(self, fate: Fate, responses: Sequence[Rollout]) -> None:
        """Account for one group's responses under a fate."""
        self.groups[fate] += 1
        self.tokens[fate] += sum(len(response.response_ids) for response in responses)
        if fate in self.lengths:
            self.lengths[fate].add(responses)

    def add_without_signal(self, group: Group) -> None:
        """Account for a group of equal rewards."""
        self.add(fate_without_signal(group), group.rollouts)
        self.unread_groups += all(rollout.verdict == "no_answer" for rollout in group.rollouts)

    def add_finished(self, group: Group) -> None:
        """Count a group that finished in this step, whatever its fate."""
        self.finished_groups += 1
        self.num_right += sum(rollout.verdict == "right" for rollout in group.rollouts)
        self.num_unscored += sum(not rollout.is_scored for rollout in group.rollouts)
        self.num_unread += sum(rollout.verdict == "no_answer" for rollout in group.rollouts)
        self.num_answers += sum(rollout.answer is not None for rollout in group.rollouts)
        self.lengths["finished"].add(group.rollouts)
        if group.prompt.dataset:
            scored = [rollout for rollout in group.rollouts if rollout.is_scored]
            values = self.scores.setdefault(group.prompt.dataset, [])
            values += [(rollout.score, rollout.verdict == "right") for rollout in scored]

    @property
    def num_finished(self) -> int:
        """Responses in the groups that finished in this step."""
        return self.lengths["finished"].num_responses

    @property
    def without_signal(self) -> str:
        """The groups without signal, such as `2 all right, 4 all wrong, 3 without an answer`."""
        groups, num_unread = self.groups, self.unread_groups
        parts = [
            f"{groups['all_right']} all right",
            f"{groups['all_wrong'] - num_unread} all wrong",
        ]
        parts += [f"{num_unread} without an answer"] if num_unread else []
        parts += [f"{groups['all_equal']} all equal"] if groups["all_equal"] else []
        return ", ".join(parts)

    @property
    def waste_ratio(self) -> float:
        """Share of wasted tokens among wasted and kept tokens."""
        wasted = sum(self.tokens[fate] for fate in NO_SIGNAL)
        return wasted / max(wasted + self.tokens["kept"], 1)


@dataclass(frozen=True)
class Draw:
    """The groups of one training step."""

    groups: list[Group]  # P of them; fewer only with on_exhausted=train_partial or skip_step
    num_drawn: int  # prompts
    account: TokenAccount


def has_signal(group: Group, metric: str, compat: Compat) -> bool:
    """True if the group's responses differ in the filter metric."""
    values = group.metric(metric)
    if compat.signal_by_std:  # rounding gives [0.1] * 3 a std of 1.4e-17
        return len(group.rollouts) == 1 or (len(values) > 1 and bool(np.std(values) > 0))
    return len(values) > 1 and min(values) != max(values)


def fate_without_signal(group: Group) -> Fate:
    """Return all_right, all_wrong, or all_equal for others: equal scores with different `acc`."""
    accs = group.metric("acc") or [0.0]
    if min(accs) >= 1.0:
        return "all_right"
    return "all_wrong" if max(accs) <= 0.0 else "all_equal"
