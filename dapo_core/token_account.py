"""Where a step's groups and tokens went, and whether what is trained is as long as what was drawn."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from dapo_core.engines.base import Response
from dapo_core.groups import Group, Rollout

logger = logging.getLogger(__name__)

Fate = Literal["kept", "all_right", "all_wrong", "all_equal", "surplus", "stale", "aborted"]
FATES: tuple[Fate, ...] = get_args(Fate)
NO_SIGNAL: tuple[Fate, ...] = ("all_right", "all_wrong", "all_equal")  # the last: neither of the others
WASTED: tuple[Fate, ...] = (*NO_SIGNAL, "stale", "aborted")
MEASURED = ("finished", "kept", "surplus", "aborted")  # sets of responses with a mean length and a share cut
WATCHED_STEPS = 10
MAX_LENGTH_DIFFERENCE = 0.05  # relative, between trained responses and those that could have been


@dataclass
class Lengths:
    """Lengths of a set of responses."""

    num_responses: int = 0
    num_tokens: int = 0
    num_cut: int = 0  # ended by the length limit

    def add(self, responses: Iterable[Rollout | Response]) -> None:
        """Count responses, finished or not."""
        for response in responses:
            self.num_responses += 1
            self.num_tokens += len(response.response_ids)
            self.num_cut += response.finish_reason == "length"


@dataclass
class TokenAccount:
    """Where a step's groups and response tokens went.

    Over a step, of tokens: generated + carried in = kept + all_right + all_wrong + all_equal + surplus + stale +
    aborted + carried out; of groups the same with those drawn in place of generated. What is carried in is the
    surplus and the carried-out part of the step before.
    """

    groups: dict[Fate, int] = field(default_factory=lambda: dict.fromkeys(FATES, 0))
    tokens: dict[Fate, int] = field(default_factory=lambda: dict.fromkeys(FATES, 0))
    lengths: dict[str, Lengths] = field(default_factory=lambda: {name: Lengths() for name in MEASURED})
    carried_in_groups: int = 0  # surplus and unfinished groups that waited for this step
    carried_in_tokens: int = 0
    carried_out_groups: int = 0  # unfinished, to be continued in the next step
    carried_out_tokens: int = 0  # all their tokens, of whichever step
    generated_tokens: int = 0  # sampled by the engines in this step, whatever their fate
    finished_groups: int = 0  # in this step
    num_right: int = 0  # responses, among the groups that finished in this step
    num_unscored: int = 0  # likewise, without a score
    scores: dict[str, list[tuple[float, bool]]] = field(default_factory=dict)  # by set: score, and whether right
    reward_seconds: float = 0.0  # engines were idle; only scoring was pending

    def add(self, fate: Fate, responses: Sequence[Rollout | Response]) -> None:
        """Book one group's responses under a fate."""
        self.groups[fate] += 1
        self.tokens[fate] += sum(len(response.response_ids) for response in responses)
        if fate in self.lengths:
            self.lengths[fate].add(responses)

    def add_finished(self, group: Group) -> None:
        """Count a group that finished in this step, whatever its fate."""
        self.finished_groups += 1
        self.num_right += sum(rollout.verdict == "right" for rollout in group.rollouts)
        self.num_unscored += sum(not rollout.is_scored for rollout in group.rollouts)
        self.lengths["finished"].add(group.rollouts)
        if group.prompt.dataset:
            scored = [
                (rollout.score, rollout.verdict == "right") for rollout in group.rollouts if rollout.is_scored
            ]
            self.scores.setdefault(group.prompt.dataset, []).extend(scored)

    @property
    def num_finished(self) -> int:
        """Responses of the groups that finished in this step."""
        return self.lengths["finished"].num_responses

    @property
    def without_signal(self) -> str:
        """Its groups without signal, such as `2 all right, 4 all wrong`; all equal ones where there are any."""
        fates = NO_SIGNAL if self.groups["all_equal"] else NO_SIGNAL[:2]
        return ", ".join(f"{self.groups[fate]} {fate.replace('_', ' ')}" for fate in fates)

    @property
    def waste_ratio(self) -> float:
        """Share of tokens that no update will learn from, among those of decided fate."""
        wasted = sum(self.tokens[fate] for fate in WASTED)
        return wasted / max(wasted + self.tokens["kept"], 1)


class LengthWatch:
    """Warns when the responses trained on are shorter or longer than those that could have been.

    These are the trained ones and, of the same steps, those dropped although their group had signal (stale) or
    could still have had it (aborted). Groups that still wait are in neither; groups without signal may well have
    other lengths.
    """

    def __init__(self) -> None:
        self._kept: deque[list[int]] = deque(maxlen=WATCHED_STEPS)  # lengths, a list for each step
        self._dropped: deque[list[tuple[int, bool]]] = deque(maxlen=WATCHED_STEPS)  # (tokens so far, is whole)

    def add_step(self, kept: Iterable[Group], dropped: Iterable[Rollout | Response]) -> None:
        """Look at a step more; the window begins again after a warning."""
        self._kept.append([len(rollout.response_ids) for group in kept for rollout in group.rollouts])
        self._dropped.append([(len(one.response_ids), one.finish_reason != "abort") for one in dropped])
        all_dropped = [one for step in self._dropped for one in step]
        if len(self._kept) < WATCHED_STEPS or not any(self._kept) or not all_dropped:
            return
        trained = [(length, True) for step in self._kept for length in step]
        kept_mean, all_mean = expected_length(trained), expected_length(trained + all_dropped)
        if abs(kept_mean / all_mean - 1) <= MAX_LENGTH_DIFFERENCE:
            return
        self._kept.clear()
        self._dropped.clear()
        logger.warning(
            "the responses of the last %d steps that were trained on have %.0f tokens on average; with those of "
            "dropped groups it is at least %.0f: which groups are trained depends on their length. "
            "sampler.order=finish does that, as it keeps the groups that finish first; set sampler.order=stream",
            WATCHED_STEPS,
            kept_mean,
            all_mean,
        )


def expected_length(responses: Sequence[tuple[int, bool]]) -> float:
    """Mean length of responses, some of which were stopped before their end: (tokens, whether that is all).

    The area below the Kaplan-Meier estimate of the share of responses longer than t tokens, up to the longest one
    seen; so a lower bound where the longest ones were stopped. Without stopped ones the ordinary mean.
    """
    lengths = np.array([length for length, _ in responses])
    is_whole = np.array([whole for _, whole in responses])
    times, places = np.unique(lengths, return_inverse=True)
    num_ended = np.bincount(places, weights=is_whole)
    num_at_risk = len(lengths) - np.concatenate([[0], np.cumsum(np.bincount(places))[:-1]])
    share_longer = np.cumprod(1 - num_ended / num_at_risk)
    return float(times[0] + (share_longer[:-1] * np.diff(times)).sum())
