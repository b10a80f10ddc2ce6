"""Groups: the G responses to a prompt, from request to scored rollouts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dapo_core.draw.prompts import Prompt
from dapo_core.engines.base import FinishReason, LogProbs, Response, TokenIds
from dapo_core.model.routers import NO_ROUTING, Experts
from dapo_core.model.sampling import Sampling
from dapo_core.reward.scorers import Verdict

# (policy version, number of tokens sampled with its weights) of a response, in token order.
VersionSpans = list[tuple[int, int]]


@dataclass(frozen=True)
class Rollout:
    """One scored response."""

    response_ids: TokenIds
    rollout_log_probs: LogProbs  # from the engine that sampled
    finish_reason: FinishReason
    score: float
    overlong_penalty: float
    verdict: Verdict
    acc: float  # accuracy: 1 right, 0 wrong, unless a custom scorer returns another value
    versions: VersionSpans
    routing: Experts = field(default_factory=lambda: NO_ROUTING)  # Response.routing
    answer: str | None = None  # extracted answer, if the scorer reports one

    @property
    def reward(self) -> float:
        """Score plus overlong penalty; input of the advantages."""
        return self.score + self.overlong_penalty

    @property
    def is_truncated(self) -> bool:
        return self.finish_reason == "length"

    @property
    def is_scored(self) -> bool:
        """Whether the scorer succeeded."""
        return self.verdict not in ("error", "timeout")


@dataclass(frozen=True)
class Group:
    """The G scored responses to one prompt."""

    group_id: int  # GroupRequest.group_id
    prompt: Prompt
    rollouts: list[Rollout]

    @property
    def num_response_tokens(self) -> int:
        return sum(len(rollout.response_ids) for rollout in self.rollouts)

    def metric(self, name: str) -> list[float]:
        """Return the filter metric of each scored rollout: acc, score, or its reward."""
        scored = [rollout for rollout in self.rollouts if rollout.is_scored]
        attribute = name if name in ("acc", "score") else "reward"
        return [getattr(rollout, attribute) for rollout in scored]


@dataclass(frozen=True)
class GroupRequest:
    """One group to sample, new or carried over from an earlier step."""

    group_id: int  # position of its prompt in the stream; negative outside the stream
    prompt: Prompt
    step: int  # training step that drew the prompt, also if a later step continues it
    # [G]; those with finish reason `abort` are continued
    responses: list[Response] = field(default_factory=list)
    versions: list[VersionSpans] = field(default_factory=list)  # [G], of `responses`
    sampling: Sampling | None = None  # None: the engine's default
    num_samples: int | None = None  # None: G

    @property
    def num_response_tokens(self) -> int:
        """Response tokens sampled so far."""
        return sum(len(response.response_ids) for response in self.responses)

    def without_responses(self) -> GroupRequest:
        """Return the request without any sampled responses."""
        return replace(self, responses=[], versions=[])
