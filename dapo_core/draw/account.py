"""Accounting of a step's groups and tokens, and a check that training does not select by length."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from dapo_core.draw.groups import Group, Rollout
from dapo_core.engines.base import Response

logger = logging.getLogger(__name__)

Fate = Literal["kept", "all_right", "all_wrong", "all_equal", "surplus", "stale", "aborted"]
FATES: tuple[Fate, ...] = get_args(Fate)
NO_SIGNAL: tuple[Fate, ...] = (
    "all_right",
    "all_wrong",
    "all_equal",
)  # all_equal: other equal values
WASTED: tuple[Fate, ...] = (*NO_SIGNAL, "stale", "aborted")
MEASURED = ("finished", "kept", "surplus", "aborted")  # sets whose response lengths are reported
WATCHED_STEPS = 10
MAX_LENGTH_DIFFERENCE = (
    0.05  # relative, between trained responses and all that could have been trained on
)


@dataclass
class Lengths:
    """Lengths of a set of responses."""

    num_responses: int = 0
    num_tokens: int = 0
    num_cut: int = 0  # by the length limit

    def add(self, responses: Iterable[Rollout | Response]) -> None:
        """Add responses, finished or not."""
        for response in responses:
            self.num_responses += 1
            self.num_tokens += len(response.response_ids)
            self.num_cut += response.finish_reason == "length"


@dataclass
class TokenAccount:
    """Where a step's groups and response tokens went.

    Tokens balance over a step: generated + carried in = kept + all_right + all_wrong + all_equal +
    surplus + stale
    + aborted + carried out. Groups balance likewise, with drawn in place of generated. Carried in is the previous
    step's surplus plus its carried out.
    """

    groups: dict[Fate, int] = field(default_factory=lambda: dict.fromkeys(FATES, 0))
    tokens: dict[Fate, int] = field(default_factory=lambda: dict.fromkeys(FATES, 0))
    lengths: dict[str, Lengths] = field(
        default_factory=lambda: {name: Lengths() for name in MEASURED}
    )
    carried_in_groups: int = 0  # surplus and unfinished groups of earlier steps
    carried_in_tokens: int = 0
    carried_out_groups: int = 0  # unfinished; continued in the next step
    carried_out_tokens: int = 0  # all their tokens, from any step
    generated_tokens: int = 0  # sampled in this step, whatever their fate
    finished_groups: int = 0  # in this step
    num_right: int = 0  # right responses in the groups that finished in this step
    num_unscored: int = 0  # responses without a score in these groups
    scores: dict[str, list[tuple[float, bool]]] = field(
        default_factory=dict
    )  # by set: (score, is right)
    reward_seconds: float = 0.0  # engines were idle; only scoring was pending

    def add(self, fate: Fate, responses: Sequence[Rollout | Response]) -> None:
        """Account for one group's responses under a fate."""
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
                (rollout.score, rollout.verdict == "right")
                for rollout in group.rollouts
                if rollout.is_scored
            ]
            self.scores.setdefault(group.prompt.dataset, []).extend(scored)

    @property
    def num_finished(self) -> int:
        """Responses in the groups that finished in this step."""
        return self.lengths["finished"].num_responses

    @property
    def without_signal(self) -> str:
        """The groups without signal, such as `2 all right, 4 all wrong`; all equal ones only if
        there are any.
        """
        fates = NO_SIGNAL if self.groups["all_equal"] else NO_SIGNAL[:2]
        return ", ".join(f"{self.groups[fate]} {fate.replace('_', ' ')}" for fate in fates)

    @property
    def waste_ratio(self) -> float:
        """Share of wasted tokens among wasted and kept tokens."""
        wasted = sum(self.tokens[fate] for fate in WASTED)
        return wasted / max(wasted + self.tokens["kept"], 1)


class LengthWatch:
    """Warns if trained responses differ in length from all responses that could have been trained
    on.

    The latter are the trained ones plus those dropped as stale or aborted in the same steps.
    Waiting groups count as neither; groups without signal are left out, because their lengths may
    differ for good reason.
    """

    def __init__(self) -> None:
        self._kept: deque[list[int]] = deque(maxlen=WATCHED_STEPS)  # lengths, one list per step
        self._dropped: deque[list[tuple[int, bool]]] = deque(
            maxlen=WATCHED_STEPS
        )  # (tokens so far, is complete)

    def add_step(self, kept: Iterable[Group], dropped: Iterable[Rollout | Response]) -> None:
        """Add a step to the window, which is cleared after a warning."""
        self._kept.append(
            [len(rollout.response_ids) for group in kept for rollout in group.rollouts]
        )
        self._dropped.append(
            [(len(one.response_ids), one.finish_reason != "abort") for one in dropped]
        )
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
            "the responses trained on in the last %d steps have %.0f tokens on average; with "
            "dropped groups it "
            "would be at least %.0f. Training selects groups by length, because "
            "sampler.order=finish keeps those "
            "that finish first; set sampler.order=stream",
            WATCHED_STEPS,
            kept_mean,
            all_mean,
        )


def expected_length(responses: Sequence[tuple[int, bool]]) -> float:
    """Return the mean length of responses given as (tokens, is complete), some of them cut short.

    This is the area under the Kaplan-Meier estimate of the share of responses longer than t tokens,
    up to the longest one seen: a lower bound if the longest ones are incomplete, the plain mean if
    none is.
    """
    lengths = np.array([length for length, _ in responses])
    is_complete = np.array([complete for _, complete in responses])
    times, bins = np.unique(lengths, return_inverse=True)
    num_ended = np.bincount(bins, weights=is_complete)
    num_at_risk = len(lengths) - np.concatenate([[0], np.cumsum(np.bincount(bins))[:-1]])
    share_longer = np.cumprod(1 - num_ended / num_at_risk)
    return float(times[0] + (share_longer[:-1] * np.diff(times)).sum())


@dataclass(frozen=True)
class Draw:
    """The groups of one training step."""

    groups: list[Group]  # P of them; fewer only with on_exhausted=train_partial or skip_step
    num_drawn: int  # prompts
    account: TokenAccount
